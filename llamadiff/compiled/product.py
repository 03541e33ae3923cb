"""Products by a matrix that is decoded a piece at a time, in one call: Python's lock is not held meanwhile."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from threading import local
from typing import Any, ClassVar

import numpy as np
from llamaref.weights import Across, Factor, Share, split
from numpy.typing import NDArray

from llamadiff.compiled.decoder import Decoder
from llamadiff.compiled.library import library, multiplies

Array = NDArray[Any]
WIDTH = 16  # columns come in as many: WIDTH in kernels.c
PANEL = 3 * WIDTH  # of which so many lie together: PANEL in kernels.c
ROWS = 64  # of a matrix, at least, that a thread takes at once: ROWS in kernels.c
KEPT = 1 << 23  # floats of a thread's that are used again
PARTS = 8  # of a matrix: threads sum across one at a time


class _Product(ctypes.Structure):
    """struct product (kernels.c)."""

    _fields_: ClassVar = [
        ("rows", ctypes.c_void_p), ("row_bytes", ctypes.c_int64), ("n_out", ctypes.c_int64), ("n_in", ctypes.c_int64),
        ("values", ctypes.c_int64), ("size", ctypes.c_int64), ("decode", ctypes.c_void_p),
        ("x", ctypes.c_void_p), ("y", ctypes.c_void_p), ("n", ctypes.c_int64), ("used", ctypes.c_int64),
        ("c", ctypes.c_void_p), ("z", ctypes.c_void_p), ("unit", ctypes.c_int64),
        ("squares", ctypes.c_void_p), ("edges", ctypes.c_void_p),
    ]  # fmt: skip


@dataclass(frozen=True)
class CompiledProduct:
    """Multiplies by the rows of a matrix, as a llamaref.Multiply; ``decoder``: None where they are floats.

    ``parts``: into how many a matrix is cut where something is gathered across it.
    """

    decoder: Decoder | None
    parts: int = PARTS

    def __call__(
        self, data: Array, factors: Sequence[Factor], share: Share, look: tuple[Array, Array] | None = None
    ) -> list[Array] | None:
        """``look``: where to write what rows.look finds of rows that are floats, if ``share`` has one thread do it all:
        the squares of each, float64, and the three edges.
        """
        compiled = library()
        across = [factor.across for factor in factors if factor.across is not None]
        if compiled is None or not multiplies() or not _fits(factors, across):
            return None
        rows = [np.ascontiguousarray(factor.x, np.float32).reshape(-1, factor.x.shape[-1]) for factor in factors]
        if data.strides[-1] != data.itemsize:
            data = np.ascontiguousarray(data)
        n_in, used = rows[0].shape[-1], sum(map(len, rows))
        x, n = _panels(compiled, rows, n_in, used)
        y = np.empty((used, len(data)), np.float32)
        unit = ROWS
        channels = z = None
        if across:
            unit *= -(-len(data) // (ROWS * self.parts))
            channels = np.ascontiguousarray(across[0].channels, np.float32)
            z = _room("z", -(-len(data) // unit), n_in, WIDTH)
        values, size = (1, 4) if self.decoder is None else (self.decoder.values, self.decoder.size * data.itemsize)
        decode = None if self.decoder is None else self.decoder.address
        squares, edges = look or (None, None)
        product = _Product(
            data.ctypes.data, data.strides[0], len(data), n_in, values, size, decode,
            x.ctypes.data, y.ctypes.data, n, used, _place(channels), _place(z), unit, _place(squares),
            _place(edges),
        )  # fmt: skip
        begun = ctypes.c_int64(0)

        def work(held: object = (data, x, y, z, channels, squares, edges)) -> None:
            """A thread's share. What is ``held`` lives as long as some thread works, whatever stops the others."""
            if not compiled.llamadiff_multiply(ctypes.byref(product), ctypes.byref(begun)):
                raise MemoryError

        share(work, -(-len(data) // unit))
        if z is not None:
            across[0].weights[0] = total = np.empty(z.shape[1:])
            compiled.llamadiff_sum(z.ctypes.data, len(z), total.size, total.ctypes.data)
        return split(y, factors)


def alone(work: Callable[[], None], most: int) -> None:
    """A llamaref.Share that has it all done in the thread that asks."""
    work()


def _fits(factors: Sequence[Factor], across: Sequence[Across]) -> bool:
    """Whether it multiplies such factors: none with sums, and one at most that gathers something, of WIDTH channels."""
    plain = all(factor.sums is None for factor in factors)
    return plain and len(across) <= 1 and all(each.channels.shape[1] == WIDTH for each in across)


def _panels(compiled: ctypes.CDLL, rows: Sequence[Array], n_in: int, used: int) -> tuple[Array, int]:
    """Rows as the columns that kernels.c reads, and how many these are: zeros in those beyond the last."""
    n = -(-used // WIDTH) * WIDTH
    panels, at = _room("x", n * n_in), 0
    panels[used // PANEL * PANEL * n_in :] = 0
    for some in rows:
        compiled.llamadiff_pack(some.ctypes.data, len(some), n_in, at, n, panels.ctypes.data)
        at += len(some)
    return panels, n


_MEMORY = local()


def _room(what: str, *shape: int) -> Array:
    """Memory of this thread's that is used again, so that the system need not give it, and clear it, each time."""
    kept, size = getattr(_MEMORY, what, None), prod(shape)
    if size > KEPT:
        return np.empty(shape, np.float32)
    if kept is None or len(kept) < size:
        kept = np.empty(size, np.float32)
        setattr(_MEMORY, what, kept)
    return np.asarray(kept[:size].reshape(shape))


def _place(array: Array | None) -> int | None:
    return None if array is None else int(array.ctypes.data)
