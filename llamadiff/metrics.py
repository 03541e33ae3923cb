"""Arrays in, floats out. Everything in float64; non-finite values are counted, and left out of the sums."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Stats:
    """One side of a tap: moments over its finite values, and how many are not finite."""

    rms: float
    mean: float
    min: float
    max: float
    nan: int
    inf: int


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
    """A tensor in float64, a row for each index of ``axis``; what comparisons need of it is computed once.

    ``values`` is [row, value], ``squares`` the sum of each row's squares.
    """

    def __init__(self, x: Array, axis: int = 0) -> None:
        self.axis = axis
        moved = x if axis == 0 else np.moveaxis(x, axis, 0)
        self.outer = moved.shape
        self.values = np.asarray(moved, np.float64).reshape(len(moved), -1)
        self._gaps: dict[int, tuple[Rows, Array]] = {}

    @cached_property
    def squares(self) -> Array:
        return _sums_of_squares(self.values)

    @cached_property
    def finite(self) -> bool:
        """Whether all values are: an infinite one or NaN shows in the sum of squares, as does an overflow."""
        return bool(np.isfinite(self.squares).all() or np.isfinite(self.values).all())

    def index(self, flat: int) -> tuple[int, ...]:
        """Where in the tensor a value of ``values`` is."""
        row, *rest = (int(i) for i in np.unravel_index(flat, self.outer))
        return (*rest[: self.axis], row, *rest[self.axis :])

    def errors(self, other: Rows) -> Array:
        """sum((self-other)^2) of each row, the same either way.

        Equal non-finite values on both sides count as no difference; on one side only, as an infinite one.
        """
        found = self._gaps.get(id(other))
        if found is None:
            errors = _sums_of_squares(_gap(self, other))
            found = self._gaps[id(other)] = other, errors  # the other is kept: its id stays its own
            other._gaps[id(self)] = self, errors
        return found[1]

    def reference(self) -> Array:
        """The sum of squares of each row's finite values."""
        if self.finite:
            return self.squares
        return _sums_of_squares(np.where(np.isfinite(self.values), self.values, 0.0))


def _sums_of_squares(values: Array) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(np.einsum("ij,ij->i", values, values))


def _gap(c: Rows, b: Rows) -> Array:
    """Differences of values; of those that are not finite: none where both are the same, else infinite."""
    with np.errstate(invalid="ignore"):
        gap = c.values - b.values
    if not (c.finite and b.finite):
        same = (np.isnan(c.values) & np.isnan(b.values)) | (c.values == b.values)
        gap = np.where(np.isfinite(gap), gap, np.where(same, 0.0, np.inf))
    return gap


def stats(x: Array | Rows) -> Stats:
    """Moments of a tap's values."""
    rows = x if isinstance(x, Rows) else Rows(x)
    values, nan, inf = rows.values, 0, 0
    if not rows.finite:
        nan, inf = int(np.isnan(values).sum()), int(np.isinf(values).sum())
        values = values[np.isfinite(values)]
    if not values.size:
        return Stats(0.0, 0.0, 0.0, 0.0, nan, inf)
    rms = float(np.sqrt(rows.reference().sum() / values.size))
    return Stats(rms, float(values.mean()), float(values.min()), float(values.max()), nan, inf)


def row_errors(candidate: Array, baseline: Array, axis: int) -> tuple[Array, Array]:
    """Per row of ``axis``: sum((c-b)^2) and sum(b^2); of values that are not finite see Rows.errors."""
    c, b = Rows(candidate, axis), Rows(baseline, axis)
    return b.errors(c), b.reference()


def ratio(error: float, reference: float) -> float:
    """error / reference for sums of squares: 0 if there is no error, infinite for an error against nothing."""
    if error == 0:
        return 0.0
    return error / reference if reference > 0 else float("inf")


def nmse(candidate: Array, baseline: Array, axis: int) -> float:
    """sum((c-b)^2) / sum(b^2) over all rows."""
    return nmse_of(Rows(candidate, axis), Rows(baseline, axis))


def nmse_of(candidate: Rows, baseline: Rows) -> float:
    """sum((c-b)^2) / sum(b^2) over all rows."""
    return ratio(float(baseline.errors(candidate).sum()), float(baseline.reference().sum()))


def worst_of(candidate: Rows, baseline: Rows) -> tuple[float, Worst]:
    """The largest difference, and the element that has it."""
    gap = np.abs(_gap(candidate, baseline))
    if not gap.size:
        return 0.0, Worst(None, (), 0.0, 0.0)
    place = int(gap.argmax())
    index = candidate.index(place)
    values = (float(side.values.reshape(-1)[place]) for side in (baseline, candidate))
    return float(gap.reshape(-1)[place]), Worst(index[candidate.axis] if index else None, index, *values)


def difference(candidate: Array, baseline: Array, axis: int) -> Difference:
    """Compare two arrays of one shape; ``axis`` runs over tokens."""
    return difference_of(Rows(candidate, axis), Rows(baseline, axis))


def difference_of(candidate: Rows, baseline: Rows) -> Difference:
    """Compare two tensors of one shape."""
    c, b, error, reference = candidate.values, baseline.values, baseline.errors(candidate), baseline.reference()
    largest, worst = worst_of(candidate, baseline)
    if not (candidate.finite and baseline.finite):
        both = np.isfinite(c) & np.isfinite(b)
        c, b = np.where(both, c, 0.0), np.where(both, b, 0.0)
    cf, bf = c.reshape(-1), b.reshape(-1)
    norms = float(np.linalg.norm(cf) * np.linalg.norm(bf))
    cosine = float(cf @ bf) / norms if norms > 0 else (1.0 if not error.any() else 0.0)
    mean_drift = float(cf.mean() - bf.mean()) if cf.size else 0.0
    per_token = tuple(ratio(float(e), float(r)) for e, r in zip(error, reference, strict=True))
    nmse = ratio(float(error.sum()), float(reference.sum()))
    return Difference(nmse, cosine, largest, mean_drift, worst, per_token)


def log_softmax(logits: Array) -> Array:
    """Log-probabilities over the last axis, in float64."""
    wide = np.asarray(logits, np.float64)
    wide = wide - wide.max(axis=-1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True)))


def kl_divergence(baseline: Array, candidate: Array) -> float:
    """KL(baseline || candidate) in nats between the distributions of two logit vectors."""
    p, q = log_softmax(baseline), log_softmax(candidate)
    return float(max(0.0, (np.exp(p) * (p - q)).sum()))
