"""The commands. Each parses, calls, renders and exits: 0 match or noise, 1 wrong, 2 could not tell."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamadiff.errors import UserError

if TYPE_CHECKING:
    from llamadiff.comparison import Comparison
    from llamadiff.limits import Rule
    from llamadiff.llamacpp.request import Settings

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Says which operation of an LLM inference engine is wrong, since which layer, and why: "
    "llama.cpp and an independent NumPy engine run the same tokens, and every tap is compared.",
)

Model = Annotated[Path, typer.Argument(help="A .gguf file.", show_default=False)]
Prompt = Annotated[str | None, typer.Argument(help="Text, tokenized by llama.cpp as it is (BOS as the model says).")]
DiffModel = Annotated[Path | None, typer.Option("--model", help="The .gguf file: judges every op on its own inputs.")]
CheckModel = Annotated[Path | None, typer.Option("--model", help="The .gguf file, if it is not beside the trace.")]
Tokens = Annotated[str | None, typer.Option("--tokens", help="Token ids instead of a prompt: 1,15043,29892")]
TokensFile = Annotated[Path | None, typer.Option("--tokens-file", help="A file of token ids.")]
Chat = Annotated[bool, typer.Option("--chat", help="Put the prompt through the model's own chat template.")]
NPredict = Annotated[int, typer.Option("--n-predict", min=0, help="Greedy decode steps through the KV cache.")]
Candidate = Annotated[
    str | None, typer.Option("--candidate", help="Your engine's trace; without it, llama.cpp itself is checked.")
]
NameMap = Annotated[
    str | None, typer.Option("--map", help="Names and layouts: llama.cpp, hf, transformer-lens, or a TOML file.")
]
Timeout = Annotated[float, typer.Option("--timeout", min=1, help="Seconds that a candidate's command may take.")]
Taps = Annotated[list[str] | None, typer.Option("--taps", help="Only taps of this pattern, such as 'l_out-*'.")]
Layers = Annotated[str | None, typer.Option("--layers", help="Only these layers: 3 or 0-3.")]
Json = Annotated[
    str | None, typer.Option("--json", help="Write the report as JSON to a file, or - for standard output.")
]
Csv = Annotated[Path | None, typer.Option("--csv", help="Write the table of taps as CSV.")]
Save = Annotated[Path | None, typer.Option("--save", help="Keep the traces in this directory.")]
KvType = Annotated[str, typer.Option("--kv-type", help="Type of llama.cpp's KV cache: f32, f16, bf16, q8_0.")]
FlashAttn = Annotated[
    bool, typer.Option("--flash-attn", help="llama.cpp with flash attention (hides kq and kq_soft_max).")
]
GpuLayers = Annotated[int, typer.Option("--gpu-layers", min=0, help="Layers that llama.cpp puts on the GPU.")]
Repack = Annotated[
    bool, typer.Option("--repack", help="llama.cpp with repacked weights (other kernels; crashes on some CPUs).")
]
Threads = Annotated[int, typer.Option("--threads", min=0, help="Threads for llama.cpp and the engine; 0: all cores.")]
Precision = Annotated[str, typer.Option("--precision", help="The engine's arithmetic: f32 or f64.")]
Tolerance = Annotated[
    Path | None, typer.Option("--tolerance", help="TOML file of [[rule]] entries, tried before the built-in limits.")
]
FailOn = Annotated[str, typer.Option("--fail-on", help="Which verdict makes the exit code 1: wrong, noise, never.")]


@app.command()
def compare(
    model: Model, prompt: Prompt = None, tokens: Tokens = None, tokens_file: TokensFile = None, chat: Chat = False,
    n_predict: NPredict = 0, candidate: Candidate = None, name_map: NameMap = None, timeout: Timeout = 600.0,
    taps: Taps = None, layers: Layers = None, json: Json = None,
    csv: Csv = None, save: Save = None, kv_type: KvType = "f32", flash_attn: FlashAttn = False,
    gpu_layers: GpuLayers = 0, repack: Repack = False, threads: Threads = 0, precision: Precision = "f32",
    tolerance: Tolerance = None, fail_on: FailOn = "wrong",
) -> None:  # fmt: skip
    """Run llama.cpp and the engine on the same tokens, and say whether and where they part."""
    from llamadiff import pipeline

    with _progress() as progress:
        result = pipeline.compare(
            model, prompt, tokens=_token_ids(tokens, tokens_file), chat=chat, n_predict=n_predict,
            candidate=candidate, name_map=name_map, timeout=timeout, patterns=taps or (), layers=_layer_range(layers),
            settings=_settings(kv_type, flash_attn, gpu_layers, repack, threads), rules=_rules(tolerance), save=save,
            precision=_one_of("--precision", precision, ("f32", "f64")), progress=progress,
        )  # fmt: skip
    _report(result, json, csv)
    _exit(result.verdict, fail_on)


@app.command()
def capture(
    model: Model, output: Annotated[Path, typer.Option("-o", "--output", help="The trace to write.")],
    prompt: Prompt = None, tokens: Tokens = None, tokens_file: TokensFile = None, chat: Chat = False,
    n_predict: NPredict = 0, taps: Taps = None, layers: Layers = None, kv_type: KvType = "f32",
    flash_attn: FlashAttn = False, gpu_layers: GpuLayers = 0, repack: Repack = False, threads: Threads = 0,
) -> None:  # fmt: skip
    """Run llama.cpp alone and keep its trace."""
    from llamadiff import pipeline
    from llamadiff.llamacpp.capture import capture as run

    settings = _settings(kv_type, flash_attn, gpu_layers, repack, threads)
    with _progress() as progress:
        opened = pipeline.open_model(model, "f32", settings)
        request = pipeline.request_for(
            opened,
            prompt,
            _token_ids(tokens, tokens_file),
            chat,
            n_predict,
            output,
            taps or (),
            _layer_range(layers),
            settings,
        )
        trace = run(request, progress)
    typer.echo(f"{output}: {len(trace)} taps of {len(trace.info.tokens)} tokens", err=True)


@app.command()
def diff(
    baseline: Annotated[Path, typer.Argument(help="The trace that is trusted.")],
    candidate: Annotated[Path, typer.Argument(help="The trace under test.")],
    model: DiffModel = None,
    json: Json = None, csv: Csv = None, tolerance: Tolerance = None, fail_on: FailOn = "wrong",
) -> None:  # fmt: skip
    """Compare two traces; with --model, judge every op of both."""
    from llamadiff import pipeline

    result = pipeline.diff(baseline, candidate, model, _rules(tolerance))
    _report(result, json, csv)
    _exit(result.verdict, fail_on)


@app.command()
def check(
    paths: Annotated[list[Path], typer.Argument(help="Recorded traces, or directories of them.")],
    model: CheckModel = None,
    json: Json = None, tolerance: Tolerance = None, fail_on: FailOn = "wrong",
) -> None:  # fmt: skip
    """Check recorded llama.cpp traces against the engine; needs no llama.cpp."""
    from llamadiff import checking, limits

    results = checking.check_all(paths, model, _rules(tolerance))
    for path, result in results:
        typer.echo(f"{result.verdict.upper():6}  {path}: {result.summary}")
    if json:
        _write(json, checking.to_json(results))
    _exit(limits.worst_of([result.verdict for _, result in results]), fail_on)


@app.command()
def taps(
    model: Model, tokens: Annotated[int, typer.Option("--n-tokens", min=1, help="Shapes for this many.")] = 14
) -> None:
    """Print what an engine should write: names, shapes, order; the dozen that matter most are marked."""
    from llamadiff.model import Model as Opened
    from llamadiff.report import listing

    listing.print_taps(Opened(model), tokens)


@app.command()
def demo() -> None:
    """Compare the shipped model, right and then with a bug in it."""
    from llamadiff import demo as shipped

    with _progress() as progress:
        right, wrong = shipped.run(progress)
    _report(right, None, None)
    typer.echo(f"\nThe same again, with a bug in the engine: its RoPE {shipped.BUG}.\n")
    _report(wrong, None, None)
    raise typer.Exit(0 if (right.verdict, wrong.verdict) == ("match", "wrong") else 1)


@app.command()
def doctor() -> None:
    """Say what is installed, how llama.cpp was built, and what was found wrong."""
    from llamadiff import doctor as examination
    from llamadiff.report import listing

    good = listing.print_checks(examination.examine())
    raise typer.Exit(0 if good else 2)


def _settings(kv_type: str, flash_attn: bool, gpu_layers: int, repack: bool, threads: int) -> Settings:
    from llamadiff.llamacpp.request import KV_TYPES, Settings

    kind = _one_of("--kv-type", kv_type.upper(), tuple(KV_TYPES))
    return Settings(kind, kind, flash_attn, gpu_layers, repack, threads)


def _rules(tolerance: Path | None) -> tuple[Rule, ...]:
    from llamadiff import limits

    return limits.RULES if tolerance is None else limits.load_rules(tolerance)


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise UserError(f"{option} {value}: expected one of {', '.join(allowed).lower()}")
    return value


def _token_ids(text: str | None, file: Path | None) -> tuple[int, ...]:
    """Ids separated by commas or white space."""
    if text is not None and file is not None:
        raise UserError("give --tokens or --tokens-file, not both")
    if file is not None:
        try:
            text = file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if text is None:
        return ()
    words = text.replace(",", " ").split()
    for word in words:
        if not (word.isascii() and word.isdigit()):
            raise UserError(f"--tokens: {word!r} is not a token id; expected whole numbers such as 1,15043,29892")
    if not words:
        raise UserError("--tokens: no token ids given; expected whole numbers such as 1,15043,29892")
    return tuple(int(word) for word in words)


def _layer_range(text: str | None) -> range | None:
    if text is None:
        return None
    first, dash, last = text.partition("-")
    if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)):
        raise UserError(f"--layers {text}: expected a layer such as 3 or a range such as 0-3")
    return range(int(first), int(last or first) + 1)


def _report(result: Comparison, json: str | None, csv: Path | None) -> None:
    """Render to the terminal, unless JSON takes standard output."""
    if csv is not None:
        _write(str(csv), result.frame().to_csv(index=False))
    if json is not None:
        from llamadiff.report.json import to_json

        _write(json, to_json(result) + "\n")
    if json != "-":
        from llamadiff.report.terminal import make_console, render

        render(result, make_console())


def _write(target: str, text: str) -> None:
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror})") from None


def _exit(verdict: str, fail_on: str) -> None:
    failing = {"wrong": {"wrong"}, "noise": {"wrong", "noise"}, "never": set[str]()}
    bad = failing[_one_of("--fail-on", fail_on, tuple(failing))]
    if verdict == "unchecked" and fail_on != "never":
        raise typer.Exit(2)
    raise typer.Exit(1 if verdict in bad else 0)


def _progress() -> Any:
    """A status line on standard error, where that is a terminal."""
    from llamadiff.report.progress import progress

    return progress()


def main(run: Callable[[], Any] = app) -> None:
    """The entry point: a user's mistake is one line on standard error and exit code 2."""
    try:
        run()
    except UserError as error:
        from llamadiff.report.text import shown

        sys.stderr.write(f"llamadiff: {shown(str(error), 2000)}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.stderr.write("llamadiff: stopped\n")
        sys.exit(2)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(2)


if __name__ == "__main__":
    main()
