"""Maths of rows, some rows at a time: what it makes in between stays in the processor's cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
VALUES = 1 << 15  # at once: with three or four arrays of float64 beside them they fit into a megabyte


def by_rows(maths: Callable[..., Array], x: Array, *more: Array, kept: int = 1) -> Array:
    """``maths(x, *more)``, which gives an array of the shape and type of ``x``, for some rows at a time.

    A row is what the last ``kept`` axes hold; the axes before them are the same in all arrays.
    """
    rows, out = [_rows(each, kept) for each in (x, *more)], np.empty_like(x, order="C")
    if len(rows[0]) * max(1, rows[0][:1].size) <= VALUES:
        return np.asarray(maths(x, *more), x.dtype)
    to = _rows(out, kept)
    for some in blocks(len(to), to[0].size):
        to[some] = maths(*(each[some] for each in rows))
    return out


def blocks(count: int, width: int) -> Iterator[slice]:
    """Slices of ``count`` rows, as many in each as stay in cache."""
    step = max(1, VALUES // max(1, width))
    return (slice(start, start + step) for start in range(0, count, step))


def _rows(x: Array, kept: int) -> Array:
    return x.reshape(-1, *x.shape[x.ndim - kept :])
