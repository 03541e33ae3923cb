"""ggml's own dequantization, many times faster than gguf-py's, and held to it bit for bit on every tensor."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from llamaref import Weights
from llamaref.weights import type_number
from numpy.typing import NDArray

from llamadiff.llamacpp.ggml import Ggml

Array = NDArray[Any]
SAMPLES = 8  # random rows of each tensor that are decoded both ways


class _Traits(ctypes.Structure):
    """struct ggml_type_traits (ggml.h)."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("block_size", ctypes.c_int64),
        ("block_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    ]


class Dequantizer:
    """Decoders of a file's tensors: ggml's, where it gives what gguf-py gives; else None, and gguf-py is used.

    ``trusted`` and ``refused`` name the tensors that were compared.
    """

    def __init__(self, ggml: Ggml, weights: Weights) -> None:
        self.weights = weights
        self.trusted: set[str] = set()
        self.refused: set[str] = set()
        self._decoders: dict[str, Callable[[Array], Array] | None] = {}
        ggml.lib.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
        ggml.lib.ggml_get_type_traits.argtypes = [ctypes.c_int]
        self.ggml = ggml

    def decoder(self, name: str) -> Callable[[Array], Array] | None:
        """What makes floats of a tensor's rows; None: as gguf-py does."""
        if name not in self._decoders:
            self._decoders[name] = self._checked(name)
        return self._decoders[name]

    def _checked(self, name: str) -> Callable[[Array], Array] | None:
        kind, stored = self.weights.type(name), self.weights.stored(name)
        traits = self.ggml.lib.ggml_get_type_traits(type_number(kind)).contents
        known = traits.name == self.ggml.lib.ggml_type_name(type_number(kind)) and traits.name.decode().upper() == kind
        if not known or not traits.is_quantized or stored.dtype != np.uint8:
            return None
        block = int(traits.block_size), int(traits.type_size)

        def decode(rows: Array) -> Array:
            rows = np.ascontiguousarray(rows)
            out = np.empty((*rows.shape[:-1], rows.shape[-1] // block[1] * block[0]), np.float32)
            traits.to_float(rows.ctypes.data, out.ctypes.data, out.size)
            return out

        flat = stored.reshape(-1, stored.shape[-1])
        chosen = np.random.default_rng(len(flat)).integers(0, len(flat), SAMPLES)
        rows = flat[np.unique(np.concatenate([[0, len(flat) - 1], chosen]))]
        same = np.array_equal(decode(rows), self.weights.decoded(name, rows), equal_nan=True)
        (self.trusted if same else self.refused).add(name)
        return decode if same else None
