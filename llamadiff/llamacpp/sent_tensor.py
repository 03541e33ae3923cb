"""A tensor of llama.cpp's as its process described it, with the bytes that it sent: read with NumPy, here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.system.errors import UserError

Array = NDArray[Any]
NUMPY_TYPES = {"f32": "f4", "f16": "f2", "i32": "i4", "i64": "i8", "bf16": "u2"}
BYTE_ORDERS = {"little": "<", "big": ">"}


@dataclass(frozen=True)
class SentTensor:
    """A tensor that was described (``said``, tensors.py), and its ``data`` if that was sent; ``order`` of bytes."""

    said: Mapping[str, Any]
    data: Any = None
    order: str = "<"

    @property
    def name(self) -> str:
        return str(self.said["name"])

    @property
    def type(self) -> str:
        return str(self.said["type"])

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """All four axes, outermost first: ggml's ne reversed."""
        return tuple(reversed(self.said["ne"]))

    def view(self) -> Array:
        """Its values, for as long as what was sent stays there."""
        return self._read_values(copied=False)

    def values(self) -> Array:
        """A copy of its values, read through their strides: [ne3, ne2, ne1, ne0].

        16-bit floats are widened to float32. Raises UserError for a type that cannot be decoded.
        """
        return self._read_values(copied=True)

    def _read_values(self, copied: bool) -> Array:
        strides = tuple(reversed(self.said["nb"]))
        if self.type not in NUMPY_TYPES:
            return self._decode_blocks(strides)
        dtype = np.dtype(self.order + NUMPY_TYPES[self.type])
        if not prod(self.shape):
            values = np.zeros(self.shape, dtype)
        else:
            values = np.ndarray(self.shape, dtype, self.data, strides=strides)
        if self.type == "bf16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        if self.type == "f16":
            return values.astype(np.float32)
        values = values.astype(dtype.newbyteorder("="), copy=False)
        return np.array(values, order="C") if copied else values

    def _decode_blocks(self, strides: tuple[int, ...]) -> Array:
        """Values of blocks (a quantized cache): whole rows, wherever they lie."""
        from llamaref.weights import decode  # here: it takes longer to import than most nodes to copy

        block, size = self._block()
        width = self.shape[-1] // block * size
        rows = np.ndarray((*self.shape[:-1], width), np.uint8, self.data, strides=(*strides[:-1], 1))
        return decode(self.type, np.ascontiguousarray(rows))

    def check_type(self) -> None:
        """Raise UserError for a type that cannot be decoded."""
        if self.type not in NUMPY_TYPES:
            self._block()

    def _block(self) -> tuple[int, int]:
        """How many values a block of its type has, and how many bytes."""
        from llamaref.weights import block_sizes

        try:
            return block_sizes(self.type)
        except KeyError:
            raise UserError(f"{self.name}: values of type {self.type} cannot be read") from None
