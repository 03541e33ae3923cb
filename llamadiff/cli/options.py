"""The options of the commands, each stated once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from llamadiff.numerics.types import CACHE_TYPES
from llamadiff.system.errors import UserError
from llamadiff.system.output import check_text_target

FAILING = {"wrong": {"wrong"}, "noise": {"wrong", "noise"}, "never": set[str]()}


def _one_of(*allowed: str) -> Callable[[typer.CallbackParam, str], str]:
    """Checks an option's value while the command line is parsed, before any work; case does not count."""

    def check(option: typer.CallbackParam, value: str) -> str:
        if value.lower() not in allowed:
            raise UserError(f"{option.opts[0]} {value}: expected one of {', '.join(allowed)}")
        return value.lower()

    return check


def _one_of_or_none(*allowed: str) -> Callable[[typer.CallbackParam, str | None], str | None]:
    check = _one_of(*allowed)
    return lambda option, value: None if value is None else check(option, value)


def _target(value: str | None) -> str | None:
    """Checks that a report can be written there, before any work."""
    if value is not None and value != "-":
        check_text_target(Path(value))
    return value


Model = Annotated[Path, typer.Argument(help="A .gguf file.", show_default=False)]
Prompt = Annotated[str | None, typer.Argument(help="Text, tokenized by llama.cpp as it is (BOS as the model says).")]
PromptFile = Annotated[
    str | None, typer.Option("--prompt-file", help="A file that holds the prompt, or - for standard input.")
]
DiffModel = Annotated[Path | None, typer.Option("--model", help="The .gguf file: judges every op on its own inputs.")]
CheckModel = Annotated[Path | None, typer.Option("--model", help="The .gguf file, if it is not beside the trace.")]
Tokens = Annotated[str | None, typer.Option("--tokens", help="Token ids instead of a prompt: 1,15043,29892")]
TokensFile = Annotated[Path | None, typer.Option("--tokens-file", help="A file of token ids.")]
Chat = Annotated[bool, typer.Option("--chat", help="Put the prompt through the model's own chat template.")]
NPredict = Annotated[int, typer.Option("--n-predict", min=0, help="Greedy decode steps through the KV cache.")]
Candidate = Annotated[
    str | None,
    typer.Option(
        "--candidate",
        help="Your engine: a trace, a dump, cmd: ..., transformers:[DIR]; without, llama.cpp is checked.",
    ),
]
NameMap = Annotated[
    str | None, typer.Option("--map", help="Names and layouts: llama.cpp, hf, transformer-lens, or a TOML file.")
]
Expect = Annotated[
    str | None, typer.Option("--expect", help="Token ids that the table of logits is to show too: 15043,6324")
]
Timeout = Annotated[float, typer.Option("--timeout", min=1, help="Seconds that a candidate's command may take.")]
Taps = Annotated[list[str] | None, typer.Option("--taps", help="Only taps of this pattern, such as 'l_out-*'.")]
Layers = Annotated[str | None, typer.Option("--layers", help="Only these layers: 3 or 0-3.")]
Json = Annotated[
    str | None,
    typer.Option("--json", callback=_target, help="Write the report as JSON to a file, or - for standard output."),
]
Csv = Annotated[str | None, typer.Option("--csv", callback=_target, help="Write the table of taps as CSV.")]
Save = Annotated[Path | None, typer.Option("--save", help="Keep the traces in this directory.")]
KvType = Annotated[
    str,
    typer.Option(
        "--kv-type",
        callback=_one_of(*map(str.lower, CACHE_TYPES)),
        help=f"Type of llama.cpp's KV cache: {', '.join(CACHE_TYPES).lower()}.",
    ),
]
FlashAttn = Annotated[
    bool, typer.Option("--flash-attn", help="llama.cpp with flash attention (hides kq and kq_soft_max).")
]
GpuLayers = Annotated[int, typer.Option("--gpu-layers", min=0, max=9999, help="Layers that llama.cpp puts on the GPU.")]
Repack = Annotated[
    bool, typer.Option("--repack", help="llama.cpp with repacked weights (other kernels; crashes on some CPUs).")
]
Threads = Annotated[
    int, typer.Option("--threads", min=0, max=512, help="Threads for llama.cpp and the engine; 0: all cores.")
]
Partial = Annotated[
    bool, typer.Option("--partial", help="What was recorded is enough: pass without the logits, if it is right.")
]
Precision = Annotated[
    str, typer.Option("--precision", callback=_one_of("f32", "f64"), help="The engine's arithmetic: f32 or f64.")
]
Tolerance = Annotated[
    Path | None, typer.Option("--tolerance", help="TOML file of rules, tried before the built-in limits.")
]
FailOn = Annotated[
    str,
    typer.Option(
        "--fail-on", callback=_one_of(*FAILING), help="Which verdict makes the exit code 1: wrong, noise, never."
    ),
]


Explain = Annotated[
    bool,
    typer.Option("--explain-output", help="Replay known bugs through whatever was not recorded, up to all layers."),
]
Budget = Annotated[float, typer.Option("--budget", min=1, help="Seconds that --explain-output may take.")]


Backend = Annotated[
    str | None,
    typer.Option("--engine", callback=_one_of_or_none("numpy", "graph"), help="numpy, or graph: node by node."),
]
