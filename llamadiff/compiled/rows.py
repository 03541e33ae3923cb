"""What comparing asks of tensors' rows, in one look at them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.compiled.library import library

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


def look(x: Array) -> tuple[Array, tuple[float, float, float]] | None:
    """Of rows [row, ...] of float32: each one's sum of squares; the sum of all, the smallest and the largest value.

    None for any other values.
    """
    compiled = library()
    found = None if compiled is None else _layout(x)
    if compiled is None or found is None:
        return None
    squares, edges = np.empty(len(x)), (ctypes.c_double * 3)()
    compiled.llamadiff_look(ctypes.byref(found.tensor), len(x), found.parts, found.width, squares.ctypes.data, edges)
    return squares, (edges[0], edges[1], edges[2])


def gaps(a: Array, b: Array) -> tuple[Array, float, int] | None:
    """Of rows [row, ...] of two tensors of float32: the sums of squares of a - b, a and b, [3, row]; the largest
    |a - b|, and where it is, counted through all rows. None as of ``look``.
    """
    compiled = library()
    left, right = (None, None) if compiled is None else (_layout(a), _layout(b))
    if compiled is None or left is None or right is None:
        return None
    if left.parts != right.parts:
        left, right = _cut(left, right.parts), _cut(right, left.parts)
    if (left.parts, left.width) != (right.parts, right.width):
        return None
    sums, largest, place = np.empty((3, len(a))), ctypes.c_double(), ctypes.c_int64()
    compiled.llamadiff_gaps(
        ctypes.byref(left.tensor), ctypes.byref(right.tensor), len(a), left.parts, left.width,
        sums.ctypes.data, ctypes.byref(largest), ctypes.byref(place),
    )  # fmt: skip
    return sums, largest.value, place.value


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


def _cut(whole: _Layout, parts: int) -> _Layout:
    """Rows that are one piece as so many."""
    if whole.parts != 1 or whole.width % parts:
        return whole
    width = whole.width // parts
    return _Layout(whole.values, whole.row, width, parts, width)
