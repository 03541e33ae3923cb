"""A ctypes view of ggml tensors, and of the nodes of llama.cpp's graph: what they are, and their bytes.

Imports nothing but Python's own library: llama.cpp's process may run where nothing else is installed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llamadiff.llamacpp.layout import FUNCTIONS, Address, declare, ggml_context, tensor_structure
from llamadiff.llamacpp.library import load

_FUNCTIONS: Mapping[str, tuple[Any, ...]] = {  # name -> result, arguments
    "ggml_op_desc": (ctypes.c_char_p, Address),
    "ggml_op_name": (ctypes.c_char_p, ctypes.c_int),
    "ggml_type_name": (ctypes.c_char_p, ctypes.c_int),
    "ggml_type_size": (ctypes.c_size_t, ctypes.c_int),
    "ggml_blck_size": (ctypes.c_int64, ctypes.c_int),
    "ggml_nbytes": (ctypes.c_size_t, Address),
    "ggml_backend_buffer_is_host": (ctypes.c_bool, Address),
    "ggml_backend_tensor_get": (None, Address, Address, ctypes.c_size_t, ctypes.c_size_t),
}
_GRAPH_FUNCTIONS: Mapping[str, tuple[Any, ...]] = {
    **FUNCTIONS,
    "ggml_new_graph": (Address, Address),
    "ggml_build_forward_expand": (None, Address, Address),
}
_COMPUTE = 16  # GGML_TENSOR_FLAG_COMPUTE


class Ggml:
    """A ggml library, and its tensors' structure. Raises UserError for one whose tensors cannot be read."""

    def __init__(self, lib: Any = None, structure: type[ctypes.Structure] | None = None) -> None:
        """Of llama-cpp-python, unless another ``lib`` and its tensors' ``structure`` are given."""
        self.lib = load("ggml-base") if lib is None else lib
        declare(self.lib, _FUNCTIONS)
        self.structure = tensor_structure(self.lib) if structure is None else structure
        self._pointer = ctypes.POINTER(self.structure)

    def node(self, address: Any) -> Tensor:
        """The tensor at an address."""
        return Tensor(self, ctypes.cast(address, self._pointer).contents)

    def op_name(self, number: int) -> str:
        """ggml's name of an op's number."""
        return str(self.lib.ggml_op_name(number).decode())

    def blocks(self, kind: int) -> tuple[int, int]:
        """How many values a block of a type has, and how many bytes."""
        return int(self.lib.ggml_blck_size(kind)), int(self.lib.ggml_type_size(kind))

    @cached_property
    def flags_computed(self) -> bool:
        """Whether this ggml flags the nodes that it computes; nodes of branches not taken have no flag (0.26)."""
        declare(self.lib, _GRAPH_FUNCTIONS)
        with ggml_context(self.lib) as context:
            node = self.lib.ggml_scale(context, self.lib.ggml_new_tensor_4d(context, 0, 1, 1, 1, 1), 1.0)
            self.lib.ggml_build_forward_expand(self.lib.ggml_new_graph(context), node)
            return bool(self.node(node).tensor.flags & _COMPUTE)

    def is_computed(self, node: Tensor) -> bool:
        """Whether a node of a graph is one that ggml computes."""
        return not self.flags_computed or bool(node.tensor.flags & _COMPUTE)

    @property
    def layout(self) -> str:
        """Where a tensor has its fields, in words."""
        names = [field[0] for field in self.structure._fields_ if not field[0].startswith("_")]
        return ", ".join(f"{name} at {getattr(self.structure, name).offset}" for name in names)


@dataclass(frozen=True)
class Tensor:
    """One node of llama.cpp's graph, as the eval callback shows it."""

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

    @cached_property
    def sources(self) -> tuple[Tensor, ...]:
        """What it is computed from. Older SET_ROWS do not state where they write: into what they are a view of."""
        found = tuple(Tensor(self.ggml, source.contents) for source in self.tensor.src if source)
        base = self.base if self.op == "SET_ROWS" and len(found) == 2 else None
        return found if base is None else (*found, base)

    def walk(self) -> Iterator[Tensor]:
        """The node's sources, and what they are views of."""
        for source in self.sources:
            yield source
            base = source.base
            if base is not None:
                yield base

    @property
    def address(self) -> int:
        """What tells one tensor of a graph from another."""
        return ctypes.addressof(self.tensor)

    @property
    def base(self) -> Tensor | None:
        """The tensor whose memory a view looks into."""
        return Tensor(self.ggml, self.tensor.view_src.contents) if self.tensor.view_src else None

    @property
    def offset(self) -> int:
        """Where a view begins, in bytes."""
        return int(self.tensor.view_offs)

    @property
    def row(self) -> int:
        """Bytes from one row to the next."""
        return int(self.tensor.nb[1])

    @property
    def parameters(self) -> bytes:
        return bytes(self.tensor.op_params)

    @property
    def memory(self) -> int:
        """Bytes."""
        return int(self.ggml.lib.ggml_nbytes(ctypes.byref(self.tensor)))

    @property
    def data(self) -> Any:
        """The bytes from its first value to its last one, while the callback lasts: its own, or a device's fetched."""
        count = self.reach
        if not count:
            return b""
        if self._is_host:
            return memoryview((ctypes.c_char * count).from_address(self.tensor.data)).cast("B")
        fetched = ctypes.create_string_buffer(count)
        self.ggml.lib.ggml_backend_tensor_get(ctypes.byref(self.tensor), fetched, 0, count)
        return memoryview(fetched).cast("B")

    @property
    def _is_host(self) -> bool:
        return not self.tensor.buffer or bool(self.ggml.lib.ggml_backend_buffer_is_host(self.tensor.buffer))

    @property
    def reach(self) -> int:
        """How many bytes there are between the beginning of its first value, or block, and the end of its last."""
        sizes, steps = list(self.tensor.ne), list(self.tensor.nb)
        if not self.tensor.data or 0 in sizes:
            return 0
        values, size = self.ggml.blocks(self.tensor.type)
        outer = sum((n - 1) * step for n, step in zip(sizes[1:], steps[1:], strict=True))
        return int(outer + ((sizes[0] - 1) * steps[0] + size if values == 1 else sizes[0] // values * size))

    def said(self) -> dict[str, Any]:
        """What it is, as plain data (nodes.py)."""
        tensor, base = self.tensor, self.base
        return {
            "at": self.address, "name": self.name, "op": self.op, "type": self.type, "ne": list(tensor.ne),
            "nb": list(tensor.nb), "memory": self.memory,
            "view": None if base is None else [base.address, tensor.view_offs],
        }  # fmt: skip

    def said_in_full(self) -> dict[str, Any]:
        """And what computes it, and how ggml holds that."""
        tensor = self.tensor
        base = tensor.view_src
        return {
            **self.said(), "params": bytes(tensor.op_params).hex(), "code": tensor.op, "number": tensor.type,
            "word": self.ggml.op_name(tensor.op), "sources": [source.address for source in self.sources],
            "places": [place for place, source in enumerate(tensor.src) if source],
            "numbers": [source.contents.type for source in tensor.src if source],
            "looks": not base or tensor.data == (base.contents.data or 0) + tensor.view_offs,
        }  # fmt: skip
