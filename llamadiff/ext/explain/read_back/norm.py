"""Norms read back: y = f(row) * x * w(channel), as one factor for each row and one for each channel.

The same is read from the right values; what differs is said.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from llamadiff.ext.explain.pattern.deviation import counted, factor, numbered
from llamadiff.ext.explain.read_back.observed import (
    IN_16_BITS,
    LEFT,
    NOTHING,
    Array,
    Facts,
    Observed,
    Readings,
    factor_of,
    first_fit,
    nearest_range,
    sole,
    strictly,
)
from llamadiff.ext.file.orders import order_in_words
from llamadiff.judge.fact import Fact

STRICT = 1e-5  # of an error, that a weight may leave that is told from the values themselves
SEARCHED = 8  # rows by which ranges of channels are looked for
MOST_CHANNELS = 1024  # of which all ranges are tried; of more, those from the first or to the last
STEPS = (2, 4, 8, 16, 32, 64)  # of channels that a sum may take
CLOSE = 1e-4  # of a mean square's size, or of a weight's, that two may differ by and be one


def norm(o: Observed) -> Facts:
    """What a norm divided by, and what it multiplied by."""
    n = normed(o)
    if n is None:
        return
    factors = n.factors(n.y)
    left = n.left(factors[:, None] * n.x * n.w)
    if (factors > 0).all() and left <= LEFT:
        yield from divided(replace(n, may_leave=strictly(left)), factors)
        return
    right = n.factors(n.right)[:, None] * n.x
    weight = factor_of(right, n.y, axis=0)
    left, facts = n.left(right * weight) if len(n.x) > 1 else 1.0, tuple[Fact, ...]()
    if left <= LEFT:
        strict = replace(n, may_leave=strictly(left))
        facts = tuple(first_fit(lambda w: strict.fits(right * w), _weighed(strict, weight)))
    facts = facts or tuple(first_fit(n.fits, _twice(n))) or tuple(_left_out(n))
    yield from facts or (_weighed_otherwise(n, weight) if left <= STRICT else ())


def _weighed(n: Normed, weight: Array) -> Readings:
    """Every channel has one factor: what the weight was."""
    w, size = n.w, float(np.sqrt(np.mean(n.w**2)))
    for name, other in _others(n):
        yield other, Fact("weight of", f"its weight is {name}", (name,))
    added = sole(weight - w, CLOSE * size)
    if added is not None:
        yield w + added, Fact("weight plus", f"its weight is the file's plus {added:.4g}", (added,))
    other = np.abs(weight - w) > 1e-3 * size
    if not other.any():
        return
    first, last = (int(np.flatnonzero(other)[end]) for end in (0, -1))
    part = (np.arange(len(w)) >= first) & (np.arange(len(w)) <= last)
    for value in () if part.all() else (1.0, 0.0):
        says = f"its weight is {value:g} in channels {first} to {last}"
        yield np.where(part, value, w), Fact("weight part", says, (value, first, last))
    order = np.abs(weight[:, None] - w[None, :]).argmin(axis=1)
    if len(set(order)) == len(order):
        says = f"its weight is in another order: {order_in_words(order, 'channel')}"
        yield w[order], Fact("weight order", says, tuple(int(i) for i in order))
    if (w > 0).all() and (weight > 0).all():
        logs = np.log(w)
        power = float((logs * np.log(weight)).sum() / np.square(logs).sum())
        yield w**power, Fact("weight power", f"its weight is the file's to the power {power:.4g}", (power,))


def _others(n: Normed) -> Iterator[tuple[str, Array]]:
    """No weight at all, or another of the file's."""
    yield "left out", np.ones_like(n.w)
    case = n.o.case
    for name in case.run.model.tensors:
        other = case.vector(name) if case.engine.w.shape(name) == n.w.shape else None
        if other is not None:
            yield name, np.asarray(other, np.float64)


def _weighed_otherwise(n: Normed, weight: Array) -> Facts:
    """Another weight, whatever it is."""
    other = np.flatnonzero(np.abs(weight - n.w) > 1e-3 * np.sqrt(np.mean(n.w**2)))
    where = f" in channels {numbered(other)}" if 0 < len(other) < len(n.w) else ""
    says = f"its weight is another than the file's{where}, the same for every token"
    yield Fact("weight other", says, tuple(int(i) for i in other))


def _left_out(n: Normed) -> Facts:
    """Tokens whose input goes on as it is."""
    o = n.o
    bad = o.is_bad.reshape(len(o.recorded), -1).any(axis=1)
    wrong = bad.reshape(-1, *[1] * (o.recorded.ndim - 1))
    if o.fits(np.where(wrong, o.input(), o.expected)):
        tokens = np.flatnonzero(bad)
        where = f" in {counted('token', tokens)}" if not bad.all() else ""
        yield Fact("left out", f"it is left out{where}: its input goes on", tuple(map(int, tokens)))


def _twice(n: Normed) -> Readings:
    """A norm of what is normed already; a norm of what is weighed already."""

    def again(x: Array) -> Array:
        return np.asarray(x / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + n.epsilon))

    yield again(again(n.x) * n.w + n.b) * n.w, Fact("twice", "it is applied twice, weight and all", (2,))
    yield again(n.x * n.w), Fact("weight first", "its rows are multiplied by the weight first, and normalised then")


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
        return self.o.left(values + self.b)

    def fits(self, values: Array) -> bool:
        """Whether the recorded rows are these."""
        return self.left(values) <= self.may_leave

    @property
    def square(self) -> Array:
        """Each row's mean square."""
        return np.asarray(np.square(self.x).mean(axis=1))

    def factors(self, y: Array) -> Array:
        """One factor for each row, by which x * w comes nearest to y."""
        return factor_of(self.x * self.w, y, axis=1)

    @property
    def epsilon(self) -> float:
        """The right one."""
        return float(np.median(self.factors(self.right) ** -2.0 - self.square))

    def is_divided_by(self, size: Array) -> bool:
        """Whether the recorded rows are these divided by so much."""
        return self.fits(self.x * self.w / size[:, None])


def _weight(o: Observed) -> str:
    """The norm's weight: where a graph does not say which it is, the one that has the tap's name."""
    word, layer = o.case.tap.kind.word, o.case.tap.layer
    return o.case.weight or ("output_norm.weight" if layer is None else f"blk.{layer}.{word}.weight")


def normed(o: Observed) -> Normed | None:
    """A norm's rows; None where the right values are no norm of the input."""
    case, name = o.case, _weight(o)
    w = case.vector(name)
    if w is None or o.recorded.shape[-1] != w.size:
        return None
    found = case.vector(name.replace(".weight", ".bias"))
    b = np.zeros(w.size) if found is None else np.asarray(found, np.float64)
    x, w = o.input().reshape(-1, w.size), np.asarray(w, np.float64)
    y, right = (side.reshape(x.shape) - b for side in (o.recorded, o.expected))
    for centred in (x, x - x.mean(axis=1, keepdims=True)):
        n = Normed(o, centred, w, b, y, right)
        left = np.square(right - n.factors(right)[:, None] * centred * w).sum()
        if left <= 1e-9 * np.square(right).sum():
            return n
    return None


def divided(n: Normed, factors: Array) -> Facts:
    """Every row has one factor: what it was divided by, as a function of the row."""
    square, divisor, epsilon = n.square, factors**-2.0, n.epsilon
    added = sole(divisor - square, CLOSE * float(square.min()))
    if added is not None and n.is_divided_by(np.sqrt(np.maximum(square + added, 1e-300))):
        added = 0.0 if abs(added) < max(CLOSE * epsilon, NOTHING * float(square.min())) else added
        says = f"each row is divided by sqrt(mean square + {added:.3g}), where {epsilon:.3g} is right"
        yield Fact("epsilon", says, (added,))
        return
    facts = tuple(_least(n, divisor, epsilon))
    others = (_one_size, _power, _by_fewer, _summed, _strided, _magnitude, _in_16_bits, _apart)
    yield from facts or first_fit(n.is_divided_by, *(each(n, divisor, epsilon) for each in others))


def _least(n: Normed, divisor: Array, epsilon: float) -> Facts:
    """A mean square that counts as no less than some value; what is added to it may be another epsilon."""
    square, low = n.square, float(divisor.min())
    above = square > low
    if not 0 < above.sum() < len(square):
        return
    added = sole((divisor - square)[above], CLOSE * low)
    if added is None or min(abs(added), abs(added - epsilon)) > CLOSE * low:
        return
    added = 0.0 if abs(added) < CLOSE * low else added
    least = low - added
    if n.is_divided_by(np.sqrt(np.maximum(square, least) + added)):
        yield Fact("least square", f"each row's mean square counts as at least {least:.4g}", (least, added))
        if abs(added - epsilon) > CLOSE * low:
            yield Fact("epsilon", f"its epsilon is {added:.3g}, where {epsilon:.3g} is right", (added,))


def _one_size(n: Normed, divisor: Array, epsilon: float) -> Readings:
    """One number for all rows: perhaps the right one of one of them."""
    number = sole(np.sqrt(divisor), CLOSE * float(np.sqrt(divisor.min())))
    if number is None or len(divisor) < 2:
        return
    near = np.abs(np.sqrt(n.square + epsilon) - number)
    whose = f", which is right in row {int(near.argmin())}" if near.min() <= CLOSE * number else ""
    yield None, Fact("one size", f"all rows are divided by one number, {number:.4g}{whose}", (number,))


def _power(n: Normed, divisor: Array, epsilon: float) -> Readings:
    """Another power of the mean square than a half."""
    logs = np.log(n.square + epsilon)
    power = float((logs * np.log(divisor)).sum() / np.square(logs).sum()) / 2
    if 0.1 < power < 2 and abs(power - 0.5) > 1e-3:
        says = f"each row is divided by its mean square to the power {power:.4g}, where 0.5 is right"
        yield (n.square + epsilon) ** power, Fact("power", says, (power,))


def _by_fewer(n: Normed, divisor: Array, epsilon: float) -> Readings:
    """A sum of squares that is divided by another number than there are channels."""
    width = n.x.shape[1]
    found = np.square(n.x).sum(axis=1) / np.maximum(divisor - epsilon, 1e-300)
    count = sole(found, CLOSE * width)
    if count is not None and round(count) not in (0, width):
        says = f"its sum of squares is divided by {round(count)}, where {width} is right"
        yield np.sqrt(n.square * width / round(count) + epsilon), Fact("squares by", says, (round(count),))


def _in_16_bits(n: Normed, divisor: Array, epsilon: float) -> Readings:
    """A number on the way to a row's divisor that has 16 bits."""
    square = n.square
    for name, rounded in IN_16_BITS.items():
        sizes = {
            "mean square": np.sqrt(rounded(square) + epsilon),
            "mean square plus epsilon": np.sqrt(rounded(square + epsilon)),
            "root mean square": rounded(np.sqrt(square + epsilon)),
            "factor": 1 / rounded(1 / np.sqrt(square + epsilon)),
        }
        for words, size in sizes.items():
            yield size, Fact("norm in 16 bits", f"each row's {words} is rounded to {name}", (words, name))


def _summed(n: Normed, divisor: Array, epsilon: float) -> Readings:
    """A mean square over some channels alone."""
    for found in _ranges(n, divisor - epsilon):
        if found.last - found.first + 1 < n.x.shape[1]:
            mean = np.square(n.x[:, found.first : found.last + 1]).sum(axis=1) / found.divisor
            says = f"its mean square is of channels {found.first} to {found.last} alone, divided by {found.divisor}"
            yield np.sqrt(mean + epsilon), Fact("channels summed", says, (found.first, found.last, found.divisor))


@dataclass(frozen=True)
class Range:
    """Channels from ``first`` to ``last``, and what the sum of their squares is divided by."""

    first: int
    last: int
    divisor: int


def _ranges(n: Normed, wanted: Array) -> Iterator[Range]:
    """The ranges whose mean squares come nearest to those wanted: divided by all channels, or by their own number."""
    count = n.x.shape[1]
    rows = np.linspace(0, len(n.x) - 1, min(SEARCHED, len(n.x))).astype(int)
    sums = np.concatenate([np.zeros((len(rows), 1)), np.cumsum(np.square(n.x[rows]), axis=1)], axis=1)
    starts = np.arange(count) if count <= MOST_CHANNELS else np.zeros(1, int)
    widths = np.maximum(np.arange(count + 1)[None] - starts[:, None], 1)
    first, stop = nearest_range(sums, wanted[rows], starts, count)
    yield Range(first, stop - 1, count)
    first, stop = nearest_range(sums, wanted[rows], starts, widths)
    yield Range(first, stop - 1, stop - first)


def _strided(n: Normed, divisor: Array, epsilon: float) -> Readings:
    """A mean square over every second channel, or fewer."""
    for step in STEPS:
        for first in range(step if n.x.shape[1] % step == 0 else 0):
            says = f"its mean square is of one channel in {step} alone, from channel {first} on"
            size = np.sqrt(np.square(n.x[:, first::step]).mean(axis=1) + epsilon)
            yield size, Fact("channels strided", says, (step, first))


def _magnitude(n: Normed, divisor: Array, epsilon: float) -> Readings:
    """Another size of a row than its root mean square."""
    sizes = {"mean": np.abs(n.x).mean(axis=1), "largest": np.abs(n.x).max(axis=1)}
    for words, size in sizes.items():
        added = sole(np.sqrt(divisor) - size, CLOSE * float(size.min()))
        if added is not None:
            plus = f" plus {added:.3g}" if abs(added) > CLOSE * size.min() else ""
            says = f"each row is divided by its {words} magnitude{plus}, where its root mean square is right"
            yield size + added, Fact("magnitude", says, (added,))


def _apart(n: Normed, divisor: Array, epsilon: float) -> Readings:
    """Each row's own size, that none of these is: what is wrong is its sum, and neither the weight nor the input."""
    times = np.sqrt(divisor / (n.square + epsilon))
    alike = sole(times, CLOSE) is not None or (np.abs(times - 1) <= CLOSE).any()
    if alike or len(times) != len(n.o.recorded):  # one factor, rows that are right, or heads
        return
    low, high = float(times.min()), float(times.max())
    says = f"each row is divided by another size than its own, from {factor(low)} to {factor(high)} times the right one"
    yield None, Fact("row sizes", says, tuple(float(each) for each in times))
