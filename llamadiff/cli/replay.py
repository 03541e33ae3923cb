"""The command that runs one saved op again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llamadiff.cli.inputs import settings_of
from llamadiff.cli.options import LlamaCpp, OnDevice
from llamadiff.numerics import tolerances


def replay(
    paths: Annotated[list[Path], typer.Argument(help="Ops that backend --keep saved.", metavar="OP...")],
    llama_cpp: LlamaCpp = None,
    device: OnDevice = None,
) -> None:
    """Run saved ops again through ggml's own API, on any build and device, and say how far off they are."""
    from llamadiff.comparison.one_op import run_ops
    from llamadiff.report.terminal.escape import shown

    settings = settings_of("f32", False, 0, False, 0, llama_cpp, device)
    found = run_ops(paths, settings)
    for run in found:
        typer.echo(
            f"{run.verdict.upper():6} {shown(run.name)}: {run.op} {run.inputs} on {shown(run.device)}: own error "
            f"{run.error:.1e}, limit {run.limit:.0e}; {run.recorded:.1e} where it was saved"
        )
    raise typer.Exit(1 if tolerances.WRONG in {run.verdict for run in found} else 0)
