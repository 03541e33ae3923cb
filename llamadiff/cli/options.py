"""The options of the commands, each stated once, in the panels that help shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from llamadiff.system.errors import UserError

FAILING = {"wrong": {"wrong"}, "noise": {"wrong", "noise"}, "never": set[str]()}  # --fail-on -> what exits with 1
INPUT, ENGINE, RECORDED = "Input", "Your engine", "What is recorded"
LLAMA_CPP, JUDGEMENT = "llama.cpp", "Judgement"


def finish(verdict: str, fail_on: str = "wrong") -> NoReturn:
    """End a command: 0 where all is right, 1 where it is wrong, 2 where that could not be told."""
    if verdict == "unchecked" and fail_on != "never":
        raise typer.Exit(2)
    raise typer.Exit(1 if verdict in FAILING[fail_on] else 0)


def _flag(name: str, panel: str, words: str) -> Any:
    """An option without a value."""
    return typer.Option(name, help=words, rich_help_panel=panel, metavar="")


def _option(name: str, panel: str, value: str, words: str, **more: Any) -> Any:
    """An option with a value, which is called ``value`` in help."""
    return typer.Option(name, help=words, rich_help_panel=panel, metavar=value, **more)


def _choice(name: str, panel: str, allowed: tuple[str, ...], words: str) -> Any:
    """An option whose value is one of a few; case does not count."""
    return _option(
        name, panel, f"[{'|'.join(allowed)}]", words, callback=_one_of(*allowed), autocompletion=lambda: list(allowed)
    )


def _one_of(*allowed: str) -> Callable[[typer.CallbackParam, str | None], str | None]:
    """Checks an option's value while the command line is parsed, before any work."""

    def check(option: typer.CallbackParam, value: str | None) -> str | None:
        if value is not None and value.lower() not in allowed:
            raise UserError(f"{option.opts[0]} {value}: expected one of {', '.join(allowed)}")
        return None if value is None else value.lower()

    return check


Model = Annotated[Path, typer.Argument(help="A .gguf file.", show_default=False, metavar="MODEL")]
Prompt = Annotated[
    str | None,
    typer.Argument(
        help="Text, tokenized by llama.cpp as it is (BOS as the model says); @FILE reads a file, - standard input.",
        metavar="PROMPT", show_default=False,
    ),
]  # fmt: skip
PromptOrTrace = Annotated[
    str | None,
    typer.Argument(
        help="Text, tokenized by llama.cpp as it is; @FILE reads a file, - standard input. Or your engine's TRACE, "
        "which needs no prompt.",
        metavar="PROMPT|TRACE", show_default=False,
    ),
]  # fmt: skip
Tokens = Annotated[
    str | None, _option("--tokens", INPUT, "IDS", "Token ids instead of a prompt: 1,15043,29892; @FILE reads a file.")
]
Chat = Annotated[bool, _flag("--chat", INPUT, "Put the prompt through the model's own chat template.")]
NPredict = Annotated[int, _option("--n-predict", INPUT, "N", "Greedy decode steps after the prompt.", min=0)]

Candidate = Annotated[
    str | None,
    _option(
        "--candidate", ENGINE, "WHAT",
        "Your engine: a trace, a dump, cmd: ..., transformers:[DIR], llama.cpp:K=V, a server's http://...; or another "
        ".gguf of the model; without, llama.cpp is checked.",
    ),
]  # fmt: skip
CheckCandidate = Annotated[
    str | None,
    _option(
        "--candidate", ENGINE, "WHAT",
        "Your engine, run on each trace's tokens: cmd: ./engine --tokens {tokens} --dump {out}; or what compare takes.",
    ),
]  # fmt: skip
NameMap = Annotated[
    str | None,
    _option(
        "--map",
        ENGINE,
        "MAP",
        "Its names and layouts: llama.cpp, hf, transformer-lens, a TOML file, or auto: found by the values.",
    ),
]
Timeout = Annotated[float, _option("--timeout", ENGINE, "SECONDS", "How long its command may take.", min=1)]
Steps = Annotated[
    Path | None,
    _option("--steps", ENGINE, "FILE", "Steps instead of a prompt, as a server has them; its command has {steps}."),
]
DiffModel = Annotated[
    Path | None, _option("--model", JUDGEMENT, "FILE", "The .gguf file: judges every op on its own inputs.")
]
CheckModel = Annotated[
    Path | None, _option("--model", JUDGEMENT, "FILE", "The .gguf file, if it is not beside the trace.")
]

Only = Annotated[
    list[str] | None,
    _option("--only", RECORDED, "TAPS|LAYERS", "Only these taps, such as 'l_out-*', or layers: 3 or 0-3. Repeatable."),
]
Rows = Annotated[
    str | None, _option("--rows", RECORDED, "ROWS", "Tokens that are judged: 0-7,4096; of over 2,048 a choice, or all.")
]
Sketch = Annotated[bool, _flag("--sketch", RECORDED, "Keep a few numbers a token instead of tensors.")]
Nodes = Annotated[
    bool, _flag("--nodes", RECORDED, "Record nodes without judging them; judge later with backend --recorded.")
]
Recorded = Annotated[
    Path | None, _option("--recorded", INPUT, "FILE", "Judge a run that capture --nodes recorded, on any machine.")
]
Partial = Annotated[
    bool, _flag("--partial", RECORDED, "What was recorded is enough: pass without the logits, if it is right.")
]

LlamaCpp = Annotated[
    list[str] | None,
    _option(
        "--llama-cpp", LLAMA_CPP, "DIR|KEY=VALUE,...",
        "A build or an install of it, instead of llama-cpp-python's, and how it runs: kv=q8_0, flash_attn=on, "
        "gpu_layers=N, device=NAME/NAME (device=list prints them; rpc:HOST:PORT too), repack=on, threads=N, lora=FILE; "
        "runner=CMD starts the Python that it runs in. Repeatable; LLAMADIFF_LLAMA_CPP stands for it.",
    ),
]  # fmt: skip

Expect = Annotated[str | None, _option("--expect", JUDGEMENT, "IDS", "Tokens to show among the logits: 15043,6324")]
Engine = Annotated[
    str | None,
    _choice(
        "--engine", JUDGEMENT, ("numpy", "numpy:f64", "graph"),
        "The reference engine (in float64), or llama.cpp's graph node by node.",
    ),
]  # fmt: skip
Tolerance = Annotated[
    Path | None, _option("--tolerance", JUDGEMENT, "FILE", "Limits in TOML, tried before the built-in ones.")
]
Jobs = Annotated[
    int, _option("--jobs", JUDGEMENT, "N", "Traces checked at a time; 0: as many as cores.", min=0, max=512)
]
MaxMean = Annotated[
    float | None,
    _option(
        "--max-mean-kl", JUDGEMENT, "NATS", "WRONG where the mean KL over all positions is more.", min=0,
        show_default="what rounding explains",
    ),
]  # fmt: skip
MaxTail = Annotated[
    float | None,
    _option(
        "--max-p99-kl", JUDGEMENT, "NATS", "The same of its 99th percentile.", min=0,
        show_default="what rounding explains",
    ),
]  # fmt: skip
Annotate = Annotated[
    bool, _flag("--annotate", JUDGEMENT, "Annotate as GitHub Actions does, which it does of itself there.")
]
Update = Annotated[bool, _flag("--update", JUDGEMENT, "Record the traces anew, by llama.cpp, and print what changed.")]
Force = Annotated[bool, _flag("--force", JUDGEMENT, "Overwrite traces that are there, or are of another model.")]
FailOn = Annotated[str, _choice("--fail-on", JUDGEMENT, tuple(FAILING), "Which verdict makes the exit code 1.")]
Explain = Annotated[
    float,
    _option(
        "--explain", JUDGEMENT, "SECONDS",
        "Seconds to search for known bugs across unrecorded taps.", min=0,
        show_default="0: through one layer",
    ),
]  # fmt: skip
