"""ggml's rounding to Q8_0 and Q8_1, as each CPU carries it out. Imports nothing heavy, for llama.cpp's process."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.numerics.cpu import AVX, PLAIN
from llamadiff.numerics.halves import round_f16

Array = NDArray[Any]


def round_q8_0(x: Array, way: str = AVX) -> Array:
    """Through ggml's Q8_0: blocks of 32, scale max|x| / 127 kept as float16, the nearest whole numbers."""
    quants, scale = _q8_blocks(x, way)
    return (quants * round_f16(scale)).reshape(x.shape).astype(x.dtype)


def q8_1_sums(x: Array, way: str = AVX) -> Array:
    """What Q8_1 adds to the sum of each block's rounded values: [..., n] -> [..., n / 32].

    Its block also keeps s, that sum with the scale not yet rounded, in float16, and the weights' minimum is
    multiplied by s (ggml-cpu, quantize_row_q8_1).
    """
    quants, scale = _q8_blocks(x, way)
    total = quants.sum(axis=1, keepdims=True)
    sums = round_f16(total * scale) - total * round_f16(scale)
    return np.asarray(sums.reshape(*x.shape[:-1], -1), x.dtype)


def _q8_blocks(x: Array, way: str) -> tuple[Array, Array]:
    """Whole numbers [block, 32] and scales [block, 1], float32."""
    blocks = np.ascontiguousarray(x, np.float32).reshape(-1, 32)
    peak = np.abs(blocks).max(axis=1, keepdims=True)
    scale = peak / np.float32(127)
    with np.errstate(divide="ignore"):
        inverse = np.where(peak > 0, np.float32(127) / peak if way == AVX else np.float32(1) / scale, np.float32(0))
    steps = blocks * inverse
    return (_half_away(steps) if way == PLAIN else np.rint(steps)), scale


def _half_away(x: Array) -> Array:
    """The nearest whole number, of two the one farther from zero: C's roundf."""
    wide = x.astype(np.float64)
    return np.asarray(np.trunc(wide + np.copysign(0.5, wide)), x.dtype)
