"""Ops that choose: sorting, the largest, where the largest is."""

from __future__ import annotations

import numpy as np

from llamadiff.ext.graph.op import Array, Op, op


@op("ARGSORT")
def argsort(n: Op) -> Array:
    """Places of the values in order: params[0] is 0 for ascending, 1 for descending."""
    x = -n.x() if n.ints[0] else n.x()
    return np.argsort(x, axis=-1, kind="stable").astype(np.int32)


@op("TOP_K")
def top_k(n: Op) -> Array:
    """Places of the k largest values, best first but for the first two, exchanged (ggml_compute_forward_top_k).

    Of equal values, ggml takes those that libstdc++'s std::partial_sort leaves first.
    """
    x, k = n.x().reshape(-1, n.x().shape[-1]), n.shape[-1]
    places = np.argsort(-x, axis=-1, kind="stable")
    best = np.take_along_axis(x, places[:, : k + 1], axis=-1)
    tied = (best[:, 1:] == best[:, :-1]).any(axis=-1)
    out = places[:, :k].astype(np.int32)
    if tied.any():
        out[tied] = _partly_sorted(x[tied], k)
    if k > 1:
        out[:, [0, 1]] = out[:, [1, 0]]
    return out.reshape(*n.x().shape[:-1], k)


def _partly_sorted(x: Array, k: int) -> Array:
    """Places of each row's k largest values as std::partial_sort orders them: by a heap with the least on top."""
    heap = np.tile(np.arange(x.shape[-1]), (len(x), 1))
    every = np.arange(len(x))
    for parent in range((k - 2) // 2, -1, -1):
        _sift(x, heap, every, parent, k, heap[:, parent].copy())
    for place in range(k, x.shape[-1]):
        larger = np.flatnonzero(x[:, place] > x[every, heap[:, 0]])
        if larger.size:
            _sift(x, heap, larger, 0, k, np.full(larger.size, place))
    for last in range(k - 1, 0, -1):
        value = heap[:, last].copy()
        heap[:, last] = heap[:, 0]
        _sift(x, heap, every, 0, last, value)
    return heap[:, :k].astype(np.int32)


def _sift(x: Array, heap: Array, rows: Array, top: int, size: int, value: Array) -> None:
    """A value put in at ``top``: the lesser children move up to the bottom, then it rises (std::__adjust_heap)."""
    hole, down = np.full(rows.size, top), np.arange(rows.size)
    while (down := down[2 * hole[down] + 1 < size]).size:
        at, left = rows[down], 2 * hole[down] + 1
        right = np.minimum(left + 1, size - 1)
        child = np.where(x[at, heap[at, right]] > x[at, heap[at, left]], left, right)
        heap[at, hole[down]] = heap[at, child]
        hole[down] = child
    up = np.arange(rows.size)
    while (up := up[hole[up] > top]).size:
        parent = (hole[up] - 1) // 2
        up, parent = (part[x[rows[up], heap[rows[up], parent]] > x[rows[up], value[up]]] for part in (up, parent))
        heap[rows[up], hole[up]] = heap[rows[up], parent]
        hole[up] = parent
    heap[rows, hole] = value


@op("ARGMAX")
def argmax(n: Op) -> Array:
    """The place of each row's largest value, of equal ones the last: [.., rows, n] -> [.., rows]."""
    return np.asarray(
        (n.x().shape[-1] - 1 - n.x()[..., ::-1].argmax(axis=-1)).astype(np.int32).reshape(*n.x().shape[:-4], *n.shape)
    )
