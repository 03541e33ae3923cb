"""What becomes of values that ggml stores in a type."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.numerics.arithmetic import as_cpu, round_to
from llamadiff.numerics.cpu import AVX
from llamadiff.numerics.types import CACHE_TYPES

Array = NDArray[Any]


def _as_float(x: Array) -> Array:
    return np.asarray(x, np.float32)


def _as_whole(x: Array) -> Array:
    """Towards zero, as a cast in C."""
    return np.asarray(x, np.int32) if x.dtype.kind != "f" else np.trunc(x).astype(np.int32)


_KEPT = {"f32": _as_float, "i32": _as_whole, "i64": _as_whole}


def kept_as(x: Array, kind: str, was: str = "f32", q8: str = AVX) -> Array:
    """Values once they are stored in a type. Raises ValueError for one whose rounding is not known."""
    if kind in _KEPT:
        return _KEPT[kind](x)
    if kind.upper() in CACHE_TYPES:
        return round_to(x, as_cpu(kind.upper(), q8))
    if kind != was:
        raise ValueError(f"no rounding from {was} to {kind}")
    return x
