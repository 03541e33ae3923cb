"""One op in a file: inputs, parameters, what is expected and what was found. For a bug report, and for tests."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from llamaref.weights import block_minima, decode

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


@dataclass(frozen=True)
class SavedInputs:
    """What an op's file says but for results: the op, whose sources are as the file keeps them, and the node's name.

    ``case``: what is said of inputs that were generated around those of a run; empty for a run's own.
    """

    op: Op
    name: str
    memory: Memory | None = None
    case: str = ""


def save(path: Path, n: Op, expected: Array, found: Array, name: str, memory: Memory | None = None) -> None:
    """Write an op as a .safetensors file: source.0, source.1, ..., expected, found; its description in the metadata.

    With ``memory`` the op can be run again in ggml, and a text file beside it has the line for ggml's own tests.
    """
    save_results(path, SavedInputs(n, name, memory), expected, found)
    if memory is not None:
        write_whole(path.with_suffix(".txt"), memory.line.encode())


def save_results(path: Path, inputs: SavedInputs, expected: Array, found: Array) -> None:
    """The same of inputs that were read from such a file, or generated around them."""
    results = {"expected": np.ascontiguousarray(expected).reshape(found.shape), "found": np.ascontiguousarray(found)}
    write_whole(path, _packed(inputs, results))


def save_inputs(path: Path, inputs: SavedInputs) -> None:
    """The inputs alone, in a folder of one's own: what a kernel on trial is given."""
    path.write_bytes(_packed(inputs, {}))


def _packed(inputs: SavedInputs, results: Mapping[str, Array]) -> bytes:
    from safetensors.numpy import save as packed

    n = inputs.op
    arrays = {f"source.{i}": np.ascontiguousarray(s.values) for i, s in enumerate(n.sources) if s is not None}
    about = {
        "op": n.name, "shape": n.shape, "type": n.kind, "params": n.params.hex(), "node": inputs.name, "q8": n.q8,
        "sources": [None if s is None else {"type": s.kind, "name": s.name} for s in n.sources],
        "memory": None if inputs.memory is None else asdict(inputs.memory), "case": inputs.case,
    }  # fmt: skip
    named = {f"parameter.{name}": str(value) for name, value in named_parameters(n).items()}
    data: bytes = packed({**arrays, **results}, {KEY: json.dumps(about), **named})
    return data


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
        memory = _stated_memory(parse_json(file.metadata()[KEY]))
        if memory is None:
            raise ValueError("no memory is stated")
        arrays = [file.get_tensor(f"source.{i}") for i in range(len(memory.types))]
    for array, sizes, strides in zip(arrays, memory.sizes, memory.strides, strict=True):
        whole = all(isinstance(number, int) and 0 <= number <= MOST for number in (*sizes, *strides, *memory.places))
        if len(sizes) != 4 or len(strides) != 4 or not whole or reach(sizes, strides) > MOST:
            raise ValueError("sizes or strides that no tensor has")
        if array.dtype != np.uint8 and array.size != math.prod(sizes):
            raise ValueError(f"{array.size} values for sizes {list(sizes)}")
    return memory, arrays


def _stated_memory(about: Mapping[str, Any]) -> Memory | None:
    said = about.get("memory")
    if said is None:
        return None
    lists = {name: tuple(map(tuple, said[name])) for name in ("sizes", "strides")}
    return Memory(str(said["op"]), str(said["line"]), tuple(said["places"]), tuple(said["types"]), **lists)


def reach(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Bytes from a tensor's first value to its last one's beginning."""
    return sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True) if size)


def _floats(values: Array, kind: str) -> Array:
    """A source on four axes, weights of the file decoded."""
    if values.dtype == np.uint8:
        values = decode(kind, values)
    values = values.astype(np.float32) if values.dtype.kind == "f" else values
    return values.reshape(*[1] * (4 - values.ndim), *values.shape)


def decoded(n: Op) -> Op:
    """An op whose sources are as a file keeps them, with floats for blocks."""
    return replace(n, sources=tuple(None if s is None else _decoded(s) for s in n.sources))


def _decoded(s: Operand) -> Operand:
    floats = replace(s, values=_floats(s.values, s.kind))
    if s.values.dtype != np.uint8 or cpu.PARTNER.get(s.kind.upper()) != "Q8_1":
        return floats
    minima = block_minima(s.kind, s.values)
    return replace(floats, minima=minima.reshape(*[1] * (4 - minima.ndim), *minima.shape).astype(np.float32))


def load(path: Path) -> tuple[Op, Array, Array, str]:
    """Read such a file -> the op, what is expected, what was found, the node's name.

    Raises UserError for a file that is none.
    """
    inputs, results = _read(path, ("expected", "found"))
    return inputs.op, results[0], results[1], inputs.name


def load_inputs(path: Path) -> SavedInputs:
    """The inputs of such a file, with its sources as it keeps them. Raises UserError for a file that is none."""
    return _read(path, ())[0]


def _read(path: Path, results: Sequence[str]) -> tuple[SavedInputs, list[Array]]:
    """What a file says, with decoded sources where its ``results`` are asked for."""
    if not path.exists():
        raise UserError(f"{path}: no such file; llamadiff backend --keep DIR saves ops")
    check_regular(path, "an op that was saved with --keep")
    try:
        inputs, found = _loaded(path, results)
        whole = decoded(inputs.op)
    except Exception as error:  # a file from a stranger may lack or hold anything
        said = f"it has no entry {error.args[0]}" if isinstance(error, KeyError) and error.args else reason(error)
        raise UserError(f"{path}: not an op that was saved with --keep ({said})") from None
    return (replace(inputs, op=whole) if results else inputs), found


def _loaded(path: Path, results: Sequence[str]) -> tuple[SavedInputs, list[Array]]:
    from safetensors import safe_open

    with safe_open(str(path), "np") as file:
        about = parse_json(file.metadata()[KEY])
        sources = tuple(
            None if s is None else Operand(file.get_tensor(f"source.{i}"), s["type"], s["name"])
            for i, s in enumerate(about["sources"])
        )
        params, q8 = bytes.fromhex(about["params"]), cpu.stated_q8_way(about.get("q8"))
        if len(about["shape"]) != 4 or not all(isinstance(size, int) and 0 <= size <= MOST for size in about["shape"]):
            raise ValueError(f"the shape {about['shape']}")
        if math.prod(about["shape"]) > MOST:
            raise ValueError("a result that no memory holds")
        op = Op(str(about["op"]), tuple(about["shape"]), str(about["type"]), params, sources, q8=q8)
        inputs = SavedInputs(op, str(about["node"]), _stated_memory(about), str(about.get("case") or ""))
        return inputs, [file.get_tensor(name) for name in results]


# ggml's op_params by name, for whoever reads an op's file: a float32 or an int32 and its place (ggml.c, ops.cpp).
_F, _I = "f", "i"
_EPS, _DIRECTION = (("eps", _F, 0),), (("descending", _I, 0),)
PARAMETERS: Mapping[str, tuple[tuple[str, str, int], ...]] = {
    "RMS_NORM": _EPS, "NORM": _EPS, "L2_NORM": _EPS, "GROUP_NORM": (("groups", _I, 0), ("eps", _F, 1)),
    "SCALE": (("scale", _F, 0), ("bias", _F, 1)), "CLAMP": (("min", _F, 0), ("max", _F, 1)),
    "SOFT_MAX": (("scale", _F, 0), ("max_bias", _F, 1)),
    "FLASH_ATTN_EXT": (("scale", _F, 0), ("max_bias", _F, 1), ("logit_softcap", _F, 2)),
    "ROPE": (
        ("n_dims", _I, 1), ("mode", _I, 2), ("n_ctx_orig", _I, 4), ("freq_base", _F, 5), ("freq_scale", _F, 6),
        ("ext_factor", _F, 7), ("attn_factor", _F, 8), ("beta_fast", _F, 9), ("beta_slow", _F, 10),
    ),
    "ARGSORT": _DIRECTION, "LEAKY_RELU": (("negative_slope", _F, 0),), "CONCAT": (("axis", _I, 0),),
    "DIAG_MASK_INF": (("n_past", _I, 0),), "SWIGLU": (("swapped", _I, 1),), "GEGLU": (("swapped", _I, 1),),
    "REGLU": (("swapped", _I, 1),), "SWIGLU_OAI": (("swapped", _I, 1), ("alpha", _F, 2), ("limit", _F, 3)),
}  # fmt: skip


def named_parameters(n: Op) -> dict[str, float | int]:
    """Those that have a name here."""
    sides: dict[str, Any] = {_F: n.floats, _I: n.ints}
    named = PARAMETERS.get(n.name, ()) if len(n.params) % 4 == 0 else ()
    return {name: sides[kind][place].item() for name, kind, place in named if place < n.ints.size}
