"""Rounding to 8 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.compiled.library import library

Array = NDArray[Any]


def rounded_to_q8_k(x: Array) -> Array | None:
    """Values [..., n * 256] of float32 through ggml's Q8_K; None where that is not compiled."""
    compiled = library()
    if compiled is None:
        return None
    values = np.ascontiguousarray(x, np.float32)
    out = np.empty_like(values)
    compiled.llamadiff_round_q8_k(values.ctypes.data, values.size, out.ctypes.data)
    return out
