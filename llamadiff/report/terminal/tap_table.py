"""The tap table: one line a layer, and every tap of the layer in which the first divergence lies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from rich.text import Text

from llamadiff.comparison.result import Comparison
from llamadiff.comparison.rows import Row
from llamadiff.numerics import tolerances
from llamadiff.report.terminal.columns import Column, fitted, line, titles, width_of
from llamadiff.report.terminal.page import Page
from llamadiff.report.terminal.tap_columns import CORE, MARKS, Line, Spelling, shared_columns, side_columns, tap_columns

_SPELLINGS = (Spelling(), Spelling(words=False), Spelling(words=False, full_names=False, mean_cells=6))


def put_taps(page: Page, comparison: Comparison) -> None:
    """Print the table."""
    lines = _lines(comparison)
    if not lines:
        return
    spelling, gap, shared, sides = _layout(page, lines)
    start = width_of(shared, gap) + gap
    tail = fitted(tap_columns(page, lines), page.width - start, gap)
    page.put(_span_title(comparison, shared, sides, gap))
    page.put(titles([*shared, *sides], gap))
    for at, entry in enumerate(lines):
        if entry.opened and not lines[at - 1].opened:
            page.put(_tail_title(entry, start, tail, gap))
        page.put(line([*shared, *(tail if entry.opened else sides)], at, gap))
    if not spelling.words:
        page.put(_legend(lines))


def baseline_is_off(row: Row) -> bool:
    """Whether the baseline's own computation of a tap is wrong (judged where the candidate is another trace)."""
    return row.baseline_local is not None and row.baseline_local.verdict == tolerances.WRONG


def _lines(comparison: Comparison) -> list[Line]:
    first = comparison.first_divergence
    out = []
    for _, members in groupby(comparison.rows, key=lambda row: row.tap if row.layer is None else row.layer):
        rows = list(members)
        verdict = tolerances.worst_of([row.verdict for row in rows])
        off = any(baseline_is_off(row) for row in rows)
        out.append(Line(rows[0].layer, verdict, off, max(rows, key=_badness), _residual(rows)))
        if any(row is first for row in rows):
            out += [Line(None, row.verdict, baseline_is_off(row), row, row, True, row is first) for row in rows]
    return out


def _residual(rows: Sequence[Row]) -> Row:
    """The layer's output; where it was not recorded, the last tap that was."""
    return next((row for row in rows if row.tap.startswith("l_out-")), rows[-1])


def _badness(row: Row) -> tuple[int, float, float]:
    """Worst verdict, then the largest local error for its limit, then the largest drift."""
    local, drift = row.local, row.drift.nmse if row.drift else 0.0
    excess = 0.0
    if local is not None and local.nmse != 0:
        excess = local.nmse / local.limit if local.limit > 0 and not math.isnan(local.nmse) else math.inf
    return tolerances.SEVERITY.index(row.verdict), excess, math.inf if math.isnan(drift) else drift


def _layout(page: Page, lines: Sequence[Line]) -> tuple[Spelling, int, list[Column], list[Column]]:
    """The fullest spelling whose core fits, the gap, and the columns: those of every line, those of layers only."""
    for spelling in _SPELLINGS:
        shared, sides = shared_columns(page, lines, spelling), side_columns(lines, spelling)
        core = [column for column in (*shared, *sides) if column.rank <= CORE]
        if width_of(core, 1) <= page.width:
            break
    gap = 2 if width_of(core, 2) <= page.width else 1
    rank = max(column.rank for column in fitted([*shared, *sides], page.width, gap))
    return spelling, gap, [c for c in shared if c.rank <= rank], [c for c in sides if c.rank <= rank]


def _span_title(comparison: Comparison, shared: Sequence[Column], sides: Sequence[Column], gap: int) -> Text:
    """A rule over the columns that speak of the layer's output, with its name in it."""
    layers = [row for row in comparison.rows if row.layer is not None]
    named = "layer's output, l_out" if any(row.tap.startswith("l_out-") for row in layers) else "layer's last tap"
    at = next((number for number, column in enumerate(shared) if column.title == "drift"), len(shared))
    room = width_of([*shared[at:], *sides], gap)
    if room < len(named) + 4:
        return Text()
    return Text(" " * (width_of(shared[:at], gap) + gap) + f" {named} ".center(room, "─"), "dim")


def _tail_title(entry: Line, start: int, tail: Sequence[Column], gap: int) -> Text:
    """Titles of what only opened taps have, after the name of their layer."""
    label = Text("" if entry.worst.layer is None else f"  every tap of layer {entry.worst.layer}", "dim")
    label.truncate(start, pad=True)
    return Text.assemble(label, titles(tail, gap))


def _legend(lines: Sequence[Line]) -> Text:
    """What the marks that occur mean."""
    words = {MARKS[entry.verdict]: entry.verdict for entry in lines}
    if any(entry.baseline_off for entry in lines):
        words["b"] = "the baseline is off"
    return Text("   ".join(f"{mark} {word}" for mark, word in words.items()), "dim")
