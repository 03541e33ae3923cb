"""What a watched program's graphs came to, on a terminal: a line for one that is right, a page for one that is not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from llamadiff.judge.verdict import WRONG
from llamadiff.report.terminal.escape import escape_line
from llamadiff.report.terminal.report import render
from llamadiff.result.comparison import Comparison

_LONG = 4000  # cells


def print_watched(graphs: Sequence[tuple[Path, Comparison]], said: Sequence[str], ended: str, console: Console) -> None:
    """Print it; ``ended``: how the program failed, if it did."""
    for _, result in graphs:
        if result.verdict == WRONG:
            render(result, console)
        else:
            console.print(Text(f"{result.verdict.upper():9}  {escape_line(result.summary, _LONG)}"))
    for line in said:
        console.print(Text(f"           {escape_line(line, _LONG)}"))
    if ended:
        console.print(Text(f"           the program itself {escape_line(ended, _LONG)}"))
