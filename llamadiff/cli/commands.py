"""The commands. Each parses, calls, renders and exits: 0 match or noise, 1 wrong, 2 could not tell."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamadiff.cli.options import (
    FAILING,
    Backend,
    Budget,
    Candidate,
    Chat,
    CheckModel,
    Csv,
    DiffModel,
    Expect,
    Explain,
    FailOn,
    FlashAttn,
    GpuLayers,
    Json,
    KvType,
    Layers,
    Model,
    NameMap,
    NPredict,
    Partial,
    Precision,
    Prompt,
    PromptFile,
    Repack,
    Save,
    Taps,
    Threads,
    Timeout,
    Tokens,
    TokensFile,
    Tolerance,
)
from llamadiff.cli.weights import vectors, weights
from llamadiff.system import exits
from llamadiff.system.collisions import Named, kept, refuse_collisions, saved
from llamadiff.system.errors import UserError
from llamadiff.system.input import read_text
from llamadiff.system.output import encoded, write_text

if TYPE_CHECKING:
    from llamadiff.comparison.result import Comparison
    from llamadiff.llamacpp.request import Settings
    from llamadiff.numerics.tolerances import Rule

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Says which operation of an LLM inference engine is wrong, since which layer, and why: "
    "llama.cpp and an independent NumPy engine run the same tokens, and every tap is compared.",
)

MAX_TOKENS_FILE = 1 << 24  # bytes
MAX_PROMPT_FILE = 1 << 24
_WHOLE_NUMBER = re.compile("[0-9]{1,10}")
_LAYERS = re.compile("([0-9]{1,4})(?:-([0-9]{1,4}))?")


@app.command()
def compare(
    model: Model, prompt: Prompt = None, prompt_file: PromptFile = None, tokens: Tokens = None,
    tokens_file: TokensFile = None, chat: Chat = False, n_predict: NPredict = 0,
    candidate: Candidate = None, name_map: NameMap = None, timeout: Timeout = 600.0,
    taps: Taps = None, layers: Layers = None, partial: Partial = False, json: Json = None, csv: Csv = None,
    save: Save = None, kv_type: KvType = "f32", flash_attn: FlashAttn = False, gpu_layers: GpuLayers = 0,
    repack: Repack = False, threads: Threads = 0, precision: Precision = "f32", engine: Backend = None,
    explain_output: Explain = False, budget: Budget = 600.0, tolerance: Tolerance = None, fail_on: FailOn = "wrong",
    expect: Expect = None,
) -> None:  # fmt: skip
    """Run llama.cpp and the engine on the same tokens; say whether, where and why they part."""
    from llamadiff.llamacpp.child import Child

    text = _prompt(prompt, prompt_file)
    with Child() as child, _progress() as progress:
        from llamadiff.comparison import verbs  # takes as long as llama.cpp's process takes to get ready
        from llamadiff.engines.run_spec import How, Run

        refuse_collisions(
            [
                *verbs.compared_files(model, candidate, name_map),
                *_settings_files(tolerance, tokens_file, prompt_file),
            ],
            [*saved(save), *_reports(json, csv)],
        )
        run = Run(
            text, _token_ids(tokens, tokens_file), chat, n_predict, taps or (), _layer_range(layers),
            _settings(kv_type, flash_attn, gpu_layers, repack, threads),
        )  # fmt: skip
        how = How(
            rules=_rules(tolerance), engine=engine, precision=precision, explain=budget if explain_output else 0.0,
            partial=partial, expect=_token_ids(expect, None, "--expect"), name_map=name_map, timeout=timeout,
            progress=progress,
        )  # fmt: skip
        result = verbs.compare(model, run, candidate, how, save, child)
    _report(result, json, csv)
    _exit(result.verdict, fail_on)


@app.command()
def capture(
    model: Model, output: Annotated[Path, typer.Option("-o", "--output", help="The trace to write.")],
    prompt: Prompt = None, prompt_file: PromptFile = None, tokens: Tokens = None, tokens_file: TokensFile = None,
    chat: Chat = False, n_predict: NPredict = 0, taps: Taps = None, layers: Layers = None, kv_type: KvType = "f32",
    flash_attn: FlashAttn = False, gpu_layers: GpuLayers = 0, repack: Repack = False, threads: Threads = 0,
) -> None:  # fmt: skip
    """Run llama.cpp alone and keep its trace."""
    from llamadiff.comparison import verbs
    from llamadiff.engines.run_spec import How, Run

    text = _prompt(prompt, prompt_file)
    refuse_collisions([("the model", model), *_settings_files(None, tokens_file, prompt_file)], [("--output", output)])
    with _progress() as progress:
        run = Run(
            text, _token_ids(tokens, tokens_file), chat, n_predict, taps or (), _layer_range(layers),
            _settings(kv_type, flash_attn, gpu_layers, repack, threads),
        )  # fmt: skip
        trace = verbs.record(model, run, output, How(progress=progress))
    typer.echo(f"{_shown(output)}: {len(trace)} taps of {len(trace.info.tokens)} tokens", err=True)


@app.command()
def diff(
    baseline: Annotated[Path, typer.Argument(help="The trace that is trusted.")],
    candidate: Annotated[Path, typer.Argument(help="The trace under test.")],
    model: DiffModel = None, partial: Partial = False, expect: Expect = None,
    json: Json = None, csv: Csv = None, tolerance: Tolerance = None, fail_on: FailOn = "wrong",
) -> None:  # fmt: skip
    """Compare two traces; with --model, judge every op of both."""
    from llamadiff.comparison import verbs
    from llamadiff.engines.run_spec import How

    refuse_collisions(_two_traces(baseline, candidate, model, tolerance), _reports(json, csv))
    with _progress() as progress:
        expected = _token_ids(expect, None, "--expect")
        how = How(rules=_rules(tolerance), partial=partial, expect=expected, progress=progress)
        result = verbs.diff(baseline, candidate, model, how)
    _report(result, json, csv)
    _exit(result.verdict, fail_on)


@app.command()
def diagnose(
    baseline: Annotated[Path, typer.Argument(help="The trace that is trusted.")],
    candidate: Annotated[Path, typer.Argument(help="The trace under test.")],
    model: Annotated[Path, typer.Option("--model", help="The .gguf file.", show_default=False)],
    explain_output: Explain = False, budget: Budget = 600.0, partial: Partial = False,
    json: Json = None, tolerance: Tolerance = None, fail_on: FailOn = "wrong",
) -> None:  # fmt: skip
    """Say why the candidate is wrong: every known bug is replayed on what it recorded."""
    from llamadiff.comparison import verbs
    from llamadiff.engines.run_spec import How

    refuse_collisions(_two_traces(baseline, candidate, model, tolerance), _reports(json, None))
    explain = budget if explain_output else 0.0
    with _progress() as progress:
        how = How(rules=_rules(tolerance), explain=explain, partial=partial, progress=progress)
        result = verbs.diff(baseline, candidate, model, how)
    _report(result, json, None, causes=True)
    _exit(result.verdict, fail_on)


@app.command()
def backend(
    model: Model, prompt: Prompt = None, prompt_file: PromptFile = None, tokens: Tokens = None,
    tokens_file: TokensFile = None, chat: Chat = False, n_predict: NPredict = 0,
    json: Json = None, csv: Csv = None, kv_type: KvType = "f32", flash_attn: FlashAttn = False,
    gpu_layers: GpuLayers = 0, repack: Repack = False, threads: Threads = 0,
    keep: Annotated[Path | None, typer.Option("--keep", help="Save each wrong op, with its inputs, here.")] = None,
    tolerance: Tolerance = None, fail_on: FailOn = "wrong",
) -> None:  # fmt: skip
    """Check every node of llama.cpp's graph on its real inputs: for authors of backends and ports."""
    from llamadiff.comparison import verbs
    from llamadiff.engines.run_spec import How, Run

    text = _prompt(prompt, prompt_file)
    refuse_collisions(
        [("the model", model), *_settings_files(tolerance, tokens_file, prompt_file)],
        [*kept(keep), *_reports(json, csv)],
    )
    with _progress() as progress:
        settings = _settings(kv_type, flash_attn, gpu_layers, repack, threads)
        run = Run(text, _token_ids(tokens, tokens_file), chat, n_predict, settings=settings)
        result = verbs.graph(model, run, How(rules=_rules(tolerance), progress=progress), keep)
    _report(result, json, csv)
    _exit(result.verdict, fail_on)


@app.command()
def graph(
    model: Model,
    tokens: Annotated[int, typer.Option("--n-tokens", min=1, max=256, help="Shapes for a prompt of this many.")] = 2,
    dot: Annotated[bool, typer.Option("--dot", help="Graphviz instead of a tree.")] = False,
) -> None:
    """Print llama.cpp's graph of a model: a tree for each layer, with shapes and types."""
    from llamadiff.comparison import verbs
    from llamadiff.report import graph

    nodes = verbs.list_nodes(model, tokens)
    typer.echo(graph.as_dot(nodes), nl=False) if dot else graph.print_tree(nodes)


@app.command()
def bugs() -> None:
    """List the known bugs: what each is, where it shows, what to do about it."""
    from llamadiff.report import listing

    listing.print_bugs()


@app.command()
def check(
    paths: Annotated[list[Path], typer.Argument(help="Recorded traces, or directories of them.")],
    model: CheckModel = None, partial: Partial = False,
    json: Json = None, tolerance: Tolerance = None, fail_on: FailOn = "wrong",
) -> None:  # fmt: skip
    """Check recorded llama.cpp traces against the engine; needs no llama.cpp where the engine runs the file."""
    from llamadiff.comparison import check_traces
    from llamadiff.engines.run_spec import How
    from llamadiff.numerics import tolerances
    from llamadiff.report.json import checks_to_json

    traces = check_traces.traces_in(paths)
    read = [("the model", model), *(("the trace", path) for path in traces), *_settings_files(tolerance, None)]
    refuse_collisions(read, _reports(json, None))
    results = check_traces.check_all(traces, model, How(rules=_rules(tolerance), partial=partial))
    if json != "-":
        for path, result in results:
            typer.echo(f"{result.verdict.upper():6}  {_shown(path)}: {_shown(result.summary)}")
    if json is not None:
        _write(json, checks_to_json(results))
    _exit(tolerances.worst_of([result.verdict for _, result in results]), fail_on)


@app.command()
def taps(
    model: Model, tokens: Annotated[int, typer.Option("--n-tokens", min=1, help="Shapes for this many.")] = 14
) -> None:
    """Print what an engine should write: names, shapes, order; the dozen that matter most are marked."""
    from llamadiff.engines.select import runnable
    from llamadiff.report import listing

    listing.print_taps(runnable(model, tokens), tokens)


@app.command()
def writer(
    language: Annotated[str, typer.Argument(help="c, cpp, rust, js, python, java, go or zig.")],
    model: Annotated[
        Path | None, typer.Option("--model", help="A .gguf file: print the lines that add its taps too.")
    ] = None,
) -> None:
    """Print a writer of the trace file, without dependencies, to paste into an engine."""
    from llamadiff import writers

    writers.check_language(language)
    lines = "" if model is None else _add_lines(language, model)
    typer.echo(writers.source(language) + lines, nl=False)


def _add_lines(language: str, model: Path) -> str:
    from llamadiff.engines.select import runnable
    from llamadiff.writers.lines import add_lines

    return "\n" + add_lines(language, runnable(model, 14))


@app.command()
def demo() -> None:
    """Compare the shipped model, right and then with a bug in it."""
    from llamadiff.comparison import demo as shipped

    with _progress() as progress:
        right, wrong = shipped.run(progress)
    _report(right, None, None)
    typer.echo(f"\nThe same again, with a bug in the engine: its RoPE {shipped.BUG}.\n")
    _report(wrong, None, None)
    raise typer.Exit(0 if (right.verdict, wrong.verdict) == ("match", "wrong") else 1)


@app.command()
def doctor() -> None:
    """Say what is installed, how llama.cpp was built, and what was found wrong."""
    from llamadiff.llamacpp import doctor as examination
    from llamadiff.report import listing

    good = listing.print_checks(examination.examine())
    raise typer.Exit(0 if good else 2)


app.command()(weights)
app.command()(vectors)


def _settings_files(tolerance: Path | None, tokens_file: Path | None, prompt_file: str | None = None) -> list[Named]:
    asked = None if prompt_file == "-" else prompt_file
    return [("the tolerance file", tolerance), ("the tokens file", tokens_file), ("the prompt file", asked)]


def _two_traces(baseline: Path, candidate: Path, model: Path | None, tolerance: Path | None) -> list[Named]:
    traces = [("the baseline", baseline), ("the candidate", candidate), ("the model", model)]
    return [*traces, *_settings_files(tolerance, None)]


def _reports(json: str | None, csv: str | None) -> list[Named]:
    return [("--json", json), ("--csv", csv)]


def _settings(kv_type: str, flash_attn: bool, gpu_layers: int, repack: bool, threads: int) -> Settings:
    from llamadiff.llamacpp.request import Settings

    return Settings(kv_type.upper(), kv_type.upper(), flash_attn, gpu_layers, repack, threads)


def _rules(tolerance: Path | None) -> tuple[Rule, ...]:
    from llamadiff.numerics import tolerances

    return tolerances.RULES if tolerance is None else tolerances.load_rules(tolerance)


def _token_ids(text: str | None, file: Path | None, option: str = "--tokens") -> tuple[int, ...]:
    """Ids separated by commas or white space."""
    if text is not None and file is not None:
        raise UserError("give --tokens or --tokens-file, not both")
    if file is not None:
        text = _read_text(file, MAX_TOKENS_FILE, "a text file of token ids such as 1,15043,29892")
    if text is None:
        return ()
    where = option if file is None else str(file)
    words = text.replace(",", " ").split()
    for word in words:
        if not _WHOLE_NUMBER.fullmatch(word):
            raise UserError(f'{where}: "{word[:40]}" is not a token id; expected whole numbers such as 1,15043,29892')
    if not words:
        raise UserError(f"{where}: no token ids given; expected whole numbers such as 1,15043,29892")
    return tuple(int(word) for word in words)


def _prompt(prompt: str | None, file: str | None) -> str | None:
    """The prompt as given, or that of a file without its last line break, which editors add."""
    if file is None:
        return prompt
    if prompt is not None:
        raise UserError("give a prompt or --prompt-file, not both")
    text = _read_text(file, MAX_PROMPT_FILE, "a prompt as UTF-8 text")
    if not text.removesuffix("\n"):
        raise UserError(f"--prompt-file {file}: is empty; it must hold the prompt")
    return text.removesuffix("\n").removesuffix("\r")


def _read_text(file: str | Path, limit: int, expected: str) -> str:
    """A file of text, or standard input for -. Raises UserError, with what was ``expected``."""
    if file != "-":
        return read_text(Path(file), limit, expected)
    data = sys.stdin.buffer.read(limit + 1)
    if len(data) > limit:
        raise UserError(f"standard input: more than {limit >> 20} MiB; expected {expected}")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise UserError(f"standard input: is not text; expected {expected}") from None


def _layer_range(text: str | None) -> range | None:
    if text is None:
        return None
    match = _LAYERS.fullmatch(text)
    layers = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
    if not layers:
        raise UserError(f"--layers {text}: expected a layer such as 3 or a range such as 0-3")
    return layers


def _report(result: Comparison, json: str | None, csv: str | None, causes: bool = False) -> None:
    """Render to the terminal (``causes``: these alone), unless JSON or CSV takes standard output."""
    if csv is not None:
        _write(csv, result.frame().to_csv(index=False))
    if json is not None:
        from llamadiff.report.json import to_json

        _write(json, to_json(result) + "\n")
    if "-" not in (json, csv):
        from llamadiff.report.terminal.report import make_console, render, render_causes

        (render_causes if causes else render)(result, make_console())


def _write(target: str, text: str) -> None:
    if target == "-":
        sys.stdout.flush()
        sys.stdout.buffer.write(encoded(text))
    else:
        write_text(Path(target), text)


def _exit(verdict: str, fail_on: str) -> None:
    if verdict == "unchecked" and fail_on != "never":
        raise typer.Exit(2)
    raise typer.Exit(1 if verdict in FAILING[fail_on] else 0)


def _progress() -> Any:
    """A status line on standard error, where that is a terminal."""
    from llamadiff.report.status_line import progress

    return progress()


def _shown(text: object) -> str:
    """Foreign text on one line."""
    from llamadiff.report.terminal.escape import shown

    return shown(str(text), 4000)


def _complain(reason: str) -> None:
    sys.stderr.write(f"llamadiff: {_shown(reason)}\n")


def main() -> None:
    """The entry point: a user's mistake is one line on standard error and exit code 2."""
    sys.exit(exits.run(lambda: app(sys.argv[1:] or ["--help"], standalone_mode=False), _complain))


if __name__ == "__main__":
    main()
