"""The commands that judge. Each parses, calls, renders and exits: 0 match or noise, 1 wrong, 2 could not tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from llamadiff.cli import listings
from llamadiff.cli.inputs import (
    costing_of,
    layer_range,
    place_of,
    prompt_of,
    prompt_or_trace,
    rules_of,
    settings_files,
    settings_of,
    token_ids,
    two_traces,
)
from llamadiff.cli.options import (
    FAILING,
    Annotate,
    Backend,
    Budget,
    Candidate,
    Chat,
    CheckCandidate,
    CheckModel,
    DiffModel,
    Expect,
    Explain,
    FailOn,
    FlashAttn,
    GpuLayers,
    Jobs,
    KvType,
    Layers,
    LlamaCpp,
    MaxMean,
    MaxTail,
    Model,
    NameMap,
    Nodes,
    NPredict,
    OnDevice,
    Partial,
    Precision,
    Prompt,
    PromptFile,
    PromptOrTrace,
    Recorded,
    Repack,
    Runner,
    Save,
    Sketch,
    Spend,
    Taps,
    Text,
    Threads,
    Timeout,
    Tokens,
    TokensFile,
    Tolerance,
    Update,
)
from llamadiff.cli.port import port
from llamadiff.cli.replay import replay
from llamadiff.cli.reports import (
    Reports,
    with_files,
    with_reports,
    with_reports_beside_json,
    with_reports_of_several,
)
from llamadiff.cli.sweep import sweep
from llamadiff.cli.tiny import tiny
from llamadiff.cli.variants import variants
from llamadiff.cli.weights import vectors, weights
from llamadiff.system.collisions import kept, refuse_collisions, saved
from llamadiff.system.errors import UserError

app = typer.Typer(
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Says which operation of an LLM inference engine is wrong, since which layer, and why: "
    "llama.cpp and an independent NumPy engine run the same tokens, and every tap is compared.",
    epilog="Exit codes: 0 right, 1 wrong, 2 could not tell; 70 a fault of llamadiff's own.",
)


def _version(asked: bool) -> None:
    if asked:
        from llamadiff import __version__

        typer.echo(f"llamadiff {__version__}")
        raise typer.Exit


@app.callback()
def llamadiff(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.", metavar="")
    ] = False,
) -> None:
    """Options that need no command."""


def compare(
    model: Model, prompt: PromptOrTrace = None, prompt_file: PromptFile = None, tokens: Tokens = None,
    tokens_file: TokensFile = None, chat: Chat = False, n_predict: NPredict = 0,
    candidate: Candidate = None, name_map: NameMap = None, timeout: Timeout = 600.0,
    taps: Taps = None, layers: Layers = None, partial: Partial = False, save: Save = None,
    kv_type: KvType = "f32", flash_attn: FlashAttn = False, gpu_layers: GpuLayers = 0,
    repack: Repack = False, threads: Threads = 0, llama_cpp: LlamaCpp = None, runner: Runner = None,
    device: OnDevice = None,
    precision: Precision = "f32", engine: Backend = None,
    explain_output: Explain = False, budget: Budget = 600.0, tolerance: Tolerance = None, fail_on: FailOn = "wrong",
    expect: Expect = None, text: Text = None, spend: Spend = None, *, reports: Reports,
) -> None:  # fmt: skip
    """Run llama.cpp and the engine on the same tokens; say whether, where and why they part."""
    from llamadiff.llamacpp.child import Child

    prompt, candidate = prompt_or_trace(prompt, candidate)
    words = prompt_of(prompt, prompt_file)
    place = place_of(llama_cpp, runner)
    with Child(place) as child, _progress() as progress:
        from llamadiff.comparison import verbs  # takes as long as llama.cpp's process takes to get ready
        from llamadiff.engines.run_spec import How, Run

        child.meanwhile.append(reports.get_ready)
        costing = costing_of(candidate, text, spend)
        refuse_collisions(
            [
                *verbs.compared_files(model, candidate, name_map),
                *settings_files(tolerance, tokens_file, prompt_file),
                ("the text", text),
            ],
            [*saved(save), *reports.named],
        )
        run = Run(
            words, token_ids(tokens, tokens_file), chat, n_predict, taps or (), layer_range(layers),
            settings_of(kv_type, flash_attn, gpu_layers, repack, threads, place, device),
        )  # fmt: skip
        how = How(
            rules=rules_of(tolerance), engine=engine, precision=precision, explain=budget if explain_output else 0.0,
            partial=partial, expect=token_ids(expect, None, "--expect"), name_map=name_map, timeout=timeout,
            progress=progress, pictures=reports.pictures, costing=costing,
        )  # fmt: skip
        result = verbs.compare(model, run, candidate, how, save, child)
    reports.write(result)
    _exit(result.verdict, fail_on)


def capture(
    model: Model, output: Annotated[Path, typer.Option("-o", "--output", help="The trace to write.")],
    prompt: Prompt = None, prompt_file: PromptFile = None, tokens: Tokens = None, tokens_file: TokensFile = None,
    chat: Chat = False, n_predict: NPredict = 0, taps: Taps = None, layers: Layers = None, kv_type: KvType = "f32",
    flash_attn: FlashAttn = False, gpu_layers: GpuLayers = 0, repack: Repack = False, threads: Threads = 0,
    llama_cpp: LlamaCpp = None, runner: Runner = None,
    device: OnDevice = None,
    sketch: Sketch = False, nodes: Nodes = False,
) -> None:  # fmt: skip
    """Run llama.cpp, have the engine judge it, and keep its trace."""
    from llamadiff.comparison import verbs
    from llamadiff.comparison.provenance import CHECKED
    from llamadiff.engines.run_spec import How, Run

    text, place = prompt_of(prompt, prompt_file), place_of(llama_cpp, runner)
    refuse_collisions([("the model", model), *settings_files(None, tokens_file, prompt_file)], [("--output", output)])
    with _progress() as progress:
        run = Run(
            text, token_ids(tokens, tokens_file), chat, n_predict, taps or (), layer_range(layers),
            settings_of(kv_type, flash_attn, gpu_layers, repack, threads, place, device),
        )  # fmt: skip
        if nodes:
            count = verbs.record_nodes(model, run, output, How(progress=progress))
            typer.echo(
                f"{output}: {count} nodes with their inputs; judge it with llamadiff backend MODEL --recorded {output}"
            )
            return
        trace = verbs.record(model, run, output, How(progress=progress), sketch)
    taken = trace.sketch.rows if trace.sketch is not None else trace
    verdict = str(trace.info.producer[CHECKED]["verdict"])
    what = f"{len(taken)} taps of {len(trace.info.tokens)} tokens, checked: {verdict.upper()}"
    typer.echo(f"{_shown(output)}: {what}", err=True)
    raise typer.Exit(1 if verdict == "wrong" else 0)


def diff(
    baseline: Annotated[Path, typer.Argument(help="The trace that is trusted.")],
    candidate: Annotated[Path, typer.Argument(help="The trace under test.")],
    model: DiffModel = None, partial: Partial = False, expect: Expect = None,
    tolerance: Tolerance = None, fail_on: FailOn = "wrong", *, reports: Reports,
) -> None:  # fmt: skip
    """Compare two traces; with --model, judge every op of both."""
    from llamadiff.comparison import verbs
    from llamadiff.engines.run_spec import How

    refuse_collisions(two_traces(baseline, candidate, model, tolerance), reports.named)
    with _progress() as progress:
        expected = token_ids(expect, None, "--expect")
        how = How(
            rules=rules_of(tolerance), partial=partial, expect=expected, progress=progress, pictures=reports.pictures
        )
        result = verbs.diff(baseline, candidate, model, how)
    reports.write(result)
    _exit(result.verdict, fail_on)


def diagnose(
    baseline: Annotated[Path, typer.Argument(help="The trace that is trusted.")],
    candidate: Annotated[Path, typer.Argument(help="The trace under test.")],
    model: Annotated[Path, typer.Option("--model", help="The .gguf file.", show_default=False)],
    explain_output: Explain = False, budget: Budget = 600.0, partial: Partial = False,
    tolerance: Tolerance = None, fail_on: FailOn = "wrong", *, reports: Reports,
) -> None:  # fmt: skip
    """Say why the candidate is wrong: every known bug is replayed on what it recorded."""
    from llamadiff.comparison import verbs
    from llamadiff.engines.run_spec import How

    refuse_collisions(two_traces(baseline, candidate, model, tolerance), reports.named)
    explain = budget if explain_output else 0.0
    with _progress() as progress:
        how = How(
            rules=rules_of(tolerance), explain=explain, partial=partial, progress=progress, pictures=reports.pictures
        )
        result = verbs.diff(baseline, candidate, model, how)
    reports.write(result, causes=True)
    _exit(result.verdict, fail_on)


def backend(
    model: Model, prompt: Prompt = None, prompt_file: PromptFile = None, tokens: Tokens = None,
    tokens_file: TokensFile = None, chat: Chat = False, n_predict: NPredict = 0,
    kv_type: KvType = "f32", flash_attn: FlashAttn = False,
    gpu_layers: GpuLayers = 0, repack: Repack = False, threads: Threads = 0, llama_cpp: LlamaCpp = None,
    runner: Runner = None, device: OnDevice = None,
    keep: Annotated[Path | None, typer.Option("--keep", help="Save each wrong op, with its inputs, here.")] = None,
    recorded: Recorded = None, tolerance: Tolerance = None, fail_on: FailOn = "wrong", *, reports: Reports,
) -> None:  # fmt: skip
    """Check every node of llama.cpp's graph on its real inputs: for authors of backends and ports."""
    from llamadiff.comparison import verbs
    from llamadiff.engines.run_spec import How, Run

    text = prompt_of(prompt, prompt_file)
    refuse_collisions(
        [("the model", model), ("the recorded run", recorded), *settings_files(tolerance, tokens_file, prompt_file)],
        [*kept(keep), *reports.named],
    )
    if recorded is not None and (text is not None or tokens or tokens_file or n_predict):
        raise UserError(f"--recorded {recorded}: says what was run; give no prompt, tokens or --n-predict with it")
    with _progress() as progress:
        place = place_of(llama_cpp, runner)
        settings = settings_of(kv_type, flash_attn, gpu_layers, repack, threads, place, device)
        run = Run(text, token_ids(tokens, tokens_file), chat, n_predict, settings=settings)
        how = How(rules=rules_of(tolerance), progress=progress, pictures=reports.pictures)
        result = verbs.graph(model, run, how, keep, recorded)
    reports.write(result)
    _exit(result.verdict, fail_on)


def check(
    paths: Annotated[list[Path], typer.Argument(help="Recorded traces, or directories of them.")],
    model: CheckModel = None, candidate: CheckCandidate = None, name_map: NameMap = None, timeout: Timeout = 600.0,
    jobs: Jobs = 0, partial: Partial = False, max_mean_kl: MaxMean = None, max_p99_kl: MaxTail = None,
    tolerance: Tolerance = None, fail_on: FailOn = "wrong", annotate: Annotate = False, update: Update = False,
    *, reports: Reports,
) -> None:  # fmt: skip
    """Check recorded llama.cpp traces, or your engine on their tokens; needs no llama.cpp where the engine runs the
    file."""
    from llamadiff.cli.checking import Tally
    from llamadiff.comparison import check_traces, verbs
    from llamadiff.engines.run_spec import Gate, How

    traces = check_traces.traces_in(paths)
    if update:
        _update(traces, model, candidate, reports)
    files = [("the model", model)] if candidate is None else verbs.compared_files(model, candidate, name_map)
    read = [*(("the trace", path) for path in traces), *settings_files(tolerance, None), *files]
    refuse_collisions(read, reports.named)
    how = How(
        rules=rules_of(tolerance), partial=partial, name_map=name_map, timeout=timeout,
        gate=Gate(max_mean_kl, max_p99_kl), pictures=reports.pictures,
    )  # fmt: skip
    tally = Tally(reports, annotate)
    for checked in check_traces.check_each(traces, model, how, candidate, jobs):
        tally.tell(checked)
    _exit(tally.finish(), fail_on)


def _update(traces: Sequence[Path], model: Path | None, candidate: str | None, reports: Reports) -> None:
    """Record captures anew, and say what changed."""
    from llamadiff.comparison import updating
    from llamadiff.comparison.check_traces import model_of
    from llamadiff.engines.run_spec import How
    from llamadiff.numerics import tolerances
    from llamadiff.report.check_lines import update_lines
    from llamadiff.trace.reader import Trace

    if candidate is not None or reports.named:
        raise UserError("--update records llama.cpp anew, and judges nothing else: give it without --candidate, --json "
                        "and the like")  # fmt: skip
    verdicts = []
    for path in traces:
        with _progress() as progress:
            changed = updating.update(path, model or model_of(path, Trace.open(path)), How(progress=progress))
        typer.echo("\n".join(update_lines(changed)))
        verdicts.append(changed.verdict)
    _exit(tolerances.worst_of(verdicts), "wrong")


def demo() -> None:
    """Compare the shipped model, right and then with a bug in it."""
    from llamadiff.comparison import demo as shipped
    from llamadiff.report.terminal.report import say

    with _progress() as progress:
        right, wrong = shipped.run(progress)
    Reports().write(right)
    say(f"\nThe same again, with a bug in the engine: its RoPE {shipped.BUG}.\n")
    Reports().write(wrong)
    raise typer.Exit(0 if (right.verdict, wrong.verdict) == ("match", "wrong") else 1)


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


_EXAMPLES = {
    "compare": (
        'llamadiff compare model.gguf "Once upon a time"       is llama.cpp right on this machine?',
        "llamadiff compare model.gguf mine.safetensors         is my engine?",
        'llamadiff compare good.gguf "Once" --candidate small.gguf   what does its quantization cost, and where?',
        'llamadiff compare model.gguf "Once" --candidate "cmd: ./engine --tokens {tokens} --dump {out}"',
    ),
    "capture": ('llamadiff capture model.gguf "Once upon a time" -o right.safetensors',),
    "diff": ("llamadiff diff right.safetensors mine.safetensors --model model.gguf",),
    "diagnose": ("llamadiff diagnose right.safetensors mine.safetensors --model model.gguf",),
    "backend": ('llamadiff backend model.gguf "Once" --n-predict 4 --flash-attn --keep wrong-ops',),
    "variants": (
        'llamadiff variants model.gguf "Once upon a time"',
        'llamadiff variants model.gguf "Once" --only kv=q8_0,flash_attn=on --only dir=../llama.cpp',
    ),
    "port": (
        'llamadiff port model.gguf checkpoint/ "Once upon a time"',
        'llamadiff port model.gguf model.py:load "Once" --llama-cpp ../llama.cpp',
    ),
    "tiny": ("llamadiff tiny checkpoint/ -o tiny/ --converter ../llama.cpp/convert_hf_to_gguf.py --golden",),
    "replay": ("llamadiff replay wrong-ops/*.safetensors --llama-cpp ../llama.cpp",),
    "check": (
        "llamadiff check captures/ --fail-on noise             are the recordings right?",
        'llamadiff check captures/ --candidate "cmd: ./engine --tokens {tokens} --dump {out}"   is your engine?',
    ),
    "taps": ("llamadiff taps model.gguf --json",),
    "writer": ("llamadiff writer rust --model model.gguf > trace_writer.rs",),
    "graph": ("llamadiff graph model.gguf --layer 0",),
    "weights": (
        "llamadiff weights model.gguf               is anything odd in it?",
        "llamadiff weights model.gguf other.gguf    how far are two files?",
        "llamadiff weights model.gguf checkpoint/   was it converted rightly?",
    ),
    "sweep": (
        "llamadiff sweep cases.toml                             models x prompts x candidates x settings",
        "llamadiff sweep cases.toml --scheduler tcp://host:8786  on a Dask cluster",
    ),
    "vectors": ("llamadiff vectors blocks/",),
    "explain": ("llamadiff explain rope-layout",),
    "bugs": ("llamadiff bugs rope-layout", "llamadiff bugs epsilon"),
}
_JUDGE, _FILE, _LEARN = "Judge", "The file", "Look up"
_COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    _JUDGE: (
        with_reports(compare), capture, with_reports(diff), with_files(diagnose), with_reports(backend),
        replay, with_reports_beside_json(variants), port, tiny, with_reports_of_several(check), sweep,
    ),
    _FILE: (weights, vectors),
    _LEARN: (
        listings.taps, listings.writer, listings.graph, listings.bugs, listings.explain, demo, listings.doctor,
    ),
}  # fmt: skip

for _panel, _commands in _COMMANDS.items():
    for _command in _commands:
        _lines = _EXAMPLES.get(_command.__name__, ())
        _epilog = "\n\n".join(("Examples:", *_lines)) if _lines else None
        app.command(rich_help_panel=_panel, epilog=_epilog)(_command)
