"""Values through 16 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def round_f16(x: Array) -> Array:
    """Through float16, nearest even."""
    with np.errstate(over="ignore"):
        return np.asarray(x.astype(np.float16).astype(x.dtype))


def round_bf16(x: Array) -> Array:
    """Through bfloat16, nearest even: the upper half of a float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    kept = np.where(np.isnan(x), bits, rounded) & np.uint32(0xFFFF0000)
    return np.asarray(kept.view(np.float32), x.dtype)
