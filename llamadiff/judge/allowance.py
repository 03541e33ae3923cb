"""How much of a tap's error rounding explains: over the whole tensor, in one row, in one channel, in one value.

Rounding is even: it spreads over rows, channels and values as a sample of it does. A sample is the difference of two
computations of the tap that differ by such a rounding. So one wrong row, channel or value stands out of a tensor that
is right as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.numerics import tolerances
from llamadiff.numerics.metrics import Rows, gaps

Array = NDArray[Any]

WHOLE, ROW, VALUE = 10.0, 100.0, 1e4  # how many times a match's mean square all values, a row and a value may have
EVEN = 4.0  # how much further than the whole tensor a row or a channel may be from what rounding leaves on average
PEAK = 64.0  # the same for a value: eight times its usual size
OWN = 4.0  # a value that is cut off is twice as far from what it was as one that is rounded
SHRUNK = 8  # rows or channels that the mean counts for, where few are there to tell how rounding is spread
FAINT = 0.01  # of the mean square: fainter rows and channels are measured against this much
SAMPLED = 32.0  # values: the sum of so few squares may be twice what another sample of them has
FEW = 8.0  # a sum of few squares may exceed its expectation: 1 + FEW / sqrt(count) times
ULPS = {"f32": 0.0, "f16": 2.0**-10, "bf16": 2.0**-7}  # of a value: one step, as far as cutting off can move it


@dataclass(frozen=True)
class Hiding:
    """The largest error that would still be taken for rounding, each relative to what is right.

    ``whole`` is an NMSE, ``row`` that of a row, ``value`` |error| / rms of the tap.
    """

    whole: float
    row: float
    value: float


@dataclass(frozen=True)
class Sample:
    """Two computations of a tap that differ by a rounding, and how many times its square counts."""

    weight: float
    one: Rows
    other: Rows


@dataclass(frozen=True)
class Noise:
    """The mean squares that rounding leaves: rows [row, 1] times channels [1, channel], and a share of each value's."""

    rows: Array
    channels: Array
    relative: float

    @classmethod
    def of(cls, samples: Sequence[Sample], right: Rows) -> Noise:
        """As samples show it; of them, values that are not finite say nothing."""
        count, width = right.shape[0], right.size // max(1, right.shape[0])
        if not samples:
            return cls(np.zeros((count, 1)), np.ones((1, width)), 0.0)
        rows, channels = np.zeros(count), np.zeros(width)
        for sample in samples:
            for some in right.blocks:
                gap = sample.one.block(some) - sample.other.block(some)
                squares = sample.weight * np.square(np.where(np.isfinite(gap), gap, 0.0))
                rows[some] += squares.sum(axis=1)
                channels += squares.sum(axis=0)
        mean = rows.sum() / max(1, right.size)
        relative = ratio_of(rows.sum(), right.reference().sum())
        if not mean:
            return cls(np.zeros((count, 1)), np.ones((1, width)), 0.0)
        return cls(_shrunk(rows, width, mean)[:, None], _shrunk(channels, count, mean)[None] / mean, relative)


def ratio_of(error: float, size: float) -> float:
    """error / size; 0 against nothing."""
    return float(error / size) if size > 0 else 0.0


def _shrunk(sums: Array, count: int, mean: float) -> Array:
    """Means of so many values each, drawn towards the mean of all where they are few."""
    return np.asarray((sums + SHRUNK * mean) / (count + SHRUNK))


@dataclass(frozen=True)
class Even:
    """What a match may err by that is one in every part: the sums of squares of the ``whole`` and of ``rows``, and the
    square of a ``value``.
    """

    whole: float
    rows: Array
    value: float

    @classmethod
    def of(cls, match: float, sizes: Array, width: int) -> Even:
        """Of a tensor whose rows have these sums of squares."""
        least = _at_least(sizes)
        value = VALUE * match * float(least.min(initial=np.inf)) / max(1, width)
        return cls(float(match * sizes.sum()), ROW * match * least, value)

    def holds(self, errors: Array, largest: float) -> bool:
        """Whether rows' sums of squared errors and the largest difference of a value are within it."""
        return bool(errors.sum() <= self.whole and (errors <= self.rows).all() and largest * largest <= self.value)


def unseen(match: float) -> Hiding:
    """What could hide in a match, whatever noise there might be."""
    return Hiding(match, ROW * match, float(np.sqrt(VALUE * match)))


@dataclass(frozen=True)
class Allowance:
    """The limits of one tap.

    ``right`` is what it should be, ``match`` the NMSE of right arithmetic, ``samples`` make those of its noise,
    ``precision`` is what its values are kept in, ``besides`` an NMSE that rounding leaves of each row besides, and
    ``peaked`` times that of some of its values.
    """

    right: Rows
    match: float
    samples: Callable[[], Sequence[Sample]] = tuple
    precision: str = "f32"
    besides: float = 0.0
    peaked: float = 1.0

    def is_even(self, errors: Array, largest: float) -> bool:
        """Whether rows' sums of squared errors and the largest difference of a value are a match's throughout."""
        return Even.of(self.match, self._size, self._width).holds(errors, largest)

    def holds(self, errors: Array, recorded: Rows) -> bool:
        """Whether rounding explains rows' sums of squared errors, as a whole and in every part."""
        return bool(errors.sum() <= self.whole) and self.parts_fit(errors, recorded)

    def parts_fit(self, errors: Array, recorded: Rows) -> bool:
        """Whether no row, channel or value stands out."""
        if not (errors <= self.row).all():
            return False
        channels = np.zeros(self._width)
        for some in self.right.blocks:
            error = np.abs(gaps(recorded, self.right, some))
            if not (error <= self._value(some)).all():
                return False
            channels += np.square(error).sum(axis=0)
        rows = int(np.count_nonzero(self._size))  # those that could not be judged are zero on both sides
        return bool((channels <= self._part(self._sums.right_channels, self._sums.channels, rows)).all())

    @cached_property
    def noise(self) -> Noise:
        """What rounding leaves."""
        return Noise.of(self.samples(), self.right)

    @cached_property
    def whole(self) -> float:
        """The largest sum of squared errors."""
        few = 1 + SAMPLED / max(1, self.right.size)
        return float(WHOLE * self.match * self._size.sum() + few * self._rows.sum())

    @cached_property
    def row(self) -> Array:
        """The same of each row."""
        return self._part(self._size, self._rows, self._width)

    @cached_property
    def _rows(self) -> Array:
        """What rounding leaves in each row."""
        if self._is_exact:
            return np.asarray(OWN * tolerances.ROUNDING[self.precision] * self._size)
        return self._sums.rows

    @property
    def _is_exact(self) -> bool:
        """Whether nothing is rounded but the values themselves, to float32: then no value is to be looked at."""
        return not self.noise.relative and not self.besides and not ULPS[self.precision]

    def detection_floor(self) -> Hiding:
        """What could hide below these limits."""
        total = float(self._size.sum())
        if not total:
            return Hiding(0.0, 0.0, 0.0)
        rms = np.sqrt(total / self.right.size)
        if self._is_exact:
            value = float(np.sqrt(VALUE * self.match * _at_least(self._size).max() / max(1, self._width)))
        else:
            value = max(float(self._value(some).max()) for some in self.right.blocks)
        return Hiding(self.whole / total, float((self.row / _at_least(self._size)).max()), value / rms)

    @property
    def _size(self) -> Array:
        return self.right.reference()

    @property
    def _width(self) -> int:
        return int(self.right.size // max(1, self.right.shape[0]))

    def _value(self, some: slice) -> Array:
        """The largest error of each value of some rows."""
        right = self.right.block(some)
        size = _at_least(self._size)[some, None] / max(1, self._width)
        return np.asarray(
            np.sqrt(VALUE * self.match * size + PEAK * self._expected_squares(right, some, self.peaked))
            + ULPS[self.precision] * abs(right)
        )

    def _expected_squares(self, right: Array, some: slice, peaked: float = 1.0) -> Array:
        """The mean square that rounding of other values leaves of each."""
        sampled = self.noise.rows[some] * self.noise.channels + self.noise.relative * np.square(right)
        size = self._size[some, None] / max(1, self._width)
        return np.asarray(sampled + self.besides * (peaked * size + np.square(right)))

    @cached_property
    def _sums(self) -> _Sums:
        """What rounding leaves in each row and each channel, that of the value itself included."""
        rows, channels, right = np.zeros(self.right.shape[0]), np.zeros(self._width), np.zeros(self._width)
        own = OWN * tolerances.ROUNDING[self.precision]
        for some in self.right.blocks:
            values = self.right.block(some)
            squares = np.square(values)
            rows[some] = (self._expected_squares(values, some) + own * squares).sum(axis=1)
            channels += (self._expected_squares(values, some, self.peaked) + own * squares).sum(axis=0)
            right += squares.sum(axis=0)
        return _Sums(rows, channels, right)

    def _part(self, size: Array, expected: Array, count: int) -> Array:
        """The limit of rows or channels of so many values each."""
        few = 1 + FEW / np.sqrt(max(1, count))
        return np.asarray(ROW * self.match * _at_least(size) + EVEN * few * expected)


@dataclass(frozen=True)
class _Sums:
    """Squares that rounding leaves, of each row and channel, and the right channels' own."""

    rows: Array
    channels: Array
    right_channels: Array


def _at_least(sizes: Array) -> Array:
    """Sums of squares, none much smaller than their mean."""
    return np.maximum(sizes, FAINT * sizes.mean()) if sizes.size else sizes
