"""Ops that were saved, run again in llama.cpp's process: their memory as ggml held it, and what they give."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llamaref.weights import block_sizes, encode
from numpy.typing import NDArray

from llamadiff.ext.graph.repro import load, memory_of, reach
from llamadiff.ext.replay.run_op import WRITTEN
from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.quantizing import EightBits
from llamadiff.llamacpp.request import Request, Settings
from llamadiff.llamacpp.sent_tensor import BYTE_ORDERS, NUMPY_TYPES, SentTensor
from llamadiff.system.errors import UserError
from llamadiff.system.progress import Progress, silent

Array = NDArray[Any]


def run_saved(
    paths: Sequence[Path], settings: Settings, progress: Progress = silent
) -> tuple[list[Array], str, EightBits]:
    """What the ops of files give, [ne3, ne2, ne1, ne0]; the device's name, and how its ggml rounds.

    Raises UserError.
    """
    request = Request(
        "", errand="llamadiff.ext.replay.run_op:run_ops", texts=tuple(map(_described, paths)), settings=settings
    )
    found = list[Array]()

    def hear(answer: dict[str, Any], data: Sequence[Any]) -> None:
        if "ran" in answer:
            found.append(SentTensor(answer["node"], data=data[0]).values())

    with Child(settings) as child:
        if child.runner and child.ask(Request(""), silent)["order"] != sys.byteorder:
            raise UserError(f"runner={child.runner}: its bytes are in another order than those that were saved")
        answer = child.ask(request, progress, hear)
    return found, answer["device"], EightBits.from_answer(answer, BYTE_ORDERS[sys.byteorder])


def _described(path: Path) -> str:
    """What run_op.SavedOp takes. Raises UserError for a file that does not say it all."""
    op, memory, given = load(path)[0], *memory_of(path)
    if memory.op in WRITTEN and WRITTEN[memory.op] not in memory.places:
        raise UserError(f"{path}: does not say into what {memory.op} wrote; save it with a newer llama.cpp")
    word = memory.line.partition(" ")[0]
    lies = zip(given, memory.types, memory.sizes, memory.strides, strict=True)
    return json.dumps({
        "path": str(path), "name": op.name, "word": memory.op, "kind": op.kind, "shape": op.shape,
        "number": int(word) if word.isascii() and word.isdecimal() else 0, "params": op.params.hex(),
        "places": memory.places, "types": memory.types, "sizes": memory.sizes, "strides": memory.strides,
        "data": [base64.b64encode(_bytes(*each).tobytes()).decode() for each in lies],
    })  # fmt: skip


def _bytes(values: Array, kind: str, sizes: Sequence[int], strides: Sequence[int]) -> Array:
    """Values as they lie in memory."""
    room = np.zeros(_span(kind, sizes, strides), np.uint8)
    if values.dtype == np.uint8:  # blocks of the file, one after the other
        room[: values.size] = values.reshape(-1)[: room.size]
        return room
    is_plain = kind in NUMPY_TYPES  # or else blocks of a quantized cache: what was decoded comes back as it was
    rows = _stored(values, kind) if is_plain else encode(kind, np.ascontiguousarray(values, np.float32))
    steps = (*reversed(strides[1:]), strides[0] if is_plain else 1)
    shape = (*[1] * (4 - rows.ndim), *rows.shape)
    np.ndarray(shape, rows.dtype, room, strides=steps)[...] = rows.reshape(shape)
    return room


def _span(kind: str, sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Bytes that a tensor reaches over; of blocks, whole rows."""
    if kind in NUMPY_TYPES:
        return reach(sizes, strides) + np.dtype(NUMPY_TYPES[kind]).itemsize
    per_block, size = block_sizes(kind)
    return reach([1, *sizes[1:]], strides) + sizes[0] // per_block * size


def _stored(values: Array, kind: str) -> Array:
    """Values in the type that they were widened from."""
    if kind == "bf16":
        return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(NUMPY_TYPES[kind])
