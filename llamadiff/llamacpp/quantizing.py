"""How this machine's ggml rounds to eight bits: asked of its own function, since CPUs differ."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.llamacpp.library import load
from llamadiff.numerics.eight_bits import AVX, Q8_WAYS, round_q8_0
from llamadiff.numerics.types import NUMBERS
from llamadiff.system.errors import UserError

Array = NDArray[Any]
BLOCK_BYTES = 34  # a scale in float16, 32 whole numbers


class _CpuTraits(ctypes.Structure):
    """The first field of struct ggml_type_traits_cpu (ggml-cpu.h)."""

    _fields_ = [("from_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64))]


@cache
def q8_way(lib: Any = None) -> str:
    """One of eight_bits.Q8_WAYS; the usual one where ggml (llama-cpp-python's, or another ``lib``) cannot be asked."""
    try:
        traits = (load("ggml-cpu") if lib is None else lib).ggml_get_type_traits_cpu
    except (UserError, AttributeError):
        return AVX
    traits.restype, traits.argtypes = ctypes.POINTER(_CpuTraits), [ctypes.c_int]
    from_float = traits(NUMBERS["Q8_0"]).contents.from_float
    return way_of(lambda x: _quantized(from_float, x))


def way_of(rounding: Callable[[Array], Array]) -> str:
    """The way that gives what a rounding to Q8_0 gives, on values where the ways part; the usual one if none does."""
    x = near_halves()
    found = rounding(x)
    return next((way for way in Q8_WAYS if np.array_equal(round_q8_0(x, way), found)), AVX)


def near_halves() -> Array:
    """Blocks whose values lie half-way between two steps, as near as float32 comes: [block, 32]."""
    peaks = np.concatenate([[127.0], np.random.default_rng(1).uniform(0.1, 10, 255)])[:, None]
    return np.concatenate([peaks, (np.arange(31) * 4 + 0.5) * peaks / 127], axis=1).astype(np.float32)


def _quantized(from_float: Any, x: Array) -> Array:
    blocks = np.empty((len(x), BLOCK_BYTES), np.uint8)
    from_float(x.ctypes.data, blocks.ctypes.data, x.size)
    scales, quants = blocks[:, :2].view(np.float16), blocks[:, 2:].view(np.int8)
    return (quants * scales.astype(np.float32)).astype(x.dtype).reshape(x.shape)
