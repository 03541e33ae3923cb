"""The command sweep."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from llamadiff.cli.command import CI, Command
from llamadiff.cli.options import finish
from llamadiff.cli.reports import Reports, with_files
from llamadiff.report.formats import Format
from llamadiff.system.collisions import refuse_collisions

FORMATS = (
    Format(
        "markdown", (".md", ".markdown"), "ext.sweep.page:sweep_to_markdown", also="GITHUB_STEP_SUMMARY", plain=True
    ),
    Format("json", (".json",), "ext.sweep.files:sweep_to_json", plain=True),
    Format("junit", (".xml",), "ext.sweep.files:sweep_to_junit", plain=True),
)  # fmt: skip
WHERE = "Where it runs"


def sweep(
    plan: Annotated[Path, typer.Argument(help="A TOML file: models, prompts, candidates, settings.", metavar="FILE")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The directory of its rows.", metavar="DIR", show_default="FILE.results"),
    ] = None,
    jobs: Annotated[
        int,
        typer.Option("--jobs", min=0, max=512, help="Cases at a time; 0: as many as cores.", rich_help_panel=WHERE),
    ] = 0,
    scheduler: Annotated[
        str | None,
        typer.Option("--scheduler", help="A Dask cluster's.", metavar="tcp://HOST:PORT", rich_help_panel=WHERE),
    ] = None,
    *, reports: Reports,
) -> None:  # fmt: skip
    """Compare models x prompts x candidates x settings.

    Rows are kept as Parquet, and what is done is not done again."""
    from llamadiff.ext.sweep.case import SweepRow
    from llamadiff.ext.sweep.page import line_of, print_sweep
    from llamadiff.ext.sweep.run import run_sweep
    from llamadiff.report.status_line import progress
    from llamadiff.report.terminal.report import make_console

    refuse_collisions([("the sweep file", plan)], reports.output_files)
    folder = out if out is not None else plan.with_suffix(".results")
    with progress() as shown:

        def tell(row: SweepRow, done: int, of: int) -> None:
            shown("judging", done, of)
            print(line_of(row, done, of), file=sys.stderr)  # the stream of now: above the bar, where there is one

        found = run_sweep(plan, folder, tell, jobs, scheduler)
    reports.write(found, lambda each: print_sweep(each, make_console()))
    finish(found.verdict)


COMMANDS = (
    Command(
        CI,
        with_files(sweep, FORMATS),
        (
            "llamadiff sweep cases.toml                             models x prompts x candidates x settings",
            "llamadiff sweep cases.toml --scheduler tcp://host:8786  on a Dask cluster",
        ),
    ),
)
