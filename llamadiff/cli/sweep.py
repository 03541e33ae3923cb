"""The command that runs many cases."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llamadiff.cli.reports import PANEL, STANDARD_OUTPUT, put, target
from llamadiff.system.collisions import refuse_collisions

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
    markdown: Annotated[
        str | None,
        typer.Option("--markdown", callback=target, help="The summary as Markdown, to a file or -.", metavar="FILE",
                     rich_help_panel=PANEL, show_default=False),
    ] = None,
) -> None:  # fmt: skip
    """Judge models x prompts x candidates x settings; rows are kept as Parquet, and what is done is not done again."""
    from llamadiff.report.status_line import progress
    from llamadiff.report.sweep import line_of, print_sweep, sweep_to_markdown
    from llamadiff.report.terminal.report import make_console
    from llamadiff.sweep.case import SweepRow
    from llamadiff.sweep.run import run_sweep

    refuse_collisions([("the sweep file", plan)], [("--markdown", markdown)])
    folder = out if out is not None else plan.with_suffix(".results")
    with progress() as shown:

        def tell(row: SweepRow, done: int, of: int) -> None:
            shown("judging", done, of)
            typer.echo(line_of(row, done, of), err=True)

        found = run_sweep(plan, folder, tell, jobs, scheduler)
    if markdown is not None:
        put(markdown, sweep_to_markdown(found))
    if markdown != STANDARD_OUTPUT:
        print_sweep(found, make_console())
    raise typer.Exit({"wrong": 1, "unchecked": 2}.get(found.verdict, 0))
