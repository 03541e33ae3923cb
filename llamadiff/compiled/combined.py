"""A tensor's rows and channels, combined in one look at it."""

from __future__ import annotations

from typing import Any

import numpy as np
from llamaref.weights import Across, Factor
from numpy.typing import NDArray

from llamadiff.compiled.product import WIDTH, CompiledProduct, alone
from llamadiff.compiled.rows import Look

Array = NDArray[Any]
_MULTIPLIED = CompiledProduct(None, 1)


def both(x: Array, rows: Array, columns: Array) -> tuple[Array, Array, Look] | None:
    """rows [k, n] @ x, x @ columns [width, k], and a look at x [n, width]; None where that is not compiled, or k not
    WIDTH.
    """
    if not _fits(x) or rows.shape[0] != WIDTH or columns.shape[1] != WIDTH:
        return None
    across, squares, edges = Across(rows.T), np.empty(len(x)), np.empty(3)
    found = _MULTIPLIED(x, [Factor(columns.T, across=across)], alone, (squares, edges))
    return None if found is None else (across.weights[0].T, found[0].T, Look.of(squares, edges.tolist()))


def of_rows(numbers: Array, x: Array) -> Array | None:
    """numbers [k, n] @ x [n, width]; None as of ``both``."""
    if not _fits(x) or numbers.shape[0] != WIDTH:
        return None
    across = Across(numbers.T)
    found = _MULTIPLIED(x, [Factor(np.empty((0, x.shape[1]), np.float32), across=across)], alone)
    return None if found is None else across.weights[0].T


def of_channels(x: Array, numbers: Array) -> Array | None:
    """x [..., width] @ numbers [width, k]; None where that is not compiled."""
    values = x.reshape(-1, x.shape[-1])
    found = _MULTIPLIED(values, [Factor(numbers.T)], alone) if _fits(values) else None
    return None if found is None else found[0].T.reshape(*x.shape[:-1], -1)


def _fits(x: Array) -> bool:
    return x.dtype == np.float32 and x.ndim == 2 and x.size > 0
