"""``check --update``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from llamadiff.engines.run_spec import How
from llamadiff.ext.captures.changed import Changed, update_line
from llamadiff.ext.captures.updating import update
from llamadiff.report.status_line import progress
from llamadiff.result.comparison import verdict_of


def record_anew(traces: Sequence[Path], model: Path | None, force: bool) -> str:
    """Record captures anew, and say what changed -> the worst verdict of what was recorded. Raises UserError."""
    found = list[Changed]()
    for path in traces:
        with progress() as shown:
            changed = update(path, model, How(progress=shown), force)
        typer.echo(update_line(changed))
        found.append(changed)
    return verdict_of(found)
