"""Runs of strangers as trace files, written by hand after the contract (docs/trace-format.md)."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

Array = np.ndarray
SPARSE = ("l_out-", "result_output")
LOGITS = ("result_output",)


def save(
    path: Path,
    taps: Mapping[str, Array],
    tokens: Sequence[int],
    n_prefill: int = 0,
    kind: str = "f32",
    name: str = "stranger",
    batches: Sequence[int] = (),
) -> Path:
    """Write taps in one precision; whole numbers stay such. ``n_prefill`` 0: no decode steps."""
    facts: dict[str, object] = {
        "schema": "llamadiff.trace/1",
        "tokens": [int(token) for token in tokens],
        "n_prefill": n_prefill or len(tokens),
        "producer": {"name": name},
        **({"batches": list(batches)} if batches else {}),
    }
    header: dict[str, object] = {"__metadata__": {"llamadiff": json.dumps(facts)}}
    parts, end = [], 0
    for tap, values in taps.items():
        whole = values.dtype.kind == "i"
        data = values.astype("<i4").tobytes() if whole else packed(values, kind).tobytes()
        offsets = [end, end + len(data)]
        header[tap] = {"dtype": "I32" if whole else kind.upper(), "shape": values.shape, "data_offsets": offsets}
        parts.append(data)
        end += len(data)
    text = json.dumps(header).encode()
    path.unlink(missing_ok=True)  # a file of its own: what was there may still be mapped
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))
    return path


def packed(values: Array, kind: str) -> Array:
    """Values in a precision: bfloat16 as its bits."""
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(values, np.float16 if kind == "f16" else np.float32)
    if kind != "bf16":
        return values
    bits = values.view(np.uint32)
    return ((bits + ((bits >> 16) & 1) + np.uint32(0x7FFF)) >> 16).astype(np.uint16)


def only(taps: Mapping[str, Array], beginnings: Sequence[str]) -> dict[str, Array]:
    """The taps whose names begin so."""
    return {name: values for name, values in taps.items() if name.startswith(tuple(beginnings))}


def without_cache(taps: Mapping[str, Array]) -> dict[str, Array]:
    return {name: values for name, values in taps.items() if not name.startswith(("kv_k-", "kv_v-"))}
