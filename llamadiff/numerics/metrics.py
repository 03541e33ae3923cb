"""Arrays in, floats out. Everything in float64; non-finite values are counted, and left out of the sums."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.numerics.extremes import Extremes, extremes

Array = NDArray[Any]
BLOCK = 1 << 18  # values of a tensor that are _widened at once: they stay in cache
_MADE = count()


@dataclass(frozen=True)
class Stats:
    """One side of a tap: moments over its finite values, and how many are not finite.

    ``extremes`` are told of the layers' outputs alone.
    """

    rms: float
    mean: float
    min: float
    max: float
    nan: int
    inf: int
    extremes: Extremes | None = None


@dataclass(frozen=True)
class Worst:
    """The element that differs most: its token (row), its index within the tap, and both values."""

    token: int | None
    index: tuple[int, ...]
    baseline: float
    candidate: float


@dataclass(frozen=True)
class Difference:
    """Candidate against baseline over one tap.

    ``nmse`` is sum((c-b)^2) / sum(b^2); ``per_token`` the same for each row. Where one side alone is not
    finite, ``nmse`` is infinite and ``worst`` is the first such place.
    """

    nmse: float
    cosine: float
    max_abs: float
    mean_drift: float
    worst: Worst
    per_token: tuple[float, ...]


class Rows:
    """A tensor as rows of float64, one for each index of ``axis``; what comparisons need of it is computed once.

    Large tensors are _widened block by block, each time anew: then no more than a block of float64 exists.
    """

    def __init__(self, x: Array, axis: int = 0) -> None:
        self.axis = axis
        self._x = x if axis == 0 else np.moveaxis(x, axis, 0)
        self.shape = self._x.shape
        self.size = x.size
        step = max(1, BLOCK // max(1, x.size // max(1, len(self._x))))
        self.blocks = [slice(start, start + step) for start in range(0, len(self._x), step)]
        self._number = next(_MADE)
        self._errors: dict[Rows, Array] = {}  # against those made before: none holds one that holds it

    def block(self, rows: slice) -> Array:
        """Some rows: [row, value]."""
        return self._first if len(self.blocks) == 1 else self._widened(rows)

    def _widened(self, rows: slice) -> Array:
        some = self._x[rows]
        return np.asarray(some, np.float64).reshape(len(some), -1)

    @cached_property
    def _first(self) -> Array:
        return self._widened(slice(None))

    @property
    def values(self) -> Array:
        """All of it at once: [row, value]."""
        return self.block(slice(None)) if len(self.blocks) == 1 else self._widened(slice(None))

    @cached_property
    def squares(self) -> Array:
        """The sum of each row's squares."""
        return _joined([_sums_of_squares(self.block(rows)) for rows in self.blocks])

    @cached_property
    def finite(self) -> bool:
        """Whether all values are: an infinite one or NaN shows in the sum of squares, as does an overflow."""
        return bool(np.isfinite(self.squares).all() or np.isfinite(self._x).all())

    def at(self, row: slice) -> Array:
        """One row's values."""
        return np.asarray(self._widened(row)[0])

    def every(self, step: int) -> Array:
        """The values of every so many-th row."""
        return np.asarray(self._x[::step], np.float64).reshape(-1)

    def index(self, flat: int) -> tuple[int, ...]:
        """Where in the tensor a value is, counted through all rows."""
        row, *rest = (int(i) for i in np.unravel_index(flat, self.shape))
        return (*rest[: self.axis], row, *rest[self.axis :])

    def errors(self, other: Rows) -> Array:
        """sum((self-other)^2) of each row, the same either way.

        Equal non-finite values on both sides count as no difference; on one side only, as an infinite one.
        """
        older, newer = (self, other) if self._number < other._number else (other, self)
        if older not in newer._errors:
            newer._errors[older] = _joined([_sums_of_squares(gaps(self, other, rows)) for rows in self.blocks])
        return newer._errors[older]

    def reference(self) -> Array:
        """The sum of squares of each row's finite values."""
        if self.finite:
            return self.squares
        return _joined([_sums_of_squares(_finite_or_zero(self.block(rows))) for rows in self.blocks])


def _joined(parts: Sequence[Array]) -> Array:
    return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0), *parts])


def _finite_or_zero(values: Array) -> Array:
    return np.where(np.isfinite(values), values, 0.0)


def _sums_of_squares(values: Array) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(np.einsum("ij,ij->i", values, values))


def gaps(c: Rows, b: Rows, rows: slice) -> Array:
    """Differences of some rows' values; of those that are not finite: none where both are the same, else infinite."""
    left, right = c.block(rows), b.block(rows)
    with np.errstate(invalid="ignore"):
        gap = left - right
    if not (c.finite and b.finite):
        same = (np.isnan(left) & np.isnan(right)) | (left == right)
        gap = np.where(np.isfinite(gap), gap, np.where(same, 0.0, np.inf))
    return gap


def stats(x: Array | Rows) -> Stats:
    """Moments of a tap's values."""
    rows = x if isinstance(x, Rows) else Rows(x)
    if not rows.finite:
        values = rows.values
        return _moments([values[np.isfinite(values)]], int(np.isnan(values).sum()), int(np.isinf(values).sum()))
    return _moments((rows.block(some) for some in rows.blocks), 0, 0)


def with_extremes(stats: Stats, x: Array) -> Stats:
    """The same, with the shape of a layer's output [token, channel]."""
    return replace(stats, extremes=extremes(x.reshape(len(x), -1)) if len(x) else None)


def _moments(parts: Iterable[Array], nan: int, inf: int) -> Stats:
    total, squares, size, low, high = 0.0, 0.0, 0, np.inf, -np.inf
    for part in parts:
        flat = part.reshape(-1)
        if flat.size:
            total, squares, size = total + float(flat.sum()), squares + float(flat @ flat), size + flat.size
            low, high = min(low, float(flat.min())), max(high, float(flat.max()))
    if not size:
        return Stats(0.0, 0.0, 0.0, 0.0, nan, inf)
    return Stats(float(np.sqrt(squares / size)), total / size, low, high, nan, inf)


def row_errors(candidate: Array, baseline: Array, axis: int) -> tuple[Array, Array]:
    """Per row of ``axis``: sum((c-b)^2) and sum(b^2); of values that are not finite see Rows.errors."""
    c, b = Rows(candidate, axis), Rows(baseline, axis)
    return b.errors(c), b.reference()


def ratio(error: float, reference: float) -> float:
    """error / reference for sums of squares: 0 if there is no error, infinite for an error against nothing."""
    if error == 0:
        return 0.0
    return error / reference if reference > 0 else float("inf")


def decibels(nmse: float) -> float:
    """An NMSE as a level: -60 is a millionth; minus infinity for none."""
    return 10 * math.log10(nmse) if nmse > 0 else -math.inf


def nmse(candidate: Array, baseline: Array, axis: int) -> float:
    """sum((c-b)^2) / sum(b^2) over all rows."""
    return nmse_of(Rows(candidate, axis), Rows(baseline, axis))


def nmse_of(candidate: Rows, baseline: Rows) -> float:
    """sum((c-b)^2) / sum(b^2) over all rows."""
    return ratio(float(baseline.errors(candidate).sum()), float(baseline.reference().sum()))


def worst_of(candidate: Rows, baseline: Rows) -> tuple[float, Worst]:
    """The largest difference, and the element that has it."""
    largest, place = -1.0, 0
    width = candidate.size // max(1, candidate.shape[0])
    for rows in candidate.blocks:
        gap = np.abs(gaps(candidate, baseline, rows))
        here = int(gap.argmax()) if gap.size else 0
        if gap.size and gap.reshape(-1)[here] > largest:
            largest, place = float(gap.reshape(-1)[here]), rows.start * width + here
    if largest < 0:
        return 0.0, Worst(None, (), 0.0, 0.0)
    row = slice(place // width, place // width + 1)
    values = (float(side.at(row)[place % width]) for side in (baseline, candidate))
    index = candidate.index(place)
    return largest, Worst(index[candidate.axis], index, *values)


def difference(candidate: Array, baseline: Array, axis: int) -> Difference:
    """Compare two arrays of one shape; ``axis`` runs over tokens."""
    return difference_of(Rows(candidate, axis), Rows(baseline, axis))


def difference_of(candidate: Rows, baseline: Rows) -> Difference:
    """Compare two tensors of one shape."""
    error, reference = baseline.errors(candidate), baseline.reference()
    largest, worst = worst_of(candidate, baseline)
    product, sizes, sums = 0.0, np.zeros(2), np.zeros(2)
    for rows in candidate.blocks:
        c, b = candidate.block(rows).reshape(-1), baseline.block(rows).reshape(-1)
        if not (candidate.finite and baseline.finite):
            both = np.isfinite(c) & np.isfinite(b)
            c, b = np.where(both, c, 0.0), np.where(both, b, 0.0)
        product += float(c @ b)
        sizes += np.array([c @ c, b @ b])
        sums += np.array([c.sum(), b.sum()])
    norms = float(np.sqrt(sizes[0]) * np.sqrt(sizes[1]))
    cosine = product / norms if norms > 0 else (1.0 if not error.any() else 0.0)
    mean_drift = float(sums[0] - sums[1]) / candidate.size if candidate.size else 0.0
    per_token = tuple(ratio(float(e), float(r)) for e, r in zip(error, reference, strict=True))
    nmse = ratio(float(error.sum()), float(reference.sum()))
    return Difference(nmse, cosine, largest, mean_drift, worst, per_token)


def log_softmax(logits: Array) -> Array:
    """Log-probabilities over the last axis, in float64."""
    wide = np.asarray(logits, np.float64)
    wide = wide - wide.max(axis=-1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True)))


def kl_divergence(baseline: Array, candidate: Array) -> float:
    """KL(baseline || candidate) in nats between the distributions of two logit vectors; NaN if they are none."""
    with np.errstate(invalid="ignore"):
        p, q = log_softmax(baseline), log_softmax(candidate)
        total = float(np.where(np.isneginf(p), 0.0, np.exp(p) * (p - q)).sum())
    return total if np.isnan(total) else max(0.0, total)
