"""Constants that bugs have: where each is sought, what is said of it, and the value whose replay is nearest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llamadiff.ext.explain.case import Case
from llamadiff.ext.explain.subgraph import Subgraph
from llamadiff.ext.explain.together import errors

ROUNDS = 16  # of ever finer values around the best
STALLS = 0.9  # an error that two rounds make no smaller than that is as small as it gets
NARROW = 0.02  # of the way between the best value's neighbours: so near to a parabola's lowest point values are tried
EXACT = 1e-11  # NMSE of a familiar value that leaves nothing to look for
FLOOR = 1e-13  # of any value: float32 tells no more
PROBE = 1 / 64  # how far, relatively, two values are from the model's own that tell an error's direction
MOST = 100.0  # times the model's own constant, or a part of it: further no direction reaches
BESIDE = 1.05  # times a value that a direction tells, and as small a part: it is between them
SNAP = 0.02  # how near a familiar value must be to be tried in its place


@dataclass(frozen=True)
class Sought:
    """A positive constant between ``low`` and ``high``: tried in so many ``steps`` first, and at familiar values.

    ``says`` is told the value that was found and the model's own.
    """

    low: float
    high: float
    says: Callable[[float, float], str]
    familiar: tuple[float, ...] = ()
    steps: int = 80


def _by_twos(ratio: float) -> str:
    """What a scale tells that makes powers of two of those of e."""
    return ", as where 2^x stands for e^x" if abs(ratio / math.log(2) - 1) < 1e-3 else ""


EPSILON = Sought(
    1e-13, 1.0, lambda value, own: f"uses epsilon {value:.3g}, where {own:.3g} is right",
    (1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2),
)  # fmt: skip
ROPE_BASE = Sought(
    10.0, 1e9, lambda value, own: f"uses base {value:.6g}, where {own:.6g} is right",
    (1e3, 1e4, 1e5, 1.5e5, 2.5e5, 5e5, 1e6, 5e6, 8e6, 1e7), 400,
)  # fmt: skip
ROPE_FACTOR = Sought(
    1 / 64, 64.0, lambda value, own: f"divides positions by {value:.4g}, where {own:.4g} is right",
    (0.25, 0.5, 2.0, 4.0, 8.0, 16.0, 32.0), 400,
)  # fmt: skip
SCORE_SCALE = Sought(
    1e-4, 100.0, lambda value, own: f"scales scores by {value:.5g}; the model by {own:.5g}{_by_twos(value / own)}",
    tuple(d**-0.5 for d in (32, 64, 80, 96, 128, 192, 256)),
)  # fmt: skip
SCORE_CAP = Sought(
    0.1, 1e4, lambda value, own: f"caps scores at {value:.4g}; this model has no softcap", (20.0, 30.0, 50.0)
)
LOGIT_CAP = Sought(0.5, 1e4, lambda value, own: f"caps logits at {value:.4g}; this model has no softcap", (30.0,), 40)
ROWS_FACTOR = Sought(
    1e-3, 1e3, lambda value, own: f"multiplies rows by {value:.6g}", (0.5, 2.0)
)  # fmt: skip
FACTOR = Sought(1e-3, 1e3, lambda value, own: f"multiplies its result by {value:.6g}", (0.125, 0.5, 2.0, 8.0))


def solve(
    case: Case, build: Callable[[float], Subgraph], sought: Sought, familiar: Sequence[float] | None = None
) -> list[float]:
    """The value of what is sought for which ``build(value)`` fits best; ``familiar`` are those of this model.

    The familiar value beside it is taken where it fits as well. Inside a span, where nothing was recorded to solve
    with, the familiar values themselves are the answer, to be tried one by one.
    """
    familiar, low, high = sought.familiar if familiar is None else familiar, sought.low, sought.high
    if case.recorded is None:
        return list(familiar) if case.hint is None else [case.hint]

    def left_by(values: Sequence[float]) -> dict[float, float]:
        return dict(zip(values, errors(case, map(build, values)), strict=True))

    hinted = left_by([case.hint]) if case.hint is not None else {}
    if case.hint is not None and hinted[case.hint] <= case.limit:
        return [case.hint]
    known = left_by([value for value in familiar if value > 0])
    if known and (case.hurried or min(known.values()) <= EXACT):
        return [min(known, key=known.__getitem__)]
    if case.hurried:
        return []
    steps = sought.steps if case.everywhere is None or not known else 1  # through a span it takes long
    hinted = {hint: left for hint, left in hinted.items() if hint > 0}  # what is sought is, but for factors
    beside = [hint * factor for hint in hinted for factor in (1 / BESIDE, BESIDE)]
    tried = known | hinted | left_by([*beside, *(low * (high / low) ** (i / steps) for i in range(steps + 1))])
    least = [min(tried.values())]
    while len(least) <= ROUNDS and least[-1] > FLOOR and (len(least) < 3 or least[-1] < STALLS * least[-3]):
        tried |= left_by(_between(tried))
        least.append(min(tried.values()))
    value = min(tried, key=tried.__getitem__)
    for near in known:
        if abs(math.log(near / value)) < SNAP and known[near] <= max(4 * tried[value], 1e-12):
            return [near]
    return [value]


def lowest(own: float, at_own: float, above: float, below: float) -> tuple[float, float]:
    """Where errors that are squares of a constant's logarithm are lowest, and how low: from that at the model's own,
    and those a PROBE above and below it. What the constant cannot make smaller stays as it is.
    """
    steps = math.log1p(PROBE), math.log1p(-PROBE)
    first, second = (above - at_own) / steps[0], (below - at_own) / steps[1]
    curve = (first - second) / (steps[0] - steps[1])
    slope = first - curve * steps[0]
    if not (math.isfinite(curve) and curve > 0):
        return own, at_own
    step = max(-math.log(MOST), min(math.log(MOST), -slope / (2 * curve)))
    return own * math.exp(step), max(at_own + slope * step + curve * step * step, 0.0)


def _between(tried: Mapping[float, float]) -> list[float]:
    """Values between the neighbours of the best one: halfway, and around the lowest point of the parabola through them.

    An error is a square, so that a parabola soon fits it; where it does not, the halves still close in.
    """
    values = sorted(tried)
    place = min(range(len(values)), key=lambda i: tried[values[i]])
    low, best, high = values[max(place - 1, 0)], values[place], values[min(place + 1, len(values) - 1)]
    logs = [math.log(value / best) for value in (low, high)]
    lowest = _lowest(*logs, *(tried[value] - tried[best] for value in (low, high)))
    near = NARROW * (logs[1] - logs[0])
    points = {*(log / 2 for log in logs), lowest - near, lowest, lowest + near}
    return [best * math.exp(point) for point in sorted(points) if logs[0] < point < logs[1] and point]


def _lowest(low: float, high: float, above_low: float, above_high: float) -> float:
    """Where the parabola through (low, above_low), (0, 0), (high, above_high) is lowest; 0 where it is none."""
    curved = low * above_high - high * above_low
    if not (math.isfinite(curved) and curved < 0 and low < 0 < high):
        return 0.0
    return (low**2 * above_high - high**2 * above_low) / (2 * curved)


def least_squares(case: Case, build: Callable[[float], Subgraph]) -> list[float]:
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
