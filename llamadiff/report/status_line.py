"""What is going on, on standard error, for whatever takes over a second."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from llamadiff.system.progress import Progress, silent


@contextmanager
def progress() -> Iterator[Progress]:
    """A function to call with each phase: a spinner and a bar on a terminal, silence elsewhere."""
    if not sys.stderr.isatty():
        yield silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

    console = Console(stderr=True)
    spinner = SpinnerColumn("line" if console.options.ascii_only else "dots")
    columns = spinner, TextColumn("{task.description}", markup=False), BarColumn(24)
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task("starting", total=None)

        def tell(phase: str, done: int = 0, of: int = 0) -> None:
            shown.update(task, description=phase, completed=done, total=of or None)

        yield tell
