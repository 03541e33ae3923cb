"""Norms read back: y = f(row) * x * w(channel), as one factor for each row and one for each channel.

The same is read from the right values; what differs is said.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.diagnose.read_back.observed import LEFT, Facts, Observed, sole, strictly
from llamadiff.judge.pattern.deviation import Fact, numbered
from llamadiff.numerics.orders import order_in_words

Array = NDArray[Any]
SEARCHED = 8  # rows by which ranges of channels are looked for
MOST_CHANNELS = 1024  # of which all ranges are tried; of more, those from the first or to the last
STRICT = 1e-5  # of an error, that a weight may leave that is told from the values themselves
CLOSE = 1e-4  # of a weight's or a mean square's size, that two may differ by and be one


@dataclass(frozen=True)
class Normed:
    """A norm's parts: rows ``x`` [row, n] (without their mean, where the model takes it off), weight and bias [n].

    ``y`` are the recorded rows and ``right`` the right ones, both without the bias.
    """

    o: Observed
    x: Array
    w: Array
    b: Array
    y: Array
    right: Array
    may_leave: float = LEFT

    def left(self, values: Array) -> float:
        """What of the error is left if these are the rows."""
        return self.o.left((values + self.b).reshape(self.o.recorded.shape))

    def fits(self, values: Array) -> bool:
        """Whether the recorded rows are these."""
        return self.left(values) <= self.may_leave

    @property
    def square(self) -> Array:
        """Each row's mean square."""
        return np.asarray(np.square(self.x).mean(axis=1))

    def factors(self, y: Array) -> Array:
        """One factor for each row, by which x * w comes nearest to y."""
        xw = self.x * self.w
        return np.asarray((y * xw).sum(axis=1) / np.maximum(np.square(xw).sum(axis=1), 1e-300))

    @property
    def epsilon(self) -> float:
        """The right one."""
        return float(np.median(self.factors(self.right) ** -2.0 - self.square))

    def by(self, size: Array) -> Array:
        """The rows divided by so much."""
        return self.x * self.w / size[:, None]


def norm(o: Observed) -> Facts:
    """What a norm divided by, and what it multiplied by."""
    n = _parts(o)
    if n is None:
        return
    factors = n.factors(n.y)
    left = n.left(factors[:, None] * n.x * n.w)
    if (factors > 0).all() and left <= LEFT:
        yield from _divided(replace(n, may_leave=strictly(left)), factors)
        return
    right = n.factors(n.right)[:, None] * n.x
    weight = (right * n.y).sum(axis=0) / np.maximum(np.square(right).sum(axis=0), 1e-300)
    left = n.left(right * weight) if len(n.x) > 1 else 1.0
    facts = tuple(_weighed(replace(n, may_leave=strictly(left)), right, weight)) if left <= LEFT else ()
    facts = facts or tuple(_twice(n))
    yield from facts or (_weighed_otherwise(n, weight) if left <= STRICT else ())


def _parts(o: Observed) -> Normed | None:
    """A norm's rows; None where the right values are no norm of the input."""
    case = o.case
    w = case.vector(case.weight) if case.weight is not None else None
    if w is None or o.recorded.shape[-1] != w.size:
        return None
    found = case.vector(case.weight.replace(".weight", ".bias")) if case.weight is not None else None
    b = np.zeros(w.size) if found is None else np.asarray(found, np.float64)
    x, w = o.input().reshape(-1, w.size), np.asarray(w, np.float64)
    y, right = (side.reshape(x.shape) - b for side in (o.recorded, o.expected))
    for centred in (x, x - x.mean(axis=1, keepdims=True)):
        n = Normed(o, centred, w, b, y, right)
        left = np.square(right - n.factors(right)[:, None] * centred * w).sum()
        if left <= 1e-9 * np.square(right).sum():
            return n
    return None


def _divided(n: Normed, factors: Array) -> Facts:
    """Every row has one factor: what it was divided by, as a function of the row."""
    square, divisor, epsilon = n.square, factors**-2.0, n.epsilon
    added = sole(divisor - square, CLOSE * float(square.min()))
    if added is not None and n.fits(n.by(np.sqrt(np.maximum(square + added, 1e-300)))):
        says = f"each row is divided by sqrt(mean square + {added:.3g}), where {epsilon:.3g} is right"
        yield Fact("epsilon", says, (added,))
        return
    for reading in (_least, _power, _summed):
        facts = tuple(reading(n, divisor, epsilon))
        if facts:
            yield from facts
            return


def _least(n: Normed, divisor: Array, epsilon: float) -> Facts:
    """A mean square that counts as no less than some value; what is added to it may be another epsilon."""
    square, low = n.square, float(divisor.min())
    above = square > low
    if not 0 < above.sum() < len(square):
        return
    added = sole((divisor - square)[above], CLOSE * low)
    if added is None or abs(added) < CLOSE * low:
        added = 0.0
    least = low - added
    if n.fits(n.by(np.sqrt(np.maximum(square, least) + added))):
        yield Fact("least square", f"each row's mean square counts as at least {least:.4g}", (least, added))
        if abs(added - epsilon) > CLOSE * low:
            yield Fact("epsilon", f"its epsilon is {added:.3g}, where {epsilon:.3g} is right", (added,))


def _power(n: Normed, divisor: Array, epsilon: float) -> Facts:
    """Another power of the mean square than a half."""
    logs = np.log(n.square + epsilon)
    power = float((logs * np.log(divisor)).sum() / np.square(logs).sum()) / 2
    if 0.1 < power < 2 and abs(power - 0.5) > 1e-3 and n.fits(n.by((n.square + epsilon) ** power)):
        says = f"each row is divided by its mean square to the power {power:.4g}, where 0.5 is right"
        yield Fact("power", says, (power,))


def _summed(n: Normed, divisor: Array, epsilon: float) -> Facts:
    """A mean square over some channels alone."""
    wanted, count = divisor - epsilon, n.x.shape[1]
    for first, last, by in _ranges(n, wanted):
        mean = np.square(n.x[:, first : last + 1]).sum(axis=1) / by
        if last - first + 1 < count and n.fits(n.by(np.sqrt(mean + epsilon))):
            says = f"its mean square is of channels {first} to {last} alone, divided by {by}"
            yield Fact("channels summed", says, (first, last, by))
            return


def _ranges(n: Normed, wanted: Array) -> list[tuple[int, int, int]]:
    """The ranges of channels whose mean squares come nearest to those wanted: first, last, what they are divided by."""
    count, found = n.x.shape[1], []
    rows = np.linspace(0, len(n.x) - 1, min(SEARCHED, len(n.x))).astype(int)
    sums = np.concatenate([np.zeros((len(rows), 1)), np.cumsum(np.square(n.x[rows]), axis=1)], axis=1)
    starts = np.arange(count) if count <= MOST_CHANNELS else np.zeros(1, int)
    for whole in (True, False):
        gaps = np.zeros((len(starts), count + 1))
        for row, target in zip(sums, wanted[rows], strict=True):
            width = np.maximum(np.arange(count + 1)[None, :] - starts[:, None], 1)
            gaps += np.square((row[None, :] - row[starts, None]) / (count if whole else width) / target - 1)
        start, stop = np.unravel_index(int(np.argmin(gaps)), gaps.shape)
        first = int(starts[start])
        found.append((first, int(stop) - 1, count if whole else int(stop) - first))
    return found


def _weighed(n: Normed, right: Array, weight: Array) -> Facts:
    """Every channel has one factor: what the weight was."""
    size, (w, rows) = float(np.sqrt(np.mean(n.w**2))), (n.w, right)
    added = sole(weight - w, CLOSE * size)
    if added is not None and n.fits(rows * (w + added)):
        yield Fact("weight plus", f"its weight is the file's plus {added:.4g}", (added,))
        return
    other = np.abs(weight - w) > 1e-3 * size
    if not other.any():
        return
    first, last = (int(np.flatnonzero(other)[end]) for end in (0, -1))
    part = (np.arange(len(w)) >= first) & (np.arange(len(w)) <= last)
    for value in (1.0, 0.0):
        if not part.all() and n.fits(rows * np.where(part, value, w)):
            says = f"its weight is {value:g} in channels {first} to {last}"
            yield Fact("weight part", says, (value, first, last))
            return
    order = np.abs(weight[:, None] - w[None, :]).argmin(axis=1)
    if len(set(order)) == len(order) and n.fits(rows * w[order]):
        says = f"its weight is in another order: {order_in_words(order, 'channel')}"
        yield Fact("weight order", says, tuple(int(i) for i in order))
        return
    if (w > 0).all() and (weight > 0).all():
        logs = np.log(w)
        power = float((logs * np.log(weight)).sum() / np.square(logs).sum())
        if n.fits(rows * w**power):
            yield Fact("weight power", f"its weight is the file's to the power {power:.4g}", (power,))
            return


def _weighed_otherwise(n: Normed, weight: Array) -> Facts:
    """Another weight, whatever it is."""
    other = np.flatnonzero(np.abs(weight - n.w) > 1e-3 * np.sqrt(np.mean(n.w**2)))
    where = f" in channels {numbered([int(i) for i in other])}" if 0 < len(other) < len(n.w) else ""
    says = f"its weight is another than the file's{where}, the same for every token"
    yield Fact("weight other", says, tuple(int(i) for i in other))


def _twice(n: Normed) -> Facts:
    """A norm of what is normed already; a norm of what is weighed already."""

    def normed(x: Array) -> Array:
        return np.asarray(x / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + n.epsilon))

    if n.fits(normed(normed(n.x) * n.w + n.b) * n.w):
        yield Fact("twice", "it is applied twice, weight and all", (2,))
    elif n.fits(normed(n.x * n.w)):
        yield Fact("weight first", "its rows are multiplied by the weight first, and normalised then")
