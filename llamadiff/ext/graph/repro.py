"""One op in a file: inputs, parameters, what is expected and what was found. For a bug report, and for tests."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from llamaref.weights import decode

from llamadiff.ext.graph.op import Array, Op, Operand
from llamadiff.numerics import cpu
from llamadiff.system.errors import UserError
from llamadiff.system.input import check_regular
from llamadiff.system.output import write_whole
from llamadiff.trace.stated import parse_json, reason

KEY = "llamadiff.op"
MOST = 1 << 36  # bytes that a tensor may reach over


@dataclass(frozen=True)
class Memory:
    """How ggml holds an op: its own name of it (UNARY for SILU); each source's place, type, sizes and strides in bytes.

    ``line`` is the op as a line of the file that ggml's own ``test-backend-ops test --test-file`` reads.
    """

    op: str
    line: str
    places: tuple[int, ...]
    types: tuple[str, ...]
    sizes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]


def save(path: Path, n: Op, expected: Array, found: Array, name: str, memory: Memory | None = None) -> None:
    """Write an op as a .safetensors file: source.0, source.1, ..., expected, found; its description in the metadata.

    With ``memory`` the op can be run again in ggml, and a text file beside it has the line for ggml's own tests.
    """
    from safetensors.numpy import save as packed

    arrays = {f"source.{i}": np.ascontiguousarray(s.values) for i, s in enumerate(n.sources) if s is not None}
    arrays |= {"expected": np.ascontiguousarray(expected).reshape(found.shape), "found": np.ascontiguousarray(found)}
    about = {
        "op": n.name, "shape": n.shape, "type": n.kind, "params": n.params.hex(), "node": name, "q8": n.q8,
        "sources": [None if s is None else {"type": s.kind, "name": s.name} for s in n.sources],
        "memory": None if memory is None else asdict(memory),
    }  # fmt: skip
    write_whole(path, packed(arrays, {KEY: json.dumps(about)}))
    if memory is not None:
        write_whole(path.with_suffix(".txt"), memory.line.encode())


def memory_of(path: Path) -> tuple[Memory, list[Array]]:
    """How ggml held a saved op, and its sources as they were saved. Raises UserError for a file that does not say."""
    check_regular(path, "an op that was saved with --keep")
    try:
        return _memory(path)
    except Exception as error:
        raise UserError(f"{path}: does not say how ggml held this op ({reason(error)}); save it anew") from None


def _memory(path: Path) -> tuple[Memory, list[Array]]:
    from safetensors import safe_open

    with safe_open(str(path), "np") as file:
        said = parse_json(file.metadata()[KEY])["memory"]
        lists = {name: tuple(map(tuple, said[name])) for name in ("sizes", "strides")}
        memory = Memory(str(said["op"]), str(said["line"]), tuple(said["places"]), tuple(said["types"]), **lists)
        arrays = [file.get_tensor(f"source.{i}") for i in range(len(memory.types))]
    for array, sizes, strides in zip(arrays, memory.sizes, memory.strides, strict=True):
        whole = all(isinstance(number, int) and 0 <= number <= MOST for number in (*sizes, *strides, *memory.places))
        if len(sizes) != 4 or len(strides) != 4 or not whole or reach(sizes, strides) > MOST:
            raise ValueError("sizes or strides that no tensor has")
        if array.dtype != np.uint8 and array.size != math.prod(sizes):
            raise ValueError(f"{array.size} values for sizes {list(sizes)}")
    return memory, arrays


def reach(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Bytes from a tensor's first value to its last one's beginning."""
    return sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True) if size)


def _floats(values: Array, kind: str) -> Array:
    """A source on four axes, weights of the file decoded."""
    if values.dtype == np.uint8:
        values = decode(kind, values)
    values = values.astype(np.float32) if values.dtype.kind == "f" else values
    return values.reshape(*[1] * (4 - values.ndim), *values.shape)


def load(path: Path) -> tuple[Op, Array, Array, str]:
    """Read such a file -> the op, what is expected, what was found, the node's name.

    Raises UserError for a file that is none.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file; llamadiff backend --keep DIR saves ops")
    check_regular(path, "an op that was saved with --keep")
    try:
        return _loaded(path)
    except Exception as error:  # a file from a stranger may lack or hold anything
        said = f"it has no entry {error.args[0]}" if isinstance(error, KeyError) and error.args else reason(error)
        raise UserError(f"{path}: not an op that was saved with --keep ({said})") from None


def _loaded(path: Path) -> tuple[Op, Array, Array, str]:
    from safetensors import safe_open

    with safe_open(str(path), "np") as file:
        about = parse_json(file.metadata()[KEY])
        sources = tuple(
            None if s is None else Operand(_floats(file.get_tensor(f"source.{i}"), s["type"]), s["type"], s["name"])
            for i, s in enumerate(about["sources"])
        )
        params, q8 = bytes.fromhex(about["params"]), cpu.stated_q8_way(about.get("q8"))
        op = Op(about["op"], tuple(about["shape"]), about["type"], params, sources, q8=q8)
        return op, file.get_tensor("expected"), file.get_tensor("found"), about["node"]
