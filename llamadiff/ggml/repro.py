"""One op in a file: inputs, parameters, what is expected and what was found. For a bug report, and for tests."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from llamaref.weights import decode

from llamadiff.ggml.op import Array, Op, Operand
from llamadiff.system.errors import UserError
from llamadiff.system.input import check_regular
from llamadiff.system.output import write_whole
from llamadiff.system.stated import parse_json, reason

KEY = "llamadiff.op"


def save(path: Path, n: Op, expected: Array, found: Array, name: str) -> None:
    """Write an op as a .safetensors file: source.0, source.1, ..., expected, found; its description in the metadata."""
    from safetensors.numpy import save as packed

    arrays = {f"source.{i}": np.ascontiguousarray(s.values) for i, s in enumerate(n.sources) if s is not None}
    arrays |= {"expected": np.ascontiguousarray(expected).reshape(found.shape), "found": np.ascontiguousarray(found)}
    about = {
        "op": n.name, "shape": n.shape, "type": n.kind, "params": n.params.hex(), "node": name, "q8": n.q8,
        "sources": [None if s is None else {"type": s.kind, "name": s.name} for s in n.sources],
    }  # fmt: skip
    write_whole(path, packed(arrays, {KEY: json.dumps(about)}))


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
    check_regular(path, "an op that was saved with --keep")
    try:
        return _loaded(path)
    except Exception as error:  # a file from a stranger may lack or hold anything
        raise UserError(f"{path}: not an op that was saved with --keep ({reason(error)})") from None


def _loaded(path: Path) -> tuple[Op, Array, Array, str]:
    from safetensors import safe_open

    with safe_open(str(path), "np") as file:
        about = parse_json(file.metadata()[KEY])
        sources = tuple(
            None if s is None else Operand(_floats(file.get_tensor(f"source.{i}"), s["type"]), s["type"], s["name"])
            for i, s in enumerate(about["sources"])
        )
        params, q8 = bytes.fromhex(about["params"]), about.get("q8", "")
        op = Op(about["op"], tuple(about["shape"]), about["type"], params, sources, q8=q8)
        return op, file.get_tensor("expected"), file.get_tensor("found"), about["node"]
