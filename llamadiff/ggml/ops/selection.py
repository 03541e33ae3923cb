"""Ops that choose: sorting, the largest, where the largest is."""

from __future__ import annotations

import numpy as np

from llamadiff.ggml.op import Array, Op, op


@op("ARGSORT")
def argsort(n: Op) -> Array:
    """Places of the values in order: params[0] is 0 for ascending, 1 for descending."""
    x = -n.x() if n.ints[0] else n.x()
    return np.argsort(x, axis=-1, kind="stable").astype(np.int32)


@op("TOP_K")
def top_k(n: Op) -> Array:
    """Places of the k largest values, in no order that counts (ggml_top_k)."""
    return np.argsort(-n.x(), axis=-1, kind="stable")[..., : n.shape[-1]].astype(np.int32)


@op("ARGMAX")
def argmax(n: Op) -> Array:
    """The place of each row's largest value, of equal ones the last: [.., rows, n] -> [.., rows]."""
    return np.asarray(
        (n.x().shape[-1] - 1 - n.x()[..., ::-1].argmax(axis=-1)).astype(np.int32).reshape(*n.x().shape[:-4], *n.shape)
    )
