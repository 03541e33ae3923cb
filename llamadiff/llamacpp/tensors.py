"""A ctypes view of ggml tensors, and of the nodes of llama.cpp's graph."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.llamacpp.layout import Address, declare, tensor_structure
from llamadiff.llamacpp.library import load
from llamadiff.system.errors import UserError

_NUMPY = {"f32": np.float32, "f16": np.float16, "i32": np.int32, "i64": np.int64, "bf16": np.uint16}


_FUNCTIONS: Mapping[str, tuple[Any, ...]] = {  # name -> result, arguments
    "ggml_op_desc": (ctypes.c_char_p, Address),
    "ggml_op_name": (ctypes.c_char_p, ctypes.c_int),
    "ggml_type_name": (ctypes.c_char_p, ctypes.c_int),
    "ggml_nbytes": (ctypes.c_size_t, Address),
    "ggml_backend_buffer_is_host": (ctypes.c_bool, Address),
    "ggml_backend_tensor_get": (None, Address, Address, ctypes.c_size_t, ctypes.c_size_t),
}


class Ggml:
    """A ggml library, and its tensors' structure. Raises UserError for one whose tensors cannot be read."""

    def __init__(self, lib: Any = None, structure: type[ctypes.Structure] | None = None) -> None:
        """Of llama-cpp-python, unless another ``lib`` and its tensors' ``structure`` are given."""
        self.lib = load("ggml-base") if lib is None else lib
        declare(self.lib, _FUNCTIONS)
        self.structure = tensor_structure(self.lib) if structure is None else structure
        self._pointer = ctypes.POINTER(self.structure)

    def node(self, address: Any) -> Node:
        """The tensor at an address."""
        return Node(self, ctypes.cast(address, self._pointer).contents)

    def op_name(self, number: int) -> str:
        """ggml's name of an op's number."""
        return str(self.lib.ggml_op_name(number).decode())

    @property
    def layout(self) -> str:
        """Where a tensor has its fields, in words."""
        names = [field[0] for field in self.structure._fields_ if not field[0].startswith("_")]
        return ", ".join(f"{name} at {getattr(self.structure, name).offset}" for name in names)


@dataclass(frozen=True)
class Node:
    """One node of llama.cpp's graph, as the eval callback shows it: whole, for whoever checks whole graphs."""

    ggml: Ggml
    tensor: Any

    @cached_property
    def name(self) -> str:
        return bytes(self.tensor.name).decode("utf-8", "replace")

    @cached_property
    def op(self) -> str:
        """ggml's name of the op; the unary op or GLU itself where the op is one of them (SWIGLU)."""
        return str(self.ggml.lib.ggml_op_desc(ctypes.byref(self.tensor)).decode())

    @property
    def type(self) -> str:
        return str(self.ggml.lib.ggml_type_name(self.tensor.type).decode())

    @property
    def shape(self) -> tuple[int, ...]:
        """All four axes, outermost first: ggml's ne reversed."""
        return tuple(reversed(list(self.tensor.ne)))

    @property
    def parameters(self) -> bytes:
        return bytes(self.tensor.op_params)

    @cached_property
    def sources(self) -> tuple[Node, ...]:
        """What it is computed from. Older SET_ROWS do not state where they write: into what they are a view of."""
        found = tuple(Node(self.ggml, source.contents) for source in self.tensor.src if source)
        base = self.base if self.op == "SET_ROWS" and len(found) == 2 else None
        return found if base is None else (*found, base)

    def walk(self) -> Iterator[Node]:
        """The node's sources, and what they are views of."""
        for source in self.sources:
            yield source
            base = source.tensor.view_src
            if base:
                yield Node(self.ggml, base.contents)

    def seen(self) -> NDArray[Any]:
        """The tensor's values while the callback lasts: its own memory where that can be read in place."""
        if self.type not in ("f32", "i32") or not self.is_plain or not self._is_host or not self.tensor.data:
            return self.values()
        memory = (ctypes.c_int32 * int(np.prod(self.shape))).from_address(self.tensor.data)
        return np.ndarray(self.shape, _NUMPY[self.type], memoryview(memory))

    def values(self) -> NDArray[Any]:
        """A copy of the tensor's values, read through its strides: [ne3, ne2, ne1, ne0].

        16-bit floats are widened to float32. Raises UserError for a type that cannot be decoded.
        """
        dtype = _NUMPY.get(self.type)
        strides = tuple(reversed(list(self.tensor.nb)))
        if dtype is None:
            return self._decoded(strides)
        raw = self._bytes(np.dtype(dtype).itemsize + self._steps(self.tensor.ne))
        values = np.ascontiguousarray(np.ndarray(self.shape, dtype, raw, strides=strides))
        if self.type == "bf16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float32) if self.type == "f16" else values

    def _decoded(self, strides: tuple[int, ...]) -> NDArray[Any]:
        """Values of blocks (a quantized cache): whole rows, wherever they lie."""
        from llamaref.weights import block_sizes, decode  # here: it takes longer to import than most nodes to copy

        try:
            block, size = block_sizes(self.type)
        except KeyError:
            raise UserError(f"{self.name}: values of type {self.type} cannot be read") from None
        width = self.tensor.ne[0] // block * size
        raw = self._bytes(width + self._steps([1, *list(self.tensor.ne)[1:]]))
        rows = np.ndarray((*self.shape[:-1], width), np.uint8, raw, strides=(*strides[:-1], 1))
        return decode(self.type, np.ascontiguousarray(rows))

    def _bytes(self, count: int) -> NDArray[Any]:
        raw = np.empty(count, np.uint8)
        if not self._is_host:
            self.ggml.lib.ggml_backend_tensor_get(ctypes.byref(self.tensor), raw.ctypes.data, 0, count)
        else:
            ctypes.memmove(raw.ctypes.data, self.tensor.data, count)
        return raw

    @property
    def _is_host(self) -> bool:
        return not self.tensor.buffer or bool(self.ggml.lib.ggml_backend_buffer_is_host(self.tensor.buffer))

    def _steps(self, sizes: Any) -> int:
        """Bytes from the first value to the last."""
        return int(sum((n - 1) * stride for n, stride in zip(sizes, self.tensor.nb, strict=True)))

    @property
    def address(self) -> int:
        """What tells one tensor of a graph from another."""
        return ctypes.addressof(self.tensor)

    @property
    def base(self) -> Node | None:
        """The tensor whose memory a view looks into."""
        return Node(self.ggml, self.tensor.view_src.contents) if self.tensor.view_src else None

    @property
    def memory(self) -> int:
        return int(self.ggml.lib.ggml_nbytes(ctypes.byref(self.tensor)))

    @property
    def is_plain(self) -> bool:
        """Whether values lie one after the other, and NumPy can read them."""
        steps = [1, *list(self.tensor.ne)[:-1]]
        size = np.dtype(_NUMPY.get(self.type, np.uint8)).itemsize
        return self.type in _NUMPY and list(self.tensor.nb) == [int(n) * size for n in np.cumprod(steps)]

    @property
    def place(self) -> bytes:
        """Where a view begins and how it steps, in values of its base: offset, then [ne3, ne2, ne1, ne0]'s strides."""
        size = np.dtype(_NUMPY[self.type]).itemsize
        steps = np.array([self.tensor.view_offs, *reversed(list(self.tensor.nb))], np.int64)
        return (steps // size).tobytes()

    def is_view_of_its_source(self) -> bool:
        """Whether a node that computes nothing points where its offset says, into another's memory."""
        base = self.tensor.view_src
        return not base or self.tensor.data == (base.contents.data or 0) + self.tensor.view_offs
