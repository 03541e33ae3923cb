"""The command weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llamadiff.cli.command import MODEL, Command
from llamadiff.cli.options import finish
from llamadiff.cli.reports import Reports, with_files
from llamadiff.report.formats import Format
from llamadiff.system.collisions import refuse_collisions
from llamadiff.system.errors import UserError

FORMATS = (
    Format("json", (".json",), "ext.file.report:weights_to_json", plain=True),
    Format("csv", (".csv",), "ext.file.report:weights_to_csv", plain=True),
    Format("markdown", (".md", ".markdown"), "ext.file.report:weights_to_markdown", plain=True),
)
Other = Annotated[
    Path | None,
    typer.Argument(
        help="A .gguf file, a Hugging Face directory, or a directory of your engine's weights.",
        metavar="OTHER",
        show_default=False,
    ),
]


Vectors = Annotated[
    Path | None,
    typer.Option(
        "--vectors", help="Write test blocks of every type, and their values, to a new directory.", metavar="DIR"
    ),
]


def weights(
    model: Annotated[Path | None, typer.Argument(help="A .gguf file.", show_default=False, metavar="MODEL")] = None,
    other: Other = None, vectors: Vectors = None, *, reports: Reports,
) -> None:  # fmt: skip
    """Say whether a file is right, alone or against another.

    Every tensor is listed; with OTHER, each is compared with another file's, a checkpoint's or a dump's."""
    if (model is None) is (vectors is None):
        raise UserError("weights: give a model, llamadiff weights MODEL [OTHER], or --vectors DIR and no model")
    if model is None:
        assert vectors is not None
        _write_vectors(vectors)
        return
    from llamadiff.ext.file.opening import files_of, judge_weights
    from llamadiff.ext.file.report import render_weights
    from llamadiff.report.status_line import progress
    from llamadiff.report.terminal.report import make_console

    refuse_collisions([*files_of("the model", model), *files_of("the other side", other)], reports.output_files)
    with progress() as tell:
        report = judge_weights(model, other, tell, load=True)
    reports.write(report, lambda found: render_weights(found, make_console()))
    finish(report.verdict)


def _write_vectors(directory: Path) -> None:
    """Test blocks for engines in any language."""
    from llamadiff.ext.file.vectors import write_vectors
    from llamadiff.report.status_line import progress

    with progress() as tell:
        count = write_vectors(directory, tell)
    typer.echo(f"{count} types in {directory}", err=True)


COMMANDS = (
    Command(
        MODEL,
        with_files(weights, FORMATS),
        (
            "llamadiff weights model.gguf               is anything odd in it?",
            "llamadiff weights model.gguf other.gguf    how far are two files?",
            "llamadiff weights model.gguf checkpoint/   was it converted rightly?",
            "llamadiff weights --vectors blocks/        test blocks of every type, for a decoder of yours",
        ),
    ),
)
