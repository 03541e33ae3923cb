"""Values as blocks of a type, made by ggml's own quantizers."""

from __future__ import annotations

import ctypes
from typing import Any

from llamadiff.llamacpp.interface import Library
from llamadiff.llamacpp.layout import declare


class TypeTraits(ctypes.Structure):
    """struct ggml_type_traits (ggml.h)."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("block_size", ctypes.c_int64),
        ("block_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    ]


_PLACE, _COUNT = ctypes.c_void_p, ctypes.c_int64
_QUANTIZERS = {  # name -> result, arguments
    "ggml_quantize_chunk": (ctypes.c_size_t, ctypes.c_int, _PLACE, _PLACE, _COUNT, _COUNT, _COUNT, _PLACE),
    "ggml_quantize_requires_imatrix": (ctypes.c_bool, ctypes.c_int),
}


def blocks_of(library: Library, kind: str, values: bytes, width: int) -> Any:
    """Rows of so many float32, as the bytes of their blocks."""
    declare(library.lib, _QUANTIZERS, "llama.cpp")
    quantizer, asks = library.lib.ggml_quantize_chunk, library.lib.ggml_quantize_requires_imatrix
    number = library.ggml.number(kind)
    per_block, size = library.ggml.blocks(number)
    rows = len(values) // (4 * width)
    given, made = (
        ctypes.create_string_buffer(values, len(values)),
        ctypes.create_string_buffer(max(1, rows * width // per_block * size)),
    )
    # where no importance of columns is needed there is none: with one, even if it is even, ggml rounds otherwise
    even = (ctypes.c_float * width)(*[1.0] * width) if asks(number) else None
    quantizer(number, given, made, 0, rows, width, even)
    return memoryview(made).cast("B")[: rows * width // per_block * size]
