"""By what a norm divided its rows: epsilon, power, channels, or another size."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.diagnose.read_back.normed import Normed
from llamadiff.diagnose.read_back.observed import IN_16_BITS, NOTHING, Facts, first_told, sole
from llamadiff.judge.pattern.deviation import Fact
from llamadiff.numerics.arithmetic import ROUNDINGS

Array = NDArray[Any]
SEARCHED = 8  # rows by which ranges of channels are looked for
MOST_CHANNELS = 1024  # of which all ranges are tried; of more, those from the first or to the last
STEPS = (2, 4, 8, 16, 32, 64)  # of channels that a sum may take
CLOSE = 1e-4  # of a mean square's size, that two may differ by and be one


def divided(n: Normed, factors: Array) -> Facts:
    """Every row has one factor: what it was divided by, as a function of the row."""
    square, divisor, epsilon = n.square, factors**-2.0, n.epsilon
    added = sole(divisor - square, CLOSE * float(square.min()))
    if added is not None and n.fits(n.by(np.sqrt(np.maximum(square + added, 1e-300)))):
        added = 0.0 if abs(added) < max(CLOSE * epsilon, NOTHING * float(square.min())) else added
        says = f"each row is divided by sqrt(mean square + {added:.3g}), where {epsilon:.3g} is right"
        yield Fact("epsilon", says, (added,))
        return
    yield from first_told(
        (_least, _one_size, _power, _by_fewer, _summed, _strided, _magnitude, _in_16_bits, _apart), n, divisor, epsilon
    )


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
    if n.fits(n.by(np.sqrt(np.maximum(square, least) + added))):
        yield Fact("least square", f"each row's mean square counts as at least {least:.4g}", (least, added))
        if abs(added - epsilon) > CLOSE * low:
            yield Fact("epsilon", f"its epsilon is {added:.3g}, where {epsilon:.3g} is right", (added,))


def _one_size(n: Normed, divisor: Array, epsilon: float) -> Facts:
    """One number for all rows: perhaps the right one of one of them."""
    number = sole(np.sqrt(divisor), CLOSE * float(np.sqrt(divisor.min())))
    if number is None or len(divisor) < 2:
        return
    near = np.abs(np.sqrt(n.square + epsilon) - number)
    whose = f", which is right in row {int(near.argmin())}" if near.min() <= CLOSE * number else ""
    yield Fact("one size", f"all rows are divided by one number, {number:.4g}{whose}", (number,))


def _power(n: Normed, divisor: Array, epsilon: float) -> Facts:
    """Another power of the mean square than a half."""
    logs = np.log(n.square + epsilon)
    power = float((logs * np.log(divisor)).sum() / np.square(logs).sum()) / 2
    if 0.1 < power < 2 and abs(power - 0.5) > 1e-3 and n.fits(n.by((n.square + epsilon) ** power)):
        says = f"each row is divided by its mean square to the power {power:.4g}, where 0.5 is right"
        yield Fact("power", says, (power,))


def _by_fewer(n: Normed, divisor: Array, epsilon: float) -> Facts:
    """A sum of squares that is divided by another number than there are channels."""
    width = n.x.shape[1]
    found = np.square(n.x).sum(axis=1) / np.maximum(divisor - epsilon, 1e-300)
    count = sole(found, CLOSE * width)
    if count is not None and round(count) != width and n.fits(n.by(np.sqrt(n.square * width / round(count) + epsilon))):
        says = f"its sum of squares is divided by {round(count)}, where {width} is right"
        yield Fact("squares by", says, (round(count),))


def _in_16_bits(n: Normed, divisor: Array, epsilon: float) -> Facts:
    """A number on the way to a row's divisor that has 16 bits."""
    square = n.square
    for kind, name in IN_16_BITS.items():

        def rounded(x: Array, kind: str = kind) -> Array:
            return np.asarray(ROUNDINGS[kind](x.astype(np.float32)), np.float64)

        for words, size in (
            ("mean square", np.sqrt(rounded(square) + epsilon)),
            ("mean square plus epsilon", np.sqrt(rounded(square + epsilon))),
            ("root mean square", rounded(np.sqrt(square + epsilon))),
            ("factor", 1 / rounded(1 / np.sqrt(square + epsilon))),
        ):
            if n.fits(n.by(size)):
                yield Fact("norm in 16 bits", f"each row's {words} is rounded to {name}", (words, name))
                return


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


def _strided(n: Normed, divisor: Array, epsilon: float) -> Facts:
    """A mean square over every second channel, or fewer."""
    for step in STEPS:
        for first in range(step if n.x.shape[1] % step == 0 else 0):
            if n.fits(n.by(np.sqrt(np.square(n.x[:, first::step]).mean(axis=1) + epsilon))):
                says = f"its mean square is of one channel in {step} alone, from channel {first} on"
                yield Fact("channels strided", says, (step, first))
                return


def _magnitude(n: Normed, divisor: Array, epsilon: float) -> Facts:
    """Another size of a row than its root mean square."""
    sizes = {"mean": np.abs(n.x).mean(axis=1), "largest": np.abs(n.x).max(axis=1)}
    for words, size in sizes.items():
        added = sole(np.sqrt(divisor) - size, CLOSE * float(size.min()))
        if added is not None and n.fits(n.by(size + added)):
            plus = f" plus {added:.3g}" if abs(added) > CLOSE * size.min() else ""
            says = f"each row is divided by its {words} magnitude{plus}, where its root mean square is right"
            yield Fact("magnitude", says, (added,))
            return


def _apart(n: Normed, divisor: Array, epsilon: float) -> Facts:
    """Each row's own size, that none of these is: what is wrong is its sum, and neither the weight nor the input."""
    times = np.sqrt(divisor / (n.square + epsilon))
    alike = sole(times, CLOSE) is not None or (np.abs(times - 1) <= CLOSE).any()
    if alike or len(times) != len(n.o.recorded):  # one factor, rows that are right, or heads
        return
    low, high = float(times.min()), float(times.max())
    says = f"each row is divided by another size than its own, from {low:.4g} to {high:.4g} times the right one"
    yield Fact("row sizes", says, tuple(float(each) for each in times))
