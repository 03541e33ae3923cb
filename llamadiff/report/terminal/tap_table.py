"""The tap table on a page: its titles, its lines, and how many were left out."""

from __future__ import annotations

from rich.text import Text

from llamadiff.comparison.result import Comparison
from llamadiff.report.terminal.columns import fitted, line, titles, width_of
from llamadiff.report.terminal.page import Page
from llamadiff.report.terminal.tap_columns import columns_of, side_names
from llamadiff.report.terminal.tap_lines import folded_lines, full_lines

UNNAMED = "the candidate"
MOST = 14  # lines that a report has unless the full one is asked for


def put_taps(page: Page, comparison: Comparison, full: bool) -> None:
    """Print the table."""
    lines = (full_lines if full else folded_lines)(comparison)
    if not lines:
        return
    shown = lines if full or len(lines) <= MOST else lines[: MOST - 1]
    columns = columns_of(page, shown, names_of(page, comparison), full)
    kept = fitted(columns, page.width, 1)
    gap = 2 if width_of(kept, 2) <= page.width else 1
    page.put(titles(kept, gap))
    for number in range(len(shown)):
        page.put(line(kept, number, gap))
    if len(shown) < len(lines):
        left = sum(len(each.rows) for each in lines[len(shown) :])
        page.put(Text(f"{left} more taps, in {len(lines) - len(shown)} lines: --full shows them"))


def names_of(page: Page, comparison: Comparison) -> tuple[str, str]:
    """What both sides are called in titles."""
    candidate = "engine" if comparison.is_engine else comparison.candidate.get("name")
    return side_names(page, comparison.baseline.get("name"), None if candidate == UNNAMED else candidate)
