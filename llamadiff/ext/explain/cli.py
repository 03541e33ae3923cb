"""The commands bugs and explain."""

from __future__ import annotations

from typing import Annotated

import typer

from llamadiff.cli.command import START, Command


def bugs(
    word: Annotated[
        str | None, typer.Argument(help="A bug's name, or a word to look for.", metavar="NAME|WORD")
    ] = None,
) -> None:
    """List the known bugs, and where each shows."""
    from llamadiff.ext.explain.listing import print_bugs

    print_bugs(word)


def explain(
    name: Annotated[str, typer.Argument(help="A bug's name, as reports and llamadiff bugs have it.", metavar="ID")],
) -> None:
    """Print how a known bug looks and is mended.

    With the right op in C, Rust and Python."""
    from llamadiff.ext.explain.listing import explanation

    typer.echo(explanation(name))


COMMANDS = (
    Command(
        START,
        bugs,
        (
            "llamadiff bugs rope-layout",
            "llamadiff bugs epsilon",
        ),
    ),
    Command(
        START,
        explain,
        ("llamadiff explain rope-layout",),
    ),
)
