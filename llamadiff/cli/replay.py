"""The command that runs saved ops again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from llamadiff.cli.inputs import place_of, settings_of
from llamadiff.cli.options import LlamaCpp, OnDevice, Runner
from llamadiff.cli.reports import put, target
from llamadiff.numerics import tolerances
from llamadiff.system.collisions import STANDARD_OUTPUT, refuse_collisions


def replay(
    paths: Annotated[list[Path], typer.Argument(help="Ops that backend --keep saved.", metavar="OP...")],
    llama_cpp: LlamaCpp = None,
    runner: Runner = None,
    device: OnDevice = None,
    markdown: Annotated[
        str | None,
        typer.Option("--markdown", callback=target, metavar="FILE", help="A block for a GitHub issue, to a file or -."),
    ] = None,
) -> None:
    """Run saved ops again through ggml's own API, on any build and device, and say how far off they are."""
    from llamadiff.comparison.one_op import run_ops
    from llamadiff.report.formats import About
    from llamadiff.report.op_runs import line_of, to_markdown

    written = [] if markdown is None else [("--markdown", Path(markdown))]
    refuse_collisions([("the op", path) for path in paths], written)
    found = run_ops(paths, settings_of("f32", False, 0, False, 0, place_of(llama_cpp, runner), device))
    if markdown is not None:
        put(markdown, to_markdown(found, About(("llamadiff", *sys.argv[1:]))))
    if markdown != STANDARD_OUTPUT:
        typer.echo("\n".join(map(line_of, found)))
    raise typer.Exit(1 if tolerances.WRONG in {run.verdict for run in found} else 0)
