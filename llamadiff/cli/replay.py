"""The command that runs saved ops again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llamadiff.cli.inputs import settings_of
from llamadiff.cli.options import LlamaCpp, finish
from llamadiff.cli.reports import Reports
from llamadiff.numerics import tolerances
from llamadiff.system.collisions import refuse_collisions


def replay(
    paths: Annotated[list[Path], typer.Argument(help="Ops that backend --keep saved.", metavar="OP...")],
    llama_cpp: LlamaCpp = None,
    *,
    reports: Reports,
) -> None:
    """Run saved ops again through ggml's own API, on any build and device, and say how far off they are."""
    from llamadiff.comparison.one_op import run_ops
    from llamadiff.report.op_runs import line_of

    refuse_collisions([("the op", path) for path in paths], reports.named)
    found = run_ops(paths, settings_of(llama_cpp))
    reports.write(found, lambda runs: typer.echo("\n".join(map(line_of, runs))))
    finish(tolerances.worst_of([run.verdict for run in found]))
