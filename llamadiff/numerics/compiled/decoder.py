"""Blocks of weights and of activations: floats of a type's blocks, and floats rounded to eight bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.numerics.compiled.library import instructions, library
from llamadiff.system.pages import let_go

Array = NDArray[Any]


@dataclass(frozen=True)
class Decoder:
    """Makes floats of rows, [..., bytes] -> [..., values]: ``function(blocks, floats, count of floats)`` does.

    A block has so many ``values`` in so many items of its array, ``size``. Pages of a mapped file are let go.
    """

    function: Any
    values: int
    size: int

    def __call__(self, rows: Array) -> Array:
        blocks = np.ascontiguousarray(rows)
        out = np.empty((*rows.shape[:-1], rows.shape[-1] // self.size * self.values), np.float32)
        self.function(blocks.ctypes.data, out.ctypes.data, out.size)
        let_go(rows)
        return out


def own(kind: str) -> Any:
    """The function of a type, by ggml's name of it, that is compiled here; None if there is none for this processor."""
    return getattr(library(), f"llamadiff_{kind.lower()}", None) if instructions() in ("avx2", "avx512") else None


def rounded_to_q8_k(x: Array) -> Array | None:
    """Values [..., n * 256] of float32 through ggml's Q8_K; None where that is not compiled."""
    compiled = library()
    if compiled is None:
        return None
    values = np.ascontiguousarray(x, np.float32)
    out = np.empty_like(values)
    compiled.llamadiff_round_q8_k(values.ctypes.data, values.size, out.ctypes.data)
    return out
