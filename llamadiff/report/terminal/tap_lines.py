"""Which lines the tap table has: runs of like layers folded, the layer of the leading tap opened around it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from llamadiff.judge.verdict import NOISE, SEVERITY, WRONG, is_right, worst_of
from llamadiff.report.terminal.escape import times, tiny
from llamadiff.result.comparison import Comparison
from llamadiff.result.rows import Row, stem

FEW = 12  # layers, and taps outside them, that need no folding
MOST = 8  # lines, beyond which like layers are one line wherever they are
OPENED = 6  # taps that are told one by one in an opened layer


@dataclass(frozen=True)
class Line:
    """One line: the rows that it stands for, in graph order."""

    rows: tuple[Row, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(row.layer for row in self.rows if row.layer is not None))

    @property
    def loud(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if is_loud(row))

    @property
    def verdict(self) -> str:
        return worst_of([row.verdict for row in self.rows])

    @property
    def worst(self) -> Row:
        """The row nearest its limit, or furthest above it."""
        return max(self.rows, key=badness)

    @property
    def last(self) -> Row:
        """The row that shows where this part of the model ends: a layer's output, where it was recorded."""
        return next((row for row in reversed(self.rows) if row.tap.startswith("l_out-")), self.rows[-1])


@dataclass(frozen=True)
class _Part:
    """Rows of one layer, or one outside the layers; ``alone``: not to be folded."""

    rows: tuple[Row, ...]
    alone: bool = False


def is_loud(row: Row) -> bool:
    """Whether a row must not be folded away."""
    return not is_right(row.verdict) or baseline_is_off(row)


def baseline_is_off(row: Row) -> bool:
    """Whether the baseline's own computation of a tap is wrong (judged where the candidate is another trace)."""
    return row.baseline_local is not None and row.baseline_local.verdict == WRONG


def over_limit(row: Row) -> float | None:
    """Own error over its limit; None where nothing was judged."""
    local = row.local
    if local is None or math.isnan(local.nmse):
        return None
    limit = local.noise_limit if row.verdict == NOISE else local.limit
    return 0.0 if local.nmse == 0 else local.nmse / limit if limit > 0 else math.inf


def own_error(row: Row) -> str:
    """A local error, where anything could be judged."""
    return "" if row.local is None or math.isnan(row.local.nmse) else tiny(row.local.nmse)


def times_limit(row: Row) -> str:
    """An own error over its limit; of what is exact, or was not judged, there is nothing to say."""
    ratio = over_limit(row)
    return times(ratio) if ratio else ""


def badness(row: Row) -> tuple[int, float, float]:
    """Worst verdict, then the largest own error for its limit, then the largest drift."""
    drift = row.drift.nmse if row.drift else 0.0
    severity = SEVERITY.index(row.verdict)
    return severity, over_limit(row) or 0.0, math.inf if math.isnan(drift) else drift


def folded_lines(comparison: Comparison) -> list[Line]:
    """A dozen lines or so, however deep the model is.

    What is right is one line up to what is not; of layers that are wrong alike, the first is opened tap by tap. Where
    that takes many lines, like layers are one line wherever they are.
    """
    groups = _groups(comparison.rows)
    if len(groups) <= FEW and not any(map(is_loud, comparison.rows)):
        return [Line(tuple(group)) for group in groups]
    parts = _parts(groups, first_told(comparison))
    lines = [_line(run) for _, run in groupby(parts, key=_likeness)]
    if len(lines) <= MOST:
        return lines
    alike: dict[object, list[_Part]] = {}  # wherever they are
    for part in parts:
        alike.setdefault(_likeness(part), []).append(part)
    return [_line(like) for like in alike.values()]


def _line(parts: Iterable[_Part]) -> Line:
    return Line(tuple(row for part in parts for row in part.rows))


def full_lines(comparison: Comparison) -> list[Line]:
    """A line for each layer, and one for each tap of every layer in which something is not right."""
    lines: list[Line] = []
    for group in _groups(comparison.rows):
        lines += [Line((row,)) for row in group] if any(map(is_loud, group)) else [Line(tuple(group))]
    return lines


def layer_lines(comparison: Comparison) -> list[Line]:
    """A line for each layer, and for each tap outside of them."""
    return [Line(tuple(group)) for group in _groups(comparison.rows)]


def first_told(comparison: Comparison) -> Row | None:
    """The row around which a layer is opened: the WRONG one that leads, else the first that is not right."""
    return comparison.leading or next(filter(is_loud, comparison.rows), None)


def _groups(rows: Iterable[Row]) -> list[list[Row]]:
    """The rows of each layer, and those outside the layers one by one.

    A graph's nodes may come in any order: a layer stands where it begins, and what is between layers is before it.
    """
    groups: dict[int | str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.tap if row.layer is None else row.layer, []).append(row)
    return list(groups.values())


def _parts(groups: Sequence[Sequence[Row]], first: Row | None) -> list[_Part]:
    """What may be folded with what is like it; of the layer around ``first``, wrong taps stand alone."""
    parts: list[_Part] = []
    for group in groups:
        is_open = any(row is first for row in group)
        parts += _open_layer(group, first) if first is not None and is_open else [_Part(tuple(group))]
    return parts


def _open_layer(rows: Sequence[Row], first: Row) -> list[_Part]:
    """A layer tap by tap, as far as those that are not right are few; where none is wrong, the first one alone."""
    loud = [at for at, row in enumerate(rows) if is_loud(row)]
    told = loud[: OPENED if first.verdict == WRONG else 1]
    end = loud[len(told)] if len(loud) > len(told) else len(rows)
    parts = [_Part((row,), alone=is_loud(row)) for row in rows[:end]]
    return [*parts, *([_Part(tuple(rows[end:]))] if end < len(rows) else [])]


def _likeness(part: _Part) -> tuple[object, ...]:
    """What neighbours have in common that are one line: which taps are wrong, or whether all is right."""
    if part.alone:
        return True, part.rows[0].tap
    wrong = tuple(stem(row.tap) for row in part.rows if row.verdict == WRONG)
    return False, wrong or any(map(is_loud, part.rows))
