"""How this machine's ggml rounds to eight bits: asked of its own function, since CPUs differ."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.llamacpp.library import load
from llamadiff.numerics import cpu
from llamadiff.numerics.arithmetic import round_q8_k
from llamadiff.numerics.cpu import AVX, FUSED, NEON, PLAIN
from llamadiff.numerics.eight_bits import round_q8_0
from llamadiff.system.errors import UserError

Array = NDArray[Any]
# ggml's numbers of the types, and the bytes of their blocks: a scale in float16, 32 whole numbers; a scale in float32,
# 256 whole numbers, 16 sums of them in 16 bits
Q8_0, Q8_K = (8, 34), (15, 292)


class _CpuTraits(ctypes.Structure):
    """The first field of struct ggml_type_traits_cpu (ggml-cpu.h)."""

    _fields_ = [("from_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64))]


@cache
def q8_way(lib: Any = None) -> str:
    """One of cpu.Q8_WAYS; the usual one where ggml (llama-cpp-python's, or another ``lib``) cannot be asked."""
    try:
        traits = (load("ggml-cpu") if lib is None else lib).ggml_get_type_traits_cpu
    except (UserError, AttributeError):
        return AVX
    traits.restype, traits.argtypes = ctypes.POINTER(_CpuTraits), [ctypes.c_int]
    q8_0, q8_k = (partial(_blocks, traits(number).contents.from_float, size=size) for number, size in (Q8_0, Q8_K))
    return cpu.q8_way(way_of(lambda x: _of_q8_0(q8_0(x))), way_of_q8_k(lambda x: _of_q8_k(q8_k(x))))


def way_of(rounding: Callable[[Array], Array]) -> str:
    """The way that gives what a rounding to Q8_0 gives, on values where the ways part; the usual one if none does."""
    x = near_halves(32)
    found = rounding(x)
    return next((way for way in (AVX, NEON, PLAIN) if np.array_equal(round_q8_0(x, way), found)), AVX)


def way_of_q8_k(rounding: Callable[[Array], Array]) -> str:
    """The same of Q8_K: FUSED, or the usual one."""
    x = near_halves(256)
    return FUSED if np.array_equal(round_q8_k(x, fused=True), rounding(x)) else ""


def near_halves(size: int) -> Array:
    """Blocks whose values lie half-way between two steps, as near as float32 comes: [block, size]."""
    peaks = np.concatenate([[127.0], np.random.default_rng(1).uniform(0.1, 10, 255)])[:, None]
    steps = np.arange(size - 1) * 4 % 124 + 0.5
    return np.concatenate([peaks, steps * peaks / 127], axis=1).astype(np.float32)


def _blocks(from_float: Any, x: Array, size: int) -> Array:
    """Blocks of so many bytes, one a row of x."""
    blocks = np.empty((len(x), size), np.uint8)
    from_float(x.ctypes.data, blocks.ctypes.data, x.size)
    return blocks


def _of_q8_0(blocks: Array) -> Array:
    scales, quants = blocks[:, :2].view(np.float16), blocks[:, 2:].view(np.int8)
    return np.asarray(quants * scales.astype(np.float32))


def _of_q8_k(blocks: Array) -> Array:
    scales, quants = blocks[:, :4].view(np.float32), blocks[:, 4:260].view(np.int8)
    return np.asarray(quants * scales)
