"""The commands diagnose, bugs and explain."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llamadiff.cli.command import JUDGE, LEARN, Command
from llamadiff.cli.commands import Baseline, UnderTest, run_diff
from llamadiff.cli.options import Explain, FailOn, Partial, Tolerance, finish
from llamadiff.cli.reports import Reports, with_files


def diagnose(
    baseline: Baseline, candidate: UnderTest,
    model: Annotated[Path, typer.Option("--model", help="The .gguf file.", show_default=False)],
    explain: Explain = 0.0, partial: Partial = False, tolerance: Tolerance = None, fail_on: FailOn = "wrong",
    *, reports: Reports,
) -> None:  # fmt: skip
    """Say why the candidate is wrong: every known bug is replayed on what it recorded."""
    from llamadiff.report.terminal.report import make_console, render_causes

    result = run_diff(baseline, candidate, model, tolerance, reports, {"explain": explain, "partial": partial})
    reports.write(result, lambda found: render_causes(found, make_console()))
    finish(result.verdict, fail_on)


def bugs(
    word: Annotated[
        str | None, typer.Argument(help="A bug's name, or a word to look for.", metavar="NAME|WORD")
    ] = None,
) -> None:
    """List the known bugs: what each is, where it shows, what to do about it."""
    from llamadiff.ext.explain.listing import print_bugs

    print_bugs(word)


def explain(
    name: Annotated[str, typer.Argument(help="A bug's name, as reports and llamadiff bugs have it.", metavar="ID")],
) -> None:
    """Print a known bug's page: what it is, how it looks, how to mend it, with the right op in C, Rust and Python."""
    from llamadiff.ext.explain.listing import explanation

    typer.echo(explanation(name))


COMMANDS = (
    Command(
        JUDGE,
        with_files(diagnose),
        ("llamadiff diagnose right.safetensors mine.safetensors --model model.gguf",),
    ),
    Command(
        LEARN,
        bugs,
        (
            "llamadiff bugs rope-layout",
            "llamadiff bugs epsilon",
        ),
    ),
    Command(
        LEARN,
        explain,
        ("llamadiff explain rope-layout",),
    ),
)
