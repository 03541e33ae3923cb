"""The commands about a model's weights: words in, exit code out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamadiff.cli.options import Model
from llamadiff.cli.reports import PANEL, STANDARD_OUTPUT, put, target
from llamadiff.system.collisions import Named, refuse_collisions

if TYPE_CHECKING:
    from llamadiff.weights.result import WeightReport

CODES = {"match": 0, "noise": 0, "wrong": 1, "unchecked": 2}


def _file(name: str, words: str) -> Any:
    """An option for a report's file."""
    return typer.Option(name, callback=target, help=words, metavar="FILE", rich_help_panel=PANEL, show_default=False)


Json = Annotated[str | None, _file("--json", "The report as JSON; - for standard output.")]
Table = Annotated[str | None, _file("--csv", "The table of tensors as CSV.")]
Page = Annotated[str | None, _file("--markdown", "The report as Markdown.")]
Other = Annotated[
    Path | None,
    typer.Argument(
        help="A .gguf file, a Hugging Face directory, or a directory of your engine's weights.",
        metavar="OTHER",
        show_default=False,
    ),
]


def weights(
    model: Model, other: Other = None, json: Json = None, csv: Table = None, markdown: Page = None
) -> None:  # fmt: skip
    """Is the file right? List every tensor; with OTHER, compare each with another file, a checkpoint or a dump."""
    from llamadiff.report.status_line import progress
    from llamadiff.weights.opening import files_of, judge_weights

    reports: list[Named] = [("--json", json), ("--csv", csv), ("--markdown", markdown)]
    refuse_collisions([*files_of("the model", model), *files_of("the other side", other)], reports)
    with progress() as tell:
        report = judge_weights(model, other, tell)
    _write_all(report, json, csv, markdown)
    raise typer.Exit(CODES[report.verdict])


def vectors(directory: Annotated[Path, typer.Argument(help="A new directory.", show_default=False)]) -> None:
    """Write test blocks of every ggml type, and what they decode to, for engines in any language."""
    from llamadiff.report.status_line import progress
    from llamadiff.weights.vectors import write_vectors

    with progress() as tell:
        count = write_vectors(directory, tell)
    typer.echo(f"{count} types in {directory}", err=True)


def _write_all(report: WeightReport, json: str | None, csv: str | None, markdown: str | None) -> None:
    """Each report that was asked for; the terminal's, unless another takes standard output."""
    from llamadiff.report.weights_files import weights_to_csv, weights_to_json, weights_to_markdown

    for file, render in ((json, weights_to_json), (csv, weights_to_csv), (markdown, weights_to_markdown)):
        if file is not None:
            put(file, render(report))
    if STANDARD_OUTPUT not in (json, csv, markdown):
        from llamadiff.report.terminal.report import make_console
        from llamadiff.report.terminal.weights import render_weights

        render_weights(report, make_console())
