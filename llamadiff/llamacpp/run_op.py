"""Runs one saved op through ggml's own API, on any device of any build; in the child process."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from llamaref.weights import block_sizes, type_number
from numpy.typing import NDArray

from llamadiff.ggml.op import Op
from llamadiff.ggml.repro import Memory, load, memory_of, reach
from llamadiff.llamacpp.devices import named
from llamadiff.llamacpp.interface import Device, Library
from llamadiff.llamacpp.layout import Address, InitParams, declare
from llamadiff.system.errors import UserError

Array = NDArray[Any]
ROOM = 1 << 20  # bytes for tensors without their data
OPS, NEWER = 90, 24  # numbers that ops have in every version, and how far a later one may have moved them
_I8 = 24  # GGUF's number of the type
WRITTEN = {"SET_ROWS": 2, "CPY": 1}  # ops that write into one of their sources: which
_BYTES = {"f32": 4, "i32": 4, "i64": 8, "f16": 2, "bf16": 2}

_FUNCTIONS: Mapping[str, tuple[Any, ...]] = {  # name -> result, arguments
    "ggml_init": (Address, InitParams),
    "ggml_free": (None, Address),
    "ggml_new_tensor_4d": (Address, Address, ctypes.c_int, *[ctypes.c_int64] * 4),
    "ggml_view_tensor": (Address, Address, Address),
    "ggml_new_graph": (Address, Address),
    "ggml_build_forward_expand": (None, Address, Address),
    "ggml_backend_dev_init": (Address, Address, ctypes.c_char_p),
    "ggml_backend_dev_supports_op": (ctypes.c_bool, Address, Address),
    "ggml_backend_alloc_ctx_tensors": (Address, Address, Address),
    "ggml_backend_tensor_set": (None, Address, Address, ctypes.c_size_t, ctypes.c_size_t),
    "ggml_backend_graph_compute": (ctypes.c_int, Address, Address),
    "ggml_backend_buffer_free": (None, Address),
    "ggml_quantize_chunk": (
        ctypes.c_size_t, ctypes.c_int, Address, Address, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, Address,
    ),
}  # fmt: skip


class OpRunner:
    """A device that runs one op after the other. Raises UserError for what cannot be run there."""

    def __init__(self, library: Library, device: str) -> None:
        self.ggml, self.lib = library.ggml, library.lib
        declare(self.lib, _FUNCTIONS)
        self.device: Device = named(library, device or "CPU")
        self.backend = self.lib.ggml_backend_dev_init(self.device.address, None)

    def run(self, path: Path) -> Array:
        """What the op of a file gives: [ne3, ne2, ne1, ne0]."""
        op, memory, given = load(path)[0], *memory_of(path)
        if memory.op in WRITTEN and WRITTEN[memory.op] not in memory.places:
            raise UserError(f"{path}: does not say into what {memory.op} wrote; save it with a newer llama.cpp")
        with self._context() as context:
            made = [self._source(context, *one) for one in zip(memory.types, memory.sizes, memory.strides, strict=True)]
            result = self._result(context, op, memory, made)
            if not self.lib.ggml_backend_dev_supports_op(self.device.address, result):
                raise UserError(f"{path}: {self.device.name} does not run {op.name} on these types and shapes")
            buffer = self.lib.ggml_backend_alloc_ctx_tensors(context, self.backend)
            try:
                for (_, base), values, kind, strides in zip(made, given, memory.types, memory.strides, strict=True):
                    data = self._bytes(values, kind, strides, base)
                    self.lib.ggml_backend_tensor_set(base, data.ctypes.data, 0, data.nbytes)
                graph = self.lib.ggml_new_graph(context)
                self.lib.ggml_build_forward_expand(graph, result)
                code = self.lib.ggml_backend_graph_compute(self.backend, graph)
                if code:
                    raise UserError(f"{path}: {self.device.name} failed with code {code}")
                return self.ggml.node(result).values()
            finally:
                self.lib.ggml_backend_buffer_free(buffer)

    @contextmanager
    def _context(self) -> Iterator[Any]:
        context = self.lib.ggml_init(InitParams(ROOM, None, True))
        try:
            yield context
        finally:
            self.lib.ggml_free(context)

    def _source(self, context: Any, kind: str, sizes: Sequence[int], strides: Sequence[int]) -> tuple[Any, Any]:
        """A tensor with these strides, and the one whose memory it looks into."""
        base = self.lib.ggml_new_tensor_4d(context, _I8, _span(kind, sizes, strides), 1, 1, 1)
        return self._look(context, base, kind, sizes, strides), base

    def _look(self, context: Any, base: Any, kind: str, sizes: Sequence[int], strides: Sequence[int]) -> Any:
        """A tensor in another one's memory."""
        made = self.lib.ggml_view_tensor(context, base)
        tensor = self.ggml.node(made).tensor
        tensor.type = type_number(kind.upper())
        tensor.op = 0  # NONE: a leaf, not a view that is to be computed
        tensor.src[0] = None
        for axis in range(4):
            tensor.ne[axis], tensor.nb[axis] = sizes[axis], strides[axis]
        return made

    def _result(self, context: Any, op: Op, memory: Memory, made: Sequence[tuple[Any, Any]]) -> Any:
        """The op's own tensor: where it writes into a source, another look at that one's memory."""
        if memory.op in WRITTEN:
            place = memory.places.index(WRITTEN[memory.op])
            lies = memory.types[place], memory.sizes[place], memory.strides[place]
            result = self._look(context, made[place][1], *lies)
        else:
            result = self.lib.ggml_new_tensor_4d(context, type_number(op.kind.upper()), *reversed(op.shape))
        tensor = self.ggml.node(result).tensor
        tensor.op = self._number(memory)
        ctypes.memmove(tensor.op_params, op.params, min(len(op.params), ctypes.sizeof(tensor.op_params)))
        for place, (source, _) in zip(memory.places, made, strict=True):
            tensor.src[place] = ctypes.cast(source, type(tensor.src[place]))
        return result

    def _number(self, memory: Memory) -> int:
        """The op's number in this ggml: numbers differ between versions."""
        word = memory.line.partition(" ")[0]
        likely = min(int(word), OPS) if word.isascii() and word.isdecimal() else 0
        for number in (likely, *range(likely + NEWER)):
            if self.ggml.op_name(number) == memory.op:
                return int(number)
        raise UserError(f"this ggml has no op {memory.op}")

    def _bytes(self, values: Array, kind: str, strides: Sequence[int], base: Any) -> Array:
        """Values as they lie in memory."""
        room = np.zeros(self.ggml.node(base).shape[-1], np.uint8)
        if values.dtype == np.uint8:  # blocks of the file, one after the other
            room[: values.size] = values.reshape(-1)[: room.size]
            return room
        rows = self._blocks(values, kind) if kind not in _BYTES else _stored(values, kind)
        steps = (*reversed(strides[1:]), strides[0] if kind in _BYTES else 1)
        shape = (*[1] * (4 - rows.ndim), *rows.shape)
        np.ndarray(shape, rows.dtype, room, strides=steps)[...] = rows.reshape(shape)
        return room

    def _blocks(self, values: Array, kind: str) -> Array:
        """Rows of a quantized cache, rounded as ggml does: what was decoded comes back as it was."""
        values = np.ascontiguousarray(values, np.float32)
        per_block, size = block_sizes(kind)
        width = values.shape[-1]
        out = np.zeros((*values.shape[:-1], width // per_block * size), np.uint8)
        rows = values.size // width
        self.lib.ggml_quantize_chunk(
            type_number(kind.upper()), values.ctypes.data, out.ctypes.data, 0, rows, width, None
        )  # fmt: skip
        return out


def _span(kind: str, sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Bytes that a tensor reaches over; of blocks, whole rows."""
    if kind in _BYTES:
        return reach(sizes, strides) + _BYTES[kind]
    per_block, size = block_sizes(kind)
    return reach([1, *sizes[1:]], strides) + sizes[0] // per_block * size


def _stored(values: Array, kind: str) -> Array:
    """Values in the type that they were widened from."""
    if kind == "bf16":
        return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype({"f32": np.float32, "f16": np.float16, "i32": np.int32, "i64": np.int64}[kind])
