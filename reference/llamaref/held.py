"""Weights that somebody holds in memory, of no file."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from llamaref.weights import Weights, block_sizes

Array = NDArray[Any]
_PLAIN: dict[str, Any] = {  # types whose values are numbers, as gguf-py's reader has them; all others are bytes
    "F32": np.float32, "F16": np.float16, "F64": np.float64, "I8": np.int8, "I16": np.int16, "I32": np.int32,
    "I64": np.int64,
}  # fmt: skip


class HeldWeights(Weights):
    """Tensors in bytes as a file would keep them, each under a name; all else is as of a file's."""

    def __init__(self) -> None:
        self.dtype = np.float32
        self.read: set[str] = set()
        self.decoder = lambda name: None
        self.map = map
        self.fields: dict[str, Any] = {}
        self.files = []
        self._tensors: dict[str, Any] = {}
        self._maps: list[Any] = []

    def hold(self, name: str, kind: str, shape: Sequence[int], data: Any) -> None:
        """Take a tensor's bytes; its axes are NumPy's, outermost first. Raises KeyError for a type that is unknown."""
        kind = kind.upper()
        values, size = block_sizes(kind)
        stored: Array
        if kind in _PLAIN:
            stored = np.frombuffer(data, _PLAIN[kind]).reshape(shape)
        else:
            stored = np.frombuffer(data, np.uint8).reshape(*shape[:-1], shape[-1] // values * size)
        number, sizes = gguf.GGMLQuantizationType[kind], np.array([*reversed(shape)], np.uint64)
        self._tensors[name] = SimpleNamespace(name=name, data=stored, tensor_type=number, shape=sizes)
