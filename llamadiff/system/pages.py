"""Pages of mapped files: what was read of them counts as this process's memory until it is let go."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_LET_GO = getattr(mmap, "MADV_DONTNEED", None)  # not every system can
LARGE = 1 << 26  # bytes: of a larger array, pages are let go while it is read


def let_go(array: Array) -> None:
    """Let go of what an array shows of a mapped file: it stays in the system's cache, and is read again if need be."""
    base = _find_map(array)
    if base is None or _LET_GO is None:
        return
    start = array.ctypes.data - np.frombuffer(base, np.uint8, 1).ctypes.data
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    if start + array.nbytes > first:
        base.madvise(_LET_GO, first, start + array.nbytes - first)


def in_parts(array: Array) -> Iterator[slice]:
    """All rows of an array; of one that shows much of a mapped file, some at a time, which are let go after use."""
    if array.nbytes <= LARGE or not array.flags.c_contiguous or _find_map(array) is None:
        yield slice(0, len(array))
        return
    step = max(1, LARGE // 4 // max(1, array[0].nbytes))
    for start in range(0, len(array), step):
        part = slice(start, min(start + step, len(array)))
        yield part
        let_go(array[part])


def in_same_parts(a: Array, b: Array) -> Iterator[slice]:
    """The same of two arrays with as many rows, which are read together."""
    first, other = (a, b) if _find_map(b) is None else (b, a)
    for part in in_parts(first):
        yield part
        done_with(other, part)


def done_with(array: Array, part: slice) -> None:
    """Let go of a part of an array that shows much of a mapped file."""
    if array.nbytes > LARGE:
        let_go(array[part])


def _find_map(array: Array) -> Any:
    """The map of a file that an array looks into, a mmap.mmap; None if it does not."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, mmap.mmap) else None
