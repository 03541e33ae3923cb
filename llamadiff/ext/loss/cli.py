"""The command loss."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llamadiff.cli.command import MODEL, Command
from llamadiff.cli.commands import run_compare
from llamadiff.cli.inputs import MAX_TEXT_FILE, RunOptions, bytes_of
from llamadiff.cli.options import ENGINE, Chat, FailOn, LlamaCpp, Model, Prompt, Tokens
from llamadiff.cli.reports import Reports, with_reports
from llamadiff.system.errors import UserError
from llamadiff.system.input import read_text

if TYPE_CHECKING:
    from llamadiff.engines.run_spec import Costing

BEGINNING = 32  # words of a text, that are the prompt where none is given
Text = Annotated[
    Path | None,
    typer.Option("--text", help="Perplexity and KL over this text, too.", rich_help_panel=ENGINE, metavar="FILE"),
]
Spend = Annotated[
    str | None,
    typer.Option(
        "--spend", help="Which finer types recover most for 64M more.", rich_help_panel=ENGINE, metavar="BYTES"
    ),
]


def loss(
    model: Model,
    other: Annotated[Path, typer.Argument(help="Another .gguf of the same model.", metavar="OTHER")],
    prompt: Prompt = None, tokens: Tokens = None, chat: Chat = False, text: Text = None, spend: Spend = None,
    llama_cpp: LlamaCpp = None, fail_on: FailOn = "wrong", *, reports: Reports,
) -> None:  # fmt: skip
    """Say what a file's quantization costs, and in which tensors.

    On the prompt, or on a text's beginning and over all of it."""
    costing = _costing_of(other, text, spend)
    if prompt is None and tokens is None and costing.text is not None:
        words = " ".join(costing.text.split()[:BEGINNING])
        prompt = f"@{words}" if words.startswith("@") else words  # the text itself, and no file
    asked = RunOptions(prompt, tokens, chat, 0, llama_cpp)
    run_compare(model, asked, str(other), None, fail_on, reports, {"costing": costing}, [("the text", text)])


def _costing_of(other: Path, text: Path | None, spend: str | None) -> Costing:
    """What is asked of another file of the model. Raises UserError where it is none."""
    from llamadiff.candidates.gguf_file import is_model_file
    from llamadiff.engines.run_spec import Costing

    if not is_model_file(other):
        raise UserError(f"{other}: is no .gguf file; give another file of the model")
    read = read_text(text, MAX_TEXT_FILE, "a text as UTF-8") if text is not None else None
    if read is not None and not read.strip():
        raise UserError(f"{text}: is empty; give a text")
    return Costing(read, text.name if text is not None else None, bytes_of(spend) if spend is not None else 0)


COMMANDS = (
    Command(
        MODEL,
        with_reports(loss),
        ("llamadiff loss good.gguf small.gguf --text wiki.txt --spend 64M",),
    ),
)
