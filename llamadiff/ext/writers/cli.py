"""The command writer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llamadiff.cli.command import START, Command


def writer(
    language: Annotated[str, typer.Argument(help="c, cpp, rust, js, python, java, go or zig.")],
    model: Annotated[
        Path | None, typer.Option("--model", help="A .gguf file: print the lines that add its taps too.")
    ] = None,
) -> None:
    """Print code that records an engine's values, to paste in.

    It writes the trace file, and has no dependencies."""
    from llamadiff.ext.writers import writers

    language = writers.find_language(language)
    source = writers.source(language)
    if model is not None:
        from llamadiff.engines.select import runnable

        source += "\n" + writers.add_lines(language, runnable(model, 14))
    typer.echo(source, nl=False)


COMMANDS = (
    Command(
        START,
        writer,
        ("llamadiff writer rust --model model.gguf > trace_writer.rs",),
    ),
)
