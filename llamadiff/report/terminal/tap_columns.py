"""The tap table on a page: its columns, what a line says of the rows that it stands for, how many were left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.cells import cell_len
from rich.text import Text

from llamadiff.judge.verdict import WRONG
from llamadiff.numerics.metrics import Stats
from llamadiff.report.terminal.columns import Column, fit_columns, line, titles, width_of
from llamadiff.report.terminal.escape import number, times, tiny
from llamadiff.report.terminal.page import STRONG, Page
from llamadiff.report.terminal.tap_lines import (
    Line,
    baseline_is_off,
    folded_lines,
    full_lines,
    over_limit,
    own_error,
    times_limit,
)
from llamadiff.result.comparison import Comparison
from llamadiff.result.rows import Row, stem
from llamadiff.words.diagnosis_text import ranges

BAR = 8  # cells
_DECADES = 16  # of the bar's scale
_NAMES = 2  # taps of a line that are named
_NAME_CELLS = 24
_LABEL, _NARROW = 20, 60  # cells that several names may take, half of it below that width
_TITLE_CELLS = 12
UNNAMED = "the candidate"
MOST = 14  # lines that a report has unless the full one is asked for


def columns_of(page: Page, lines: Sequence[Line], names: tuple[str, str], full: bool) -> list[Column]:
    """All columns, the last to be dropped first; those that nothing fills are left out. ``names`` are both sides'."""
    columns = [
        Column("layer", [Text(_layers(line)) for line in lines], left=True),
        Column("tap", [Text(label(page, line), _strength(line)) for line in lines], left=True),
        Column("", [_verdict(page, line) for line in lines], left=True),
        Column("own error", [Text(own_error(line.worst), _strength(line)) for line in lines]),
        Column("x limit", [Text(times_limit(line.worst), _strength(line)) for line in lines], rank=1),
        Column("", [Text(_bar_of(line), STRONG) for line in lines], rank=2, left=True),
        Column("inherited", [Text(_inherited_error(line)) for line in lines], rank=3),
        *_pair("rms", lines, names, lambda stats: stats.rms, 5),
        *(_more(page, lines, names) if full else ()),
    ]
    return [column for column in columns if any(column.cells)]


def _layers(line: Line) -> str:
    """The layers of a line; of several runs of them, between which they lie."""
    words = ranges(line.layers)
    return words if words.count(",") < _NAMES else f"{min(line.layers)}..{max(line.layers)}"


def label(page: Page, line: Line) -> str:
    """The taps of a line: by name if they are few, else those that are not right, else how many."""
    names = ", ".join(_tap_name(page, row) for row in line.rows[:_NAMES])
    if len(line.rows) == 1 or (len(line.rows) <= _NAMES and cell_len(names) <= _label_cells(page)):
        return names
    stems = list(dict.fromkeys(stem(row.tap) for row in line.loud))
    if stems:
        more = f" +{len(stems) - _NAMES}" if len(stems) > _NAMES else ""
        named = ", ".join(page.data(word, _NAME_CELLS) for word in stems[:_NAMES]) + more
        return (
            named if cell_len(named) <= _label_cells(page) else f"{page.data(stems[0], _NAME_CELLS)} +{len(stems) - 1}"
        )
    each, rest = divmod(len(line.rows), max(1, len(line.layers)))
    alike = rest == 0 and len(line.layers) > 1 and all(row.layer is not None for row in line.rows)
    return f"{each} taps each" if alike else f"{len(line.rows)} taps"


def _label_cells(page: Page) -> int:
    return _LABEL if page.width >= _NARROW else _LABEL // 2


def _tap_name(page: Page, row: Row) -> str:
    return page.data(row.tap if row.layer is None else row.tap.removesuffix(f"-{row.layer}"), 2 * _NAME_CELLS)


def _strength(line: Line) -> str:
    return STRONG if line.verdict == WRONG else ""


def _verdict(page: Page, line: Line) -> Text:
    off = next((row.baseline_local for row in line.rows if baseline_is_off(row)), None)
    if off is not None and line.verdict != WRONG:
        return Text("BASELINE OFF", page.emphasis(off.verdict))
    wrong = line.verdict == WRONG
    return Text(line.verdict.upper() if wrong else line.verdict, page.emphasis(line.verdict))


def _bar_of(line: Line) -> str:
    return bar(over_limit(line.worst)) if line.loud else ""


def bar(ratio: float | None) -> str:
    """How far an own error is above its limit: a cell for two decades; what is within its limit has none."""
    if ratio is None or ratio <= 1:
        return ""
    decades = min(_DECADES, math.ceil(math.log10(ratio)) if math.isfinite(ratio) else _DECADES)
    halves = max(1, round(decades * 2 * BAR / _DECADES))
    return "━" * (halves // 2) + "╸" * (halves % 2)


def _is_culprit(line: Line) -> bool:
    """Whether a line is one wrong tap: what is off there is its own, and not inherited."""
    return len(line.rows) == 1 and line.verdict == WRONG


def _inherited_error(line: Line) -> str:
    """How far a tap is from the baseline's for what came before it, where rounding explains some of that."""
    drift, ratio = line.last.drift, line.last.ratio_to_noise
    if drift is None or _is_culprit(line):
        return ""
    return tiny(drift.nmse) if ratio is None else f"{times(ratio)} rounding"


def _pair(
    what: str, lines: Sequence[Line], names: tuple[str, str], value: Callable[[Stats], float], rank: int
) -> list[Column]:
    """One statistic of both sides, by their names."""
    sides = [[_statistic(getattr(line.last, side), value) for line in lines] for side in ("baseline", "candidate")]
    return [Column(f"{what} {names[0]}", sides[0], rank), Column(names[1], sides[1], rank)]


def _statistic(stats: Stats | None, value: Callable[[Stats], float]) -> Text:
    if stats is None:
        return Text()
    return Text(number(value(stats), 7), STRONG if stats.nan or stats.inf else "")


def _more(page: Page, lines: Sequence[Line], names: tuple[str, str]) -> list[Column]:
    """What only the full table has."""

    def of_worst(title: str, cell: Callable[[Row], str], rank: int, left: bool = False) -> Column:
        return Column(title, [Text(cell(line.worst)) for line in lines], rank, left)

    return [
        Column("drift", [Text(tiny(line.last.drift.nmse) if line.last.drift else "") for line in lines], rank=6),
        of_worst("limit", lambda row: tiny(row.local.limit) if row.local else "", 6),
        of_worst("rounds to", lambda row: page.data(_arithmetic(row), 11), 7, left=True),
        of_worst("op", lambda row: page.data(row.op, 20), 8, left=True),
        of_worst("weight", lambda row: _weight(page, row), 9, left=True),
        *_pair("mean", lines, names, lambda stats: stats.mean, 10),
        of_worst("cosine", lambda row: f"{row.drift.cosine:.6f}" if row.drift else "", 11),
        *_pair("min", lines, names, lambda stats: stats.min, 12),
        *_pair("max", lines, names, lambda stats: stats.max, 12),
    ]


def _weight(page: Page, row: Row) -> str:
    return page.data(f"{row.weight} {row.weight_type or ''}") if row.weight else ""


def _arithmetic(row: Row) -> str:
    """What activations were rounded to, where that is not how they were."""
    return "" if row.local is None or row.local.arithmetic in (None, "F32") else str(row.local.arithmetic)


def put_taps(page: Page, comparison: Comparison, full: bool) -> None:
    """Print the table."""
    lines = (full_lines if full else folded_lines)(comparison)
    if not lines:
        return
    shown = lines if full or len(lines) <= MOST else lines[: MOST - 1]
    columns = columns_of(page, shown, names_of(page, comparison), full)
    kept = fit_columns(columns, page.width, 1)
    gap = 2 if width_of(kept, 2) <= page.width else 1
    page.put(titles(kept, gap))
    for at in range(len(shown)):
        page.put(line(kept, at, gap))
    if len(shown) < len(lines):
        left = sum(len(each.rows) for each in lines[len(shown) :])
        page.put(f"{left} more taps, in {len(lines) - len(shown)} lines: --full shows them")


def names_of(page: Page, comparison: Comparison) -> tuple[str, str]:
    """What both sides are called in titles."""
    candidate = "engine" if comparison.is_engine else comparison.candidate.get("name")
    names = comparison.baseline.get("name") or "baseline", "yours" if candidate in (None, "", UNNAMED) else candidate
    return page.data(names[0], _TITLE_CELLS), page.data(names[1], _TITLE_CELLS)
