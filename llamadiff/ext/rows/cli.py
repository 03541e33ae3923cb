"""The command rows."""

from __future__ import annotations

from typing import Annotated

import typer

from llamadiff.cli import options as opt
from llamadiff.cli.command import MODEL, Command

Count = Annotated[int, typer.Argument(help="How many tokens the prompt has.", min=1, max=1 << 30, metavar="N")]


def rows(model: opt.Model, count: Count) -> None:
    """Print the tokens of a long prompt that compare judges."""
    from llamadiff.engines.model_file import ModelFile
    from llamadiff.ext.rows.choose import AUTO, chosen, in_words
    from llamadiff.ext.rows.row_engine import RowModel, words_of

    typer.echo(in_words(chosen(words_of(RowModel(ModelFile(model)), AUTO), count)).replace(" ", ""))


COMMANDS = (Command(MODEL, rows, ("llamadiff rows model.gguf 32768                       which rows to dump",)),)
