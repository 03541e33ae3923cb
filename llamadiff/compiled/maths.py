"""llamaref's maths, with compiled functions in place of those that take longest."""

from __future__ import annotations

from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
from llamaref import ops
from numpy.typing import NDArray

from llamadiff.compiled.library import library

Array = NDArray[Any]


def maths() -> Any:
    """What llamaref's Engine computes with: its ops; those below for float32, where they are compiled."""
    own = (rms_norm, rope_pairs, rope_halves, causal_softmax_of_many, swiglu)
    return SimpleNamespace(**{**vars(ops), **{function.__name__: function for function in own}})


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """As ops.rms_norm; by NumPy where each head has a weight of its own."""
    compiled = library()
    if compiled is None or not _known(x, weight) or weight.shape != x.shape[-1:]:
        return ops.rms_norm(x, weight, eps)
    x, weight = np.ascontiguousarray(x), np.ascontiguousarray(weight)
    out = np.empty_like(x)
    width = len(weight)
    compiled.llamadiff_rms_norm(x.ctypes.data, x.size // width, width, weight.ctypes.data, eps, out.ctypes.data)
    return out


def rope_pairs(x: Array, cos: Array, sin: Array) -> Array:
    """As ops.rope_pairs."""
    turned = _turned(x, cos, sin, neighbours=True)
    return ops.rope_pairs(x, cos, sin) if turned is None else turned


def rope_halves(x: Array, cos: Array, sin: Array) -> Array:
    """As ops.rope_halves."""
    turned = _turned(x, cos, sin, neighbours=False)
    return ops.rope_halves(x, cos, sin) if turned is None else turned


def _turned(x: Array, cos: Array, sin: Array, *, neighbours: bool) -> Array | None:
    compiled, (*rows, heads, width), turned = library(), x.shape, cos.shape[-1]
    if compiled is None or not _known(x) or not 0 < 2 * turned <= width:
        return None
    x = np.ascontiguousarray(x)
    out = np.empty_like(x)
    cos, sin = (np.ascontiguousarray(np.broadcast_to(each, (*rows, turned)), np.float64) for each in (cos, sin))
    compiled.llamadiff_rope(
        x.ctypes.data, cos.size // turned, heads, width, turned, neighbours,
        cos.ctypes.data, sin.ctypes.data, out.ctypes.data,
    )  # fmt: skip
    return out


def causal_softmax_of_many(
    scores: Array, scale: float, query_positions: Array, key_positions: Array, sinks: Array | None = None
) -> Array:
    """As ops.causal_softmax_of_many; by NumPy if the keys are not in order, or a query sees none."""
    compiled, (*heads, queries, keys) = library(), scores.shape
    seen = np.searchsorted(key_positions, query_positions, "right")
    in_order = bool((np.diff(key_positions) >= 0).all() and seen.all())
    if compiled is None or not _known(scores) or sinks is not None or not in_order:
        return ops.causal_softmax_of_many(scores, scale, query_positions, key_positions, sinks)
    scores, seen = np.ascontiguousarray(scores), np.ascontiguousarray(seen, np.int64)
    out = np.empty_like(scores)
    compiled.llamadiff_softmax(scores.ctypes.data, prod(heads), queries, keys, seen.ctypes.data, scale, out.ctypes.data)
    return out


def swiglu(gate: Array, up: Array) -> Array:
    """As ops.swiglu."""
    compiled = library()
    if compiled is None or not _known(gate, up) or gate.shape != up.shape:
        return ops.swiglu(gate, up)
    gate, up = np.ascontiguousarray(gate), np.ascontiguousarray(up)
    out = np.empty_like(gate)
    compiled.llamadiff_swiglu(gate.ctypes.data, up.ctypes.data, gate.size, out.ctypes.data)
    return out


def _known(*arrays: Array) -> bool:
    return all(array.dtype == np.float32 and array.size > 0 for array in arrays)
