"""Statistics that a log states of a tap, held against every legal arithmetic. They can accuse, and never acquit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.judge.finding import StatedStatistic, Tried
from llamadiff.judge.preflight.checks import Check
from llamadiff.judge.verdict import of_check, of_unjudged
from llamadiff.numerics.metrics import Rows
from llamadiff.trace.reader import Number

if TYPE_CHECKING:
    from llamadiff.judge.finding import Finding

Array = NDArray[Any]

CHECK = "statistics"
WIDER = 3.0  # how much further than all right ways of computing are apart a right statistic may be
SUMS = 1e-5  # of its size: engines sum in float32, in any order
EVERY, LAST, FIRST = "all tokens", "the last token", "the first token"
_OF = {"rms": "rms", "mean": "mean", "min": "minimum", "max": "maximum", "norm": "norm"}


def compare_statistics(stated: Mapping[str, Number], baseline: Rows, lanes: Sequence[Rows]) -> Tried:
    """A tap's statistics over all rows, and over the last or the first alone: which, the log does not say.

    ``lanes``: what the engine computed in each right way, the exact one first.
    """
    every = [list(_scopes(rows.values)) for rows in (baseline, *lanes)]
    scopes = dict.fromkeys((EVERY, LAST, FIRST) if baseline.shape[0] > 1 else (EVERY,))
    return {
        scope: [_compare_statistic(name, number, [values[i] for values in every]) for name, number in stated.items()]
        for i, scope in enumerate(scopes)
    }


def _scopes(values: Array) -> Iterator[Array]:
    yield from (values, values[-1:], values[:1])


def _compare_statistic(name: str, number: Number, sides: Sequence[Array]) -> StatedStatistic:
    found = [_statistic(name, side) for side in sides]
    spread = WIDER * (max(found) - min(found))
    size = float(np.sqrt(np.mean(np.square(sides[0])))) if name == "mean" else abs(found[0])
    room = spread + number.slack + SUMS * size
    return StatedStatistic(name, number.value, found[0], found[1], min(found) - room, max(found) + room)


def _statistic(name: str, values: Array) -> float:
    if name in ("rms", "norm"):
        squares = np.square(values)
        return float(np.sqrt(squares.mean() if name == "rms" else squares.sum()))
    return float(values.mean() if name == "mean" else values.min() if name == "min" else values.max())


def statistics_check(findings: Sequence[Finding]) -> tuple[tuple[Check, ...], tuple[str, ...]]:
    """What the statistics of all taps show, taken over the rows that explain the most of them; and which taps lie
    between the last that is near and the first that is not.
    """
    told = {finding.tap.name: finding.stated for finding in findings if finding.stated}
    if not told:
        return (), ()
    scopes = list(next(iter(told.values())))
    over = max(scopes, key=lambda scope: _count_near(told, scope))
    near = _count_near(told, over)
    whose = f" (over {over})" if len(scopes) > 1 else ""
    if near == len(told):
        count = f"the statistics of {near} taps are" if near > 1 else "the statistics of one tap are"
        found = f"{count} near llama.cpp's{whose}, which does not say that the values are right"
        return (Check(CHECK, of_check(False), found),), ()
    name = list(told)[near]
    first = next(one for one in told[name][over] if not one.is_near)
    layer = name.rpartition("-")[2]
    where = f"in layer {layer} ({name})" if "-" in name else f"at {name}"
    before = f"; those of the {near} taps before it are near" if near > 1 else ""
    found = (
        f"the {_OF[first.name]} leaves llama.cpp's {where} by more than rounding explains: {first.stated:.6g}, where "
        f"llama.cpp has {first.baseline:.6g} and the engine {first.engine:.6g}{whose}{before}"
    )
    names = [finding.tap.name for finding in findings if not finding.tap.kind.optional]
    start = names.index(list(told)[near - 1]) + 1 if near else 0
    return (Check(CHECK, of_unjudged(), found),), tuple(names[start : names.index(name) + 1])


def _count_near(told: Mapping[str, Tried], scope: str) -> int:
    """How many taps come before the first that has a statistic which is not near."""
    return next((i for i, tried in enumerate(told.values()) if not all(one.is_near for one in tried[scope])), len(told))
