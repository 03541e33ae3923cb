"""Values through 16 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


NORMAL = 2.0**-14  # the smallest normal number of float16; NumPy takes twenty times as long for one below


def round_f16(x: Array) -> Array:
    """Through float16, nearest even."""
    small, step = np.abs(x) < NORMAL, x.dtype.type(1.5 * 2.0 ** (np.finfo(x.dtype).nmant - 24))
    with np.errstate(over="ignore"):
        y = np.asarray(np.where(small, x.dtype.type(0), x).astype(np.float16).astype(x.dtype))
    # small ones are multiples of 2^-24: beside the step there is no place for bits below, and it is taken off again
    return np.where(small, np.copysign(x + step - step, x), y)


def round_bf16(x: Array) -> Array:
    """Through bfloat16, nearest even: the upper half of a float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    kept = np.where(np.isnan(x), bits, rounded) & np.uint32(0xFFFF0000)
    return np.asarray(kept.view(np.float32), x.dtype)
