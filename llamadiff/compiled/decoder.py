"""A function of C that makes floats of a type's blocks."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.compiled.library import library, multiplies

Array = NDArray[Any]


@dataclass(frozen=True)
class Decoder:
    """Makes floats of rows, [..., bytes] -> [..., values]: ``function(blocks, floats, count of floats)`` does.

    A block has so many ``values`` in so many items of its array, ``size``.
    """

    function: Any
    values: int
    size: int

    @cached_property
    def address(self) -> int | None:
        """Where the function is."""
        return ctypes.cast(self.function, ctypes.c_void_p).value

    def __call__(self, rows: Array) -> Array:
        rows = np.ascontiguousarray(rows)
        out = np.empty((*rows.shape[:-1], rows.shape[-1] // self.size * self.values), np.float32)
        self.function(rows.ctypes.data, out.ctypes.data, out.size)
        return out


def own(kind: str) -> Any:
    """The function of a type, by ggml's name of it, that is compiled here; None if there is none."""
    return getattr(library(), f"llamadiff_{kind.lower()}", None) if multiplies() else None
