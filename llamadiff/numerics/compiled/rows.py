"""What comparing asks of tensors' rows, in one look at them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamadiff.numerics.compiled.library import library

Array = NDArray[Any]


class _Tensor(ctypes.Structure):
    """struct tensor (kernels.c)."""

    _fields_ = (("values", ctypes.c_void_p), ("row", ctypes.c_int64), ("part", ctypes.c_int64))


@dataclass(frozen=True)
class _Layout:
    """Where the values of a tensor's rows are: ``parts`` pieces of ``width`` values each, so many values apart."""

    values: Array
    row: int
    part: int
    parts: int
    width: int

    @property
    def tensor(self) -> _Tensor:
        return _Tensor(self.values.ctypes.data, self.row, self.part)


class Look(NamedTuple):
    """Of rows: each one's sum of squares; of all values their sum, the smallest and the largest."""

    squares: Array
    edges: tuple[float, float, float]

    @classmethod
    def of(cls, squares: Array, edges: Sequence[float]) -> Look:
        total, low, high = edges
        return cls(squares, (total, low, high))


class Gaps(NamedTuple):
    """Of rows of two tensors: each one's sum of squares of their differences; the largest |a - b|, and where it is,
    counted through all rows; each of the two as ``look`` has it.
    """

    squares: Array
    largest: float
    place: int
    left: Look
    right: Look


def look(x: Array) -> Look | None:
    """Look at rows of float32, [row, ...]; None for any other values."""
    compiled = library()
    found = None if compiled is None else _layout(x)
    if compiled is None or found is None:
        return None
    squares, edges = np.empty(len(x)), (ctypes.c_double * 3)()
    compiled.llamadiff_look(ctypes.byref(found.tensor), len(x), found.parts, found.width, squares.ctypes.data, edges)
    return Look.of(squares, edges[:])


def join_looks(parts: Sequence[Look]) -> Look:
    """Of rows that follow each other."""
    if len(parts) == 1:
        return parts[0]
    sums, lows, highs = zip(*(part.edges for part in parts), strict=True)
    return Look(np.concatenate([part.squares for part in parts]), (sum(sums), min(lows), max(highs)))


def gaps(a: Array, b: Array) -> Gaps | None:
    """Compare rows of float32, [row, ...]; None for any other values."""
    compiled = library()
    left, right = (None, None) if compiled is None else (_layout(a), _layout(b))
    if compiled is None or left is None or right is None:
        return None
    if left.parts != right.parts:
        left, right = _cut_rows(left, right.parts), _cut_rows(right, left.parts)
    if (left.parts, left.width) != (right.parts, right.width):
        return None
    sums, largest, place, edges = np.empty((3, len(a))), ctypes.c_double(), ctypes.c_int64(), (ctypes.c_double * 6)()
    compiled.llamadiff_gaps(
        ctypes.byref(left.tensor), ctypes.byref(right.tensor), len(a), left.parts, left.width,
        sums.ctypes.data, ctypes.byref(largest), ctypes.byref(place), edges,
    )  # fmt: skip
    return Gaps(sums[0], largest.value, place.value, Look.of(sums[1], edges[:3]), Look.of(sums[2], edges[3:]))


def moments(x: Array, mean: float) -> tuple[float, float, float, int] | None:
    """Of values of float32 that lie together: the sums of the powers two to four of x - mean, and where the largest |x|
    is. None for any other values.
    """
    compiled = library()
    if compiled is None or x.dtype != np.float32 or not x.size or not x.flags.c_contiguous:
        return None
    sums, place = (ctypes.c_double * 3)(), ctypes.c_int64()
    compiled.llamadiff_moments(x.ctypes.data, x.size, mean, sums, ctypes.byref(place))
    return sums[0], sums[1], sums[2], place.value


def _layout(x: Array) -> _Layout | None:
    """Rows as they lie, or a copy of them where they are not pieces that lie equally far apart; None if not float32."""
    if x.dtype != np.float32 or not x.size:
        return None
    width = x.size // len(x)
    if not x.flags.c_contiguous:
        row = x.strides[0] // 4
        if x.ndim > 1 and x[0].flags.c_contiguous:
            return _Layout(x, row, width, 1, width)
        if x.ndim == 3 and x.strides[2] == 4 and x.strides[1] % 4 == 0:
            return _Layout(x, row, x.strides[1] // 4, x.shape[1], x.shape[2])
        x = np.ascontiguousarray(x)
    return _Layout(x, width, width, 1, width)


def _cut_rows(whole: _Layout, parts: int) -> _Layout:
    """Rows that are one piece as so many."""
    if whole.parts != 1 or whole.width % parts:
        return whole
    width = whole.width // parts
    return _Layout(whole.values, whole.row, width, parts, width)
