"""Arrays in, floats out. Everything in float64; non-finite values are counted, and left out of the sums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.numerics.compiled import rows as compiled
from llamadiff.numerics.extremes import Extremes, extremes
from llamadiff.system.pages import in_parts, in_same_parts

Array = NDArray[Any]
BLOCK = 1 << 18  # values of a tensor that are _widened at once, and kept so where there are no more
FINE = 1 << 16  # values of a larger one that are looked at at once: with all that is made of them they stay in cache
ALIKE = 1e6  # how far apart squares may be whose difference still has ten digits of what is looked for
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
        x = np.asarray(x)  # what looks into a file is slower to cut
        self._x = x if axis == 0 else np.moveaxis(x, axis, 0)
        self.shape = self._x.shape
        self.size = x.size
        step = max(1, BLOCK // max(1, x.size // max(1, len(self._x))))
        self.blocks = [slice(start, start + step) for start in range(0, len(self._x), step)]
        self._number = next(_MADE)
        self._pairs: dict[Rows, _Pair] = {}  # with those made before: none holds one that holds it

    def block(self, rows: slice) -> Array:
        """Some rows: [row, value]."""
        return self._first if len(self.blocks) == 1 else self._widen(rows)

    def _widen(self, rows: slice) -> Array:
        some = self._x[rows]
        return np.asarray(some, np.float64).reshape(len(some), -1)

    @cached_property
    def _first(self) -> Array:
        return self._widen(slice(None))

    @property
    def values(self) -> Array:
        """All of it at once: [row, value]."""
        return self.block(slice(None)) if len(self.blocks) == 1 else self._widen(slice(None))

    @cached_property
    def _look(self) -> compiled.Look | None:
        """``squares`` and ``extremes``, compiled; None where that is not to be had."""
        found = [compiled.look(self._x[rows]) for rows in in_parts(self._x)]
        seen = [part for part in found if part is not None]
        return compiled.join_looks(seen) if seen and len(seen) == len(found) else None

    @cached_property
    def squares(self) -> Array:
        """The sum of each row's squares."""
        if self._look is not None:
            return self._look.squares
        if len(self.blocks) == 1:
            return _sums_of_squares(self._first)
        return _join_blocks([_sums_of_squares(self._widen(rows)) for rows in _fine_slices(self, self)])

    @cached_property
    def extremes(self) -> tuple[float, float, float]:
        """Of finite values: their sum, the smallest, the largest."""
        if self._look is not None:
            return self._look.edges
        if len(self.blocks) == 1:
            return float(self._first.sum()), float(self._first.min()), float(self._first.max())
        every = (self._widen(rows) for rows in _fine_slices(self, self))
        sums, lows, highs = zip(*((float(x.sum()), float(x.min()), float(x.max())) for x in every), strict=True)
        return sum(sums), min(lows), max(highs)

    @cached_property
    def finite(self) -> bool:
        """Whether all values are: an infinite one or NaN shows in the sum of squares, as does an overflow."""
        return bool(np.isfinite(self.squares).all() or np.isfinite(self._x).all())

    def row_values(self, row: slice) -> Array:
        """One row's values."""
        return np.asarray(self._widen(row)[0])

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
        return self.pair(other).errors

    def pair(self, other: Rows) -> _Pair:
        """What their differences are, the same either way."""
        older, newer = (self, other) if self._number < other._number else (other, self)
        if older not in newer._pairs:
            newer._pairs[older] = _compiled_pair(self, other) or _pair(self, other)
        return newer._pairs[older]

    def measure(self) -> Rows:
        """The same, with its sums and extremes known: in one look at it."""
        _ = self.extremes
        return self

    def looked_at(self, found: compiled.Look) -> None:
        """What was seen of the rows while they were read for something else."""
        self.__dict__.setdefault("_look", found)

    @property
    def x(self) -> Array:
        """The tensor."""
        return np.moveaxis(self._x, 0, self.axis)

    def reference(self) -> Array:
        """The sum of squares of each row's finite values."""
        if self.finite:
            return self.squares
        return _join_blocks([_sums_of_squares(_finite_or_zero(self.block(rows))) for rows in self.blocks])


@dataclass(frozen=True)
class _Pair:
    """Differences of two tensors: each row's sum of squares; the largest one, and where it is, counted through all."""

    errors: Array
    largest: float
    place: int

    @classmethod
    def of(cls, parts: Iterable[tuple[int, Array, Array]]) -> _Pair:
        """Of blocks: where each begins, its rows' sums of squares, and its sizes of differences [row, value]."""
        errors, largest, place = [np.zeros(0)], -1.0, 0
        for start, sums, sizes in parts:
            errors.append(sums)
            here = int(sizes.argmax()) if sizes.size else 0
            if sizes.size and sizes.reshape(-1)[here] > largest:
                largest, place = float(sizes.reshape(-1)[here]), start * sizes.shape[1] + here
        return cls(np.concatenate(errors), largest, place)


def _compiled_pair(c: Rows, b: Rows) -> _Pair | None:
    """In one look at both, compiled; None where that is not to be had, or not all is finite."""
    seen, largest, place = list[compiled.Gaps](), -1.0, 0
    for rows in in_same_parts(c._x, b._x):
        found = compiled.gaps(c._x[rows], b._x[rows])
        if found is None:
            return None
        seen.append(found)
        if found.largest > largest:
            largest, place = found.largest, rows.start * (c.size // len(c._x)) + found.place
    c.looked_at(compiled.join_looks([found.left for found in seen]))
    b.looked_at(compiled.join_looks([found.right for found in seen]))
    if not (c.finite and b.finite):
        return None
    return _Pair(_join_blocks([found.squares for found in seen]), largest, place)


def _pair(c: Rows, b: Rows) -> _Pair:
    """Some rows at a time, with care of what is not finite."""
    parts = ((rows.start, gaps(c, b, rows)) for rows in _fine_slices(c, b))
    return _Pair.of((start, _sums_of_squares(gap), np.abs(gap, out=gap)) for start, gap in parts)


def _fine_slices(a: Rows, b: Rows) -> Iterator[slice]:
    """A few rows of two tensors at a time; all of small ones, which are kept widened."""
    if len(a.blocks) < 2:
        yield from a.blocks
        return
    step = max(1, FINE // max(1, a.size // len(a._x)))
    for part in in_same_parts(a._x, b._x):
        yield from (slice(start, min(start + step, part.stop)) for start in range(part.start, part.stop, step))


def _join_blocks(parts: Sequence[Array]) -> Array:
    return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0), *parts])


def _finite_or_zero(values: Array) -> Array:
    return np.where(np.isfinite(values), values, 0.0)


def _sums_of_squares(values: Array) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(values[:, None, :] @ values[:, :, None])[:, 0, 0]  # faster than einsum


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
        some = values[np.isfinite(values)]
        nan, inf = int(np.isnan(values).sum()), int(np.isinf(values).sum())
        edges = (float(some.sum()), float(some.min()), float(some.max())) if some.size else (0.0, 0.0, 0.0)
        return _moments(float(some @ some), *edges, some.size, nan, inf)
    total, low, high = rows.extremes if rows.size else (0.0, 0.0, 0.0)
    return _moments(float(rows.squares.sum()), total, low, high, rows.size)


def with_extremes(stats: Stats, x: Array) -> Stats:
    """The same, with the shape of a layer's output [token, channel]."""
    return replace(stats, extremes=extremes(x.reshape(len(x), -1), stats.mean) if len(x) else None)


def _moments(squares: float, total: float, low: float, high: float, size: int, nan: int = 0, inf: int = 0) -> Stats:
    if not size:
        return Stats(0.0, 0.0, 0.0, 0.0, nan, inf)
    return Stats(float(np.sqrt(squares / size)), total / size, low, high, nan, inf)


def ratio(error: float, reference: float) -> float:
    """error / reference for sums of squares: 0 if there is no error, infinite for an error against nothing."""
    if error == 0:
        return 0.0
    return error / reference if reference > 0 else float("inf")


def ratios(errors: Array, references: Array) -> tuple[float, ...]:
    """``ratio`` of each."""
    with np.errstate(all="ignore"):
        found = np.where(references > 0, np.divide(errors, references), np.inf)
    return tuple(np.where(errors == 0, 0.0, found).tolist())


def nmse(candidate: Array, baseline: Array, axis: int) -> float:
    """sum((c-b)^2) / sum(b^2) over all rows."""
    return nmse_of(Rows(candidate, axis), Rows(baseline, axis))


def nmse_of(candidate: Rows, baseline: Rows) -> float:
    """sum((c-b)^2) / sum(b^2) over all rows."""
    return ratio(float(baseline.errors(candidate).sum()), float(baseline.reference().sum()))


def worst_of(candidate: Rows, baseline: Rows) -> tuple[float, Worst]:
    """The largest difference, and the element that has it."""
    pair, width = baseline.pair(candidate), candidate.size // max(1, candidate.shape[0])
    largest, place = pair.largest, pair.place
    if largest < 0:
        return 0.0, Worst(None, (), 0.0, 0.0)
    row = slice(place // width, place // width + 1)
    values = (float(side.row_values(row)[place % width]) for side in (baseline, candidate))
    index = candidate.index(place)
    return largest, Worst(index[candidate.axis], index, *values)


def difference(candidate: Array, baseline: Array, axis: int) -> Difference:
    """Compare two arrays of one shape; ``axis`` runs over tokens."""
    return difference_of(Rows(candidate, axis), Rows(baseline, axis))


def difference_of(candidate: Rows, baseline: Rows) -> Difference:
    """Compare two tensors of one shape."""
    error, reference = baseline.errors(candidate), baseline.reference()
    largest, worst = worst_of(candidate, baseline)
    product, sizes, sums = _products(candidate, baseline, float(error.sum()))
    norms = float(np.sqrt(sizes[0]) * np.sqrt(sizes[1]))
    cosine = product / norms if norms > 0 else (1.0 if not error.any() else 0.0)
    mean_drift = float(sums[0] - sums[1]) / candidate.size if candidate.size else 0.0
    per_token = ratios(error, reference)
    nmse = ratio(float(error.sum()), float(reference.sum()))
    return Difference(nmse, cosine, largest, mean_drift, worst, per_token)


def _products(c: Rows, b: Rows, error: float) -> tuple[float, Array, Array]:
    """c . b, and of both sides their own product and sum; ``error`` is that of their difference.

    Of finite sides of a like size 2 c . b = c . c + b . b - error, and the rest is known already.
    """
    sides = c, b
    if c.size and c.finite and b.finite:
        sizes = np.array([float(side.squares.sum()) for side in sides])
        if sizes.max() <= ALIKE * sizes.min():
            return (float(sizes.sum()) - error) / 2, sizes, np.array([side.extremes[0] for side in sides])
    product, sizes, sums = 0.0, np.zeros(2), np.zeros(2)
    for rows in c.blocks:
        parts = [side.block(rows).reshape(-1) for side in sides]
        if not (c.finite and b.finite):
            both = np.isfinite(parts[0]) & np.isfinite(parts[1])
            parts = [np.where(both, part, 0.0) for part in parts]
        product += float(parts[0] @ parts[1])
        sizes += np.array([part @ part for part in parts])
        sums += np.array([part.sum() for part in parts])
    return product, sizes, sums


def where_known(x: Array, mask: Array | None, relative: bool = False) -> Array:
    """Values that a mask has, and zero elsewhere; without a mask all of them.

    ``relative``: less the mean of those that a row has, along the last axis: as they are known up to a constant a row.
    """
    if mask is None:
        return x
    if relative:
        count = np.maximum(mask.sum(axis=-1, keepdims=True), 1)
        mean = np.where(mask, x, x.dtype.type(0)).sum(axis=-1, keepdims=True, dtype=np.float64) / count
        x = (x - mean).astype(x.dtype)
    return np.where(mask, x, x.dtype.type(0))


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
