"""Runs one saved op through ggml's own API, on any device of any build; in the child process."""

from __future__ import annotations

import base64
import ctypes
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from llamadiff.ext.devices.placing import find_device
from llamadiff.llamacpp.interface import Device, Library
from llamadiff.llamacpp.layout import Address, InitParams, declare, ggml_context
from llamadiff.llamacpp.request import Request, Say
from llamadiff.llamacpp.tensor_transport import Feed
from llamadiff.llamacpp.tensors import Tensor
from llamadiff.system.errors import UserError

OPS, NEWER = 90, 24  # numbers that ops have in every version, and how far a later one may have moved them
_I8 = 24  # GGUF's number of the type
WRITTEN = {"SET_ROWS": 2, "CPY": 1}  # ops that write into one of their sources: which

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
}  # fmt: skip


@dataclass(frozen=True)
class SavedOp:
    """An op of a file: ggml's ``word`` for it, its ``name`` in messages and ``number`` where it was saved, its result's
    type and sizes; and each source's place, type, sizes, strides in bytes, and memory in base64.
    """

    path: str
    name: str
    word: str
    number: int
    kind: str
    shape: Sequence[int]
    params: str
    places: Sequence[int]
    types: Sequence[str]
    sizes: Sequence[Sequence[int]]
    strides: Sequence[Sequence[int]]
    data: Sequence[str]


class OpRunner:
    """A device that runs one op after the other. Raises UserError for what cannot be run there."""

    def __init__(self, library: Library, device: str) -> None:
        self.ggml, self.lib = library.ggml, library.lib
        declare(self.lib, _FUNCTIONS)
        self.device: Device = find_device(library, device or "CPU")
        self.backend = self.lib.ggml_backend_dev_init(self.device.address, None)

    def run(self, op: SavedOp, give: Callable[[Tensor], None]) -> None:
        """Compute an op, and give its result while it is there."""
        with ggml_context(self.lib, no_alloc=True) as context:
            memories = [base64.b64decode(data) for data in op.data]
            described = zip(memories, op.types, op.sizes, op.strides, strict=True)
            made = [self._source(context, len(data), kind, sizes, steps) for data, kind, sizes, steps in described]
            result = self._result(context, op, made)
            if not self.lib.ggml_backend_dev_supports_op(self.device.address, result):
                raise UserError(f"{op.path}: {self.device.name} does not run {op.name} on these types and shapes")
            buffer = self.lib.ggml_backend_alloc_ctx_tensors(context, self.backend)
            try:
                for (_, base), data in zip(made, memories, strict=True):
                    self.lib.ggml_backend_tensor_set(base, ctypes.c_char_p(data), 0, len(data))
                graph = self.lib.ggml_new_graph(context)
                self.lib.ggml_build_forward_expand(graph, result)
                code = self.lib.ggml_backend_graph_compute(self.backend, graph)
                if code:
                    raise UserError(f"{op.path}: {self.device.name} failed with code {code}")
                give(self.ggml.node(result))
            finally:
                self.lib.ggml_backend_buffer_free(buffer)

    def _source(
        self, context: Any, size: int, kind: str, sizes: Sequence[int], strides: Sequence[int]
    ) -> tuple[Any, Any]:
        """A tensor with these strides, and the one of so many bytes whose memory it looks into."""
        base = self.lib.ggml_new_tensor_4d(context, _I8, size, 1, 1, 1)
        return self._look(context, base, kind, sizes, strides), base

    def _look(self, context: Any, base: Any, kind: str, sizes: Sequence[int], strides: Sequence[int]) -> Any:
        """A tensor in another one's memory."""
        made = self.lib.ggml_view_tensor(context, base)
        tensor = self.ggml.node(made).tensor
        tensor.type = self.ggml.number(kind)
        tensor.op = 0  # NONE: a leaf, not a view that is to be computed
        tensor.src[0] = None
        for axis in range(4):
            tensor.ne[axis], tensor.nb[axis] = sizes[axis], strides[axis]
        return made

    def _result(self, context: Any, op: SavedOp, made: Sequence[tuple[Any, Any]]) -> Any:
        """The op's own tensor: where it writes into a source, another look at that one's memory."""
        if op.word in WRITTEN:
            place = list(op.places).index(WRITTEN[op.word])
            result = self._look(context, made[place][1], op.types[place], op.sizes[place], op.strides[place])
        else:
            kind = self.ggml.number(op.kind)
            result = self.lib.ggml_new_tensor_4d(context, kind, *reversed(op.shape))
        tensor, params = self.ggml.node(result).tensor, bytes.fromhex(op.params)
        tensor.op = self._number(op)
        ctypes.memmove(tensor.op_params, params, min(len(params), ctypes.sizeof(tensor.op_params)))
        for place, (source, _) in zip(op.places, made, strict=True):
            tensor.src[place] = ctypes.cast(source, type(tensor.src[place]))
        return result

    def _number(self, op: SavedOp) -> int:
        """The op's number in this ggml: numbers differ between versions."""
        likely = min(op.number, OPS)
        for number in (likely, *range(likely + NEWER)):
            if self.ggml.op_name(number) == op.word:
                return int(number)
        raise UserError(f"this ggml has no op {op.word}")


def run_ops(library: Library, request: Request, say: Say, feed: Feed) -> None:
    """Saved ops (``texts`` describe them) on the device of the settings; what each gives is told."""
    library.lib.llama_backend_init()
    runner = OpRunner(library, request.settings.device)
    for number, text in enumerate(request.texts):
        saved = SavedOp(**json.loads(text))
        say(phase=f"running {os.path.basename(saved.path)}")
        runner.run(saved, partial(_tell_result, feed, number))
    say(device=runner.device.name, **library.rounding(), **library.machine())


def _tell_result(feed: Feed, number: int, node: Tensor) -> None:
    feed.send({"ran": number, "node": node.to_dict()}, node.data)
