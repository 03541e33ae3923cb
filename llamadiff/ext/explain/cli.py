"""The command explain."""

from __future__ import annotations

from typing import Annotated

import typer

from llamadiff.cli.command import START, Command


def explain(
    name: Annotated[
        str | None, typer.Argument(help="A bug's name, as reports have it, or a word.", metavar="ID|WORD")
    ] = None,
    language: Annotated[
        str | None, typer.Argument(help="Of the right op, this alone: c, rust or python.", metavar="LANGUAGE")
    ] = None,
) -> None:
    """List known bugs; with an ID, print its page.

    With a word those that mention it. A page says how a bug looks and is mended, with the right op in C, Rust and
    Python."""
    from llamadiff.ext.explain.listing import print_explanation

    print_explanation(name, language)


COMMANDS = (
    Command(
        START,
        explain,
        (
            "llamadiff explain                      every known bug, a line each",
            "llamadiff explain epsilon              those that mention a word",
            "llamadiff explain rope-layout rust     one, with the right op in Rust",
        ),
    ),
)
