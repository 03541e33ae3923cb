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
from llamadiff.llamacpp.request import CPU, GPU, HELPER
from llamadiff.numerics.types import NUMBERS
from llamadiff.system.errors import UserError

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

_OF_BUFFERS = {  # name -> result, arguments; not of every version
    "ggml_backend_buffer_get_type": (Address, Address), "ggml_backend_buft_get_device": (Address, Address),
    "ggml_backend_buft_name": (ctypes.c_char_p, Address), "ggml_backend_dev_name": (ctypes.c_char_p, Address),
    "ggml_backend_dev_buffer_type": (Address, Address),
}  # fmt: skip
_KINDS = {0: CPU, 1: GPU, 3: HELPER}  # of GGML_BACKEND_DEVICE_TYPE_x; 2 was ACCEL, and is IGPU since
HOST, DEVICE, HIDDEN = "host", "device", "hidden"  # where values are
SPLIT = "_Split"  # ends the names of buffers whose tensors several devices share, each some rows


class Ggml:
    """A ggml library, and its tensors' structure. Raises UserError for one whose tensors cannot be read."""

    def __init__(self, lib: Any = None, structure: type[ctypes.Structure] | None = None) -> None:
        """Of llama-cpp-python, unless another ``lib`` and its tensors' ``structure`` are given."""
        self.lib = load("ggml-base") if lib is None else lib
        declare(self.lib, _FUNCTIONS)
        self.knows_owners = all(hasattr(self.lib, name) for name in _OF_BUFFERS)
        declare(self.lib, _OF_BUFFERS if self.knows_owners else {})
        self.structure = tensor_structure(self.lib) if structure is None else structure
        self._pointer = ctypes.POINTER(self.structure)

    def node(self, address: Any) -> Tensor:
        """The tensor at an address."""
        return Tensor(self, ctypes.cast(address, self._pointer).contents)

    def op_name(self, number: int) -> str:
        """ggml's name of an op's number. Raises UserError where it has none."""
        return _decode_name("op", number, self.lib.ggml_op_name(number))

    def type_name(self, number: int) -> str:
        """ggml's name of a type's number. Raises UserError where it has none."""
        return _decode_name("type", number, self.lib.ggml_type_name(number))

    def number(self, kind: str) -> int:
        """The number of a type of GGUF's. Raises UserError for a ggml that has another type by it."""
        number = NUMBERS[kind.upper()]
        name = self.type_name(number)
        if name.upper() != kind.upper():
            raise UserError(f"this ggml's type {number} is {name}, not {kind.lower()} as in GGUF; use another version")
        return number

    def blocks(self, kind: int) -> tuple[int, int]:
        """How many values a block of a type has, and how many bytes. Raises UserError for a type without any."""
        values, size = int(self.lib.ggml_blck_size(kind)), int(self.lib.ggml_type_size(kind))
        if values < 1 or size < 1:
            raise UserError(f"this ggml gives blocks of {values} values in {size} bytes for {self.type_name(kind)}")
        return values, size

    def where(self, buffer: Any) -> str:
        """Where a buffer's values are. HIDDEN: in a form of the CPU's own (repacked); without an answer, DEVICE."""
        if not buffer or self.lib.ggml_backend_buffer_is_host(buffer):
            return HOST
        _, device = self._owner(buffer)
        return HIDDEN if device and kind_of(self.lib, device) == CPU else DEVICE

    def home(self, buffer: Any) -> str:
        """The name of the device in whose memory a buffer is, or of a memory that several share; "" where none is said.

        Devices have memory on the host, too, in which the CPU computes.
        """
        (kind, device), lib = self._owner(buffer), self.lib
        is_host = not buffer or bool(lib.ggml_backend_buffer_is_host(buffer))
        if not device or (is_host and lib.ggml_backend_dev_buffer_type(device) != kind):
            return CPU if is_host else ""
        name = lib.ggml_backend_buft_name(kind) or b""
        name = name if name.endswith(SPLIT.encode()) else lib.ggml_backend_dev_name(device) or b""
        return str(name.decode("utf-8", "replace"))

    def _owner(self, buffer: Any) -> tuple[Any, Any]:
        """The type of a buffer, and the device that it is of; None where this ggml does not say."""
        if not buffer or not self.knows_owners:
            return None, None
        kind = self.lib.ggml_backend_buffer_get_type(buffer)
        return kind, self.lib.ggml_backend_buft_get_device(kind) or None

    @cached_property
    def computed_flag(self) -> int:
        """The flag of nodes that ggml computes, and not of branches that are not taken (0.26); 0: it computes all."""
        return computed_flag(self.lib, self.structure)

    def is_computed(self, node: Tensor) -> bool:
        """Whether a node of a graph is one that ggml computes."""
        return not self.computed_flag or bool(node.tensor.flags & self.computed_flag)

    @property
    def layout(self) -> str:
        """Where a tensor has its fields, in words."""
        names = [field[0] for field in self.structure._fields_ if not field[0].startswith("_")]
        return ", ".join(f"{name} at {getattr(self.structure, name).offset}" for name in names)


def computed_flag(lib: Any, structure: type[ctypes.Structure]) -> int:
    """The flag that a ggml gives a node with the graph that computes it; 0: none. Raises UserError for one without
    graphs.
    """
    declare(lib, _GRAPH_FUNCTIONS)
    with ggml_context(lib) as context:
        node = lib.ggml_scale(context, lib.ggml_new_tensor_4d(context, 0, 1, 1, 1, 1), 1.0)
        tensor: Any = structure.from_address(node)
        before = int(tensor.flags)
        lib.ggml_build_forward_expand(lib.ggml_new_graph(context), node)
        return int(tensor.flags) & ~before


def _decode_name(what: str, number: int, name: bytes | None) -> str:
    if not name:
        raise UserError(f"this ggml has no name for {what} {number}, so its graphs cannot be read; use another version")
    return name.decode("utf-8", "replace")


def kind_of(lib: Any, device: Any) -> str:
    """CPU, GPU or HELPER: what a device's type says; where versions mean two things by it, its memory decides."""
    kind = _KINDS.get(lib.ggml_backend_dev_type(device))
    if kind is not None:
        return kind
    return HELPER if lib.ggml_backend_buft_is_host(lib.ggml_backend_dev_buffer_type(device)) else GPU


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
        return _decode_name("op", self.tensor.op, self.ggml.lib.ggml_op_desc(ctypes.byref(self.tensor)))

    @property
    def type(self) -> str:
        return self.ggml.type_name(self.tensor.type)

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
        if self.where == HOST:
            return memoryview((ctypes.c_char * count).from_address(self.tensor.data)).cast("B")
        fetched = ctypes.create_string_buffer(count)
        self.ggml.lib.ggml_backend_tensor_get(ctypes.byref(self.tensor), fetched, 0, count)
        return memoryview(fetched).cast("B")

    @property
    def where(self) -> str:
        """HOST, DEVICE or HIDDEN."""
        return self.ggml.where(self.tensor.buffer)

    @property
    def device(self) -> str:
        """The device that computes it, by name, and whether it reads a tensor that several share."""
        shared = any(self.ggml.home(source.tensor.buffer).endswith(SPLIT) for source in self.sources)
        return self.ggml.home(self.tensor.buffer) + SPLIT * shared

    @property
    def reach(self) -> int:
        """How many bytes there are between the beginning of its first value, or block, and the end of its last."""
        sizes, steps = list(self.tensor.ne), list(self.tensor.nb)
        if not self.tensor.data or 0 in sizes:
            return 0
        values, size = self.ggml.blocks(self.tensor.type)
        outer = sum((n - 1) * step for n, step in zip(sizes[1:], steps[1:], strict=True))
        return int(outer + ((sizes[0] - 1) * steps[0] + size if values == 1 else sizes[0] // values * size))

    def to_dict(self) -> dict[str, Any]:
        """What it is, as plain data (nodes.py)."""
        return describe(self.tensor, self.address, self._words)

    def said_in_full(self) -> dict[str, Any]:
        """And what computes it, and how ggml holds that."""
        tensor, base = self.tensor, self.tensor.view_src
        return {
            **describe_in_full(tensor, self.address, self._words, self.ggml.op_name(tensor.op)),
            "numbers": [source.contents.type for source in tensor.src if source],
            "looks": not base or tensor.data == (base.contents.data or 0) + tensor.view_offs,
        }

    @property
    def _words(self) -> Words:
        return Words(self.op, self.type, self.memory, self.where, self.device)


@dataclass(frozen=True)
class Words:
    """What ggml's functions say of a tensor: its op, its type, how many bytes it has, ``where`` and on which device."""

    op: str
    type: str
    memory: int
    where: str
    device: str = ""


def describe(tensor: Any, at: int, words: Words) -> dict[str, Any]:
    """A tensor as plain data, of ``struct ggml_tensor`` wherever it is read: what it is, and whose memory it has."""
    base = _address(tensor.view_src)
    return {
        "at": at, "name": bytes(tensor.name).decode("utf-8", "replace"), "op": words.op, "type": words.type,
        "ne": list(tensor.ne), "nb": list(tensor.nb), "memory": words.memory, "where": words.where,
        "device": words.device,
        "view": None if base is None else [base, tensor.view_offs],
    }  # fmt: skip


def describe_in_full(tensor: Any, at: int, words: Words, word: str) -> dict[str, Any]:
    """And what computes it; ``word``: ggml's name of its op's number. Older SET_ROWS do not state where they write."""
    said = describe(tensor, at, words)
    addresses = [_address(source) for source in tensor.src]
    sources = [source for source in addresses if source is not None]
    written = [said["view"][0]] if word == "SET_ROWS" and len(sources) == 2 and said["view"] is not None else []
    return {
        **said, "params": bytes(tensor.op_params).hex(), "code": tensor.op, "number": tensor.type, "word": word,
        "sources": [*sources, *written],
        "places": [place for place, source in enumerate(addresses) if source is not None],
    }  # fmt: skip


def _address(pointer: Any) -> int | None:
    return ctypes.cast(pointer, ctypes.c_void_p).value
