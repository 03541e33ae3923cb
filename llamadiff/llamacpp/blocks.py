"""Values as blocks of a type, made by ggml's own quantizers."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from llamaref.weights import block_sizes, type_number
from numpy.typing import NDArray

from llamadiff.llamacpp.interface import Library

Array = NDArray[Any]


def blocks_of(library: Library, kind: str, values: Array) -> Array:
    """Rows of float32, [row, value], as the bytes of their blocks."""
    quantizer, place, count = library.lib.ggml_quantize_chunk, ctypes.c_void_p, ctypes.c_int64
    quantizer.restype, quantizer.argtypes = ctypes.c_size_t, [ctypes.c_int, place, place, count, count, count, place]
    some = np.ascontiguousarray(values, np.float32)
    rows, width = some.shape
    per_block, size = block_sizes(kind)
    blocks = np.zeros(rows * width // per_block * size, np.uint8)
    asks = library.lib.ggml_quantize_requires_imatrix
    asks.restype, asks.argtypes = ctypes.c_bool, [ctypes.c_int]
    # where no importance of columns is needed there is none: with one, even if it is even, ggml rounds otherwise
    even = np.ones(width, np.float32) if asks(type_number(kind)) else None
    importance = None if even is None else even.ctypes.data
    quantizer(type_number(kind), some.ctypes.data, blocks.ctypes.data, 0, rows, width, importance)
    return blocks
