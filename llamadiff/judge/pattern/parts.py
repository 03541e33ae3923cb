"""What the values are in the part that is wrong, where some channels or heads are: zero, multiplied, another part's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.judge.pattern.deviation import Deviation, Fact, counted

Array = NDArray[Any]
MOST = 4096  # channels among which a wrong one's values are looked for
LEAST_ROWS = 3  # by which a channel is known again
STRANGE = 1e-2  # of a channel's size, that it may differ by from the one whose values it has


def parts(d: Deviation) -> Iterator[Fact]:
    """The wrong channels of a tap with rows of channels, or the wrong heads of one with rows of heads."""
    if d.tap.causal or not d.finite or d.recorded.ndim not in (2, 3):
        return
    flags = np.asarray(d.bad.reshape(*d.bad.shape[:2], -1).any(axis=(0, 2)))
    wrong = [int(i) for i in np.flatnonzero(flags)]
    if not 0 < len(wrong) < len(flags):
        return
    rows = np.flatnonzero(d.bad_rows)
    region = np.zeros(d.bad.shape, bool)
    region[np.ix_(rows, np.flatnonzero(flags))] = True
    whose = f" in {counted('token', rows)}" if len(rows) < len(d.bad) else ""
    said = _values(d, region, wrong)
    if said is not None:
        says = f"{_named(d, wrong)} {said.says}{whose}"
        yield Fact(said.kind, says, (len(rows), *map(int, rows), *wrong, *said.values))


def _named(d: Deviation, wrong: list[int]) -> str:
    return counted("head" if d.bad.ndim == 3 else "channel", wrong)


def _values(d: Deviation, region: Array, wrong: list[int]) -> Fact | None:
    """What the values of the region are, in words that follow its name."""
    are = "are" if len(wrong) > 1 else "is"
    if not d.recorded[region].any():
        return Fact("part zero", f"{are} all zero") if d.expected[region].any() else None
    right, found = d.expected[region], d.recorded[region]
    factor = float((right * found).sum() / max(float(np.square(right).sum()), 1e-300))
    if factor and d.explained_by(np.where(region, factor * d.expected, d.expected)):
        they = "they" if len(wrong) > 1 else "it"
        return Fact("part factor", f"{are} {factor:.4g} times what {they} should be", (factor,))
    step = _shift(d, wrong)
    if step:
        values = np.where(region, np.roll(d.expected, step, axis=1), d.expected)
        if d.explained_by(values):
            sources = [i - step for i in wrong]
            verb = "have" if len(wrong) > 1 else "has"
            return Fact("part of another", f"{verb} the values of {_named(d, sources)}", (step,))
    return None


def _shift(d: Deviation, wrong: list[int]) -> int:
    """How far from the first wrong channel, or head, the one is whose values it has; 0: nowhere."""
    n = d.recorded.shape[1]
    if len(d.recorded) < LEAST_ROWS or n > MOST:
        return 0
    one = d.recorded[:, wrong[0]][:, None]
    gaps = np.square(one - d.expected).reshape(len(one), n, -1).sum(axis=(0, 2))
    source, size = int(gaps.argmin()), float(np.square(one).sum())
    step = wrong[0] - source
    inside = all(0 <= i - step < n for i in wrong)
    return step if inside and gaps[source] <= STRANGE**2 * size else 0
