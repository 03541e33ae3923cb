"""Solves for a constant that a candidate used: the value whose replay is nearest to what was recorded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from llamadiff.diagnose.case import Case
from llamadiff.diagnose.registry import Recipe
from llamadiff.diagnose.sought import Sought

GOLDEN = (math.sqrt(5) - 1) / 2
ROUNDS = 48  # of the golden section: float64's precision from any bracket
EXACT = 1e-11  # NMSE of a familiar value that leaves nothing to look for
SNAP = 0.02  # how near a familiar value must be to be tried in its place


def solve(
    case: Case, build: Callable[[float], Recipe], sought: Sought, familiar: Sequence[float] | None = None
) -> list[float]:
    """The value of what is sought for which ``build(value)`` fits best; ``familiar`` are those of this model.

    The familiar value beside it is taken where it fits as well. Inside a span, where nothing was recorded to solve
    with, the familiar values themselves are the answer, to be tried one by one.
    """
    familiar, low, high = sought.familiar if familiar is None else familiar, sought.low, sought.high
    if case.recorded is None:
        return list(familiar) if case.hint is None else [case.hint]

    def error(log: float) -> float:
        return case.nmse(build(math.exp(log)).compute(case))

    if case.hint is not None and error(math.log(case.hint)) <= case.limit:
        return [case.hint]
    if case.hurried:
        return [min(familiar, key=lambda value: error(math.log(value)))] if familiar else []

    known = {value: error(math.log(value)) for value in familiar if value > 0}
    if known and min(known.values()) <= EXACT:
        return [min(known, key=known.__getitem__)]
    logs = [math.log(low) + (math.log(high) - math.log(low)) * i / sought.steps for i in range(sought.steps + 1)]
    tried = {math.log(value): left for value, left in known.items()} | {log: error(log) for log in logs}
    logs, errors = sorted(tried), [tried[log] for log in sorted(tried)]
    best = min(range(len(logs)), key=errors.__getitem__)
    found, left = _narrowed(error, logs[max(best - 1, 0)], logs[min(best + 1, len(logs) - 1)])
    if errors[best] < left:
        found, left = logs[best], errors[best]
    value = math.exp(found)
    for near in familiar:
        if near > 0 and abs(math.log(near) - found) < SNAP and error(math.log(near)) <= max(4 * left, 1e-12):
            return [near]
    return [value]


def least_squares(case: Case, build: Callable[[float], Recipe]) -> list[float]:
    """The factor, of either sign, for which ``build(factor)`` fits, of a result that is linear in it; none fits: none.

    Found from two values, where ``solve`` takes a hundred.
    """
    if case.recorded is None:
        return []
    recorded = case.compared(case.recorded).astype(np.float64)
    found = []
    for zero, one in zip(build(0.0).compute(case), build(1.0).compute(case), strict=True):
        at_zero = case.compared(zero).astype(np.float64)
        step, rest = case.compared(one) - at_zero, recorded - at_zero
        good = np.isfinite(step) & np.isfinite(rest)
        found.append(float(step[good] @ rest[good]) / max(float(step[good] @ step[good]), 1e-300))
    errors = {value: case.nmse(build(value).compute(case)) for value in dict.fromkeys(found)}
    best = min(errors, key=errors.__getitem__)
    return [best] if errors[best] <= case.limit else []


def _narrowed(error: Callable[[float], float], a: float, b: float) -> tuple[float, float]:
    """Golden section (Kiefer 1953) -> place and error."""
    c, d = b - GOLDEN * (b - a), a + GOLDEN * (b - a)
    at_c, at_d = error(c), error(d)
    for _ in range(ROUNDS):
        if at_c <= at_d:
            b, d, at_d = d, c, at_c
            c = b - GOLDEN * (b - a)
            at_c = error(c)
        else:
            a, c, at_c = c, d, at_d
            d = a + GOLDEN * (b - a)
            at_d = error(d)
    return (c, at_c) if at_c <= at_d else (d, at_d)
