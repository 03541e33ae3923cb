"""The commands about a model's weights: words in, exit code out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llamadiff.cli.options import Model, finish
from llamadiff.cli.reports import Reports
from llamadiff.system.collisions import refuse_collisions

Other = Annotated[
    Path | None,
    typer.Argument(
        help="A .gguf file, a Hugging Face directory, or a directory of your engine's weights.",
        metavar="OTHER",
        show_default=False,
    ),
]


def weights(model: Model, other: Other = None, *, reports: Reports) -> None:
    """Is the file right? List every tensor; with OTHER, compare each with another file, a checkpoint or a dump."""
    from llamadiff.report.status_line import progress
    from llamadiff.report.terminal.report import make_console
    from llamadiff.report.weights import render_weights
    from llamadiff.weights.opening import files_of, judge_weights

    refuse_collisions([*files_of("the model", model), *files_of("the other side", other)], reports.named)
    with progress() as tell:
        report = judge_weights(model, other, tell)
    reports.write(report, lambda found: render_weights(found, make_console()))
    finish(report.verdict)


def vectors(directory: Annotated[Path, typer.Argument(help="A new directory.", show_default=False)]) -> None:
    """Write test blocks of every ggml type, and what they decode to, for engines in any language."""
    from llamadiff.report.status_line import progress
    from llamadiff.weights.vectors import write_vectors

    with progress() as tell:
        count = write_vectors(directory, tell)
    typer.echo(f"{count} types in {directory}", err=True)
