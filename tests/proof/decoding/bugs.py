"""Thirteen ways in which engines with a KV cache go wrong in batches: those of the table, or as batches have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from proof.decoding.engine import Generating
from proof.injected import BUGS
from proof.injected.base import projected
from proof.strangers.engine import NONE, Array, Bug, Edit


def at(change: Callable[[Generating, Array], Array]) -> dict[str, Edit]:
    """Other positions."""
    return {"theta": lambda e, right, p: right(change(e, p))}


def holding(held: Callable[[Generating], Sequence[int]]) -> dict[str, Edit]:
    """The slots that are read after the first batch hold the rows of these tokens."""

    def edit(e: Generating, right: Edit, rows: Array) -> Array:
        return right(rows[list(held(e))] if e.start else rows)

    return {"read_keys": edit, "read_values": edit}


def first_rows_twice(e: Generating) -> list[int]:
    """A batch's first row is put into the cache twice, and what is behind the last token is not read."""
    starts = list(accumulate(e.batches[:-1], initial=0))[1:]
    held = list(range(e.n_prefill))
    for start, size in zip(starts, e.batches[1:], strict=True):
        held += [start, *range(start, start + size)]
    return held[: e.stop]


def around(e: Generating) -> list[int]:
    """Of tokens that share one of too few slots the newest."""
    slots = e.room - 2
    return [slot + (e.stop - 1 - slot) // slots * slots for slot in range(min(slots, e.stop))]


def of_layer_before(side: str) -> Edit:
    """The layer before is read; the first layer reads what the last one has of earlier batches."""

    def edit(e: Generating, right: Edit, rows: Array) -> Array:
        other = e.caches.get((side, (e.layer or e.h.layers) - 1))
        there = np.zeros_like(rows)
        if other is not None:
            there[: other.shape[-1]] = e.by_token(other)
        return right(there)

    return edit


# name -> what is wrong, the tap where it is, and the known bug that describes it
KV_BUGS: dict[str, tuple[Bug, str, str]] = {
    "positions restart": (Bug("", at(lambda e, p: p - e.start)), "Qcur_rope", "rope-position-restarted"),
    "positions lag": (BUGS["rope: steps lag by one"], "Qcur_rope", "rope-position-restarted"),
    "positions stand still": (Bug("", at(lambda e, p: p - e.start + (e.n_prefill if e.start else 0))), "Qcur_rope",
                              "rope-position-restarted"),
    "rows off by one": (BUGS["cache: steps one slot late"], "kq", "cache-row-off"),
    "rows overwritten": (Bug("", holding(lambda e: [*range(e.n_prefill), *range(e.start, e.stop)])), "kq",
                         "cache-overwritten"),
    "rows of another layer": (Bug("", {"read_keys": of_layer_before("k"), "read_values": of_layer_before("v")}), "kq",
                              "cache-of-another-layer"),
    "last key unseen": (Bug("", holding(lambda e: range(e.stop - 1))), "kq", "decode-key-unseen"),
    "first row fed twice": (Bug("", holding(first_rows_twice)), "kq", "first-row-fed-twice"),
    "first token fed twice": (Bug("", {"embed": lambda e, right, t: right(np.append(t[:1], t[:-1]) if e.start else t)}),
                              "embd", "first-row-fed-twice"),
    "cache too short": (Bug("", holding(around)), "kq", "cache-too-short"),
    "rotated twice": (BUGS["cache: K rotated again"], "kq", "cache-rotated-again"),
    "cached before RoPE": (Bug("", {"key": lambda e, right, k: right(projected(e, "K"))}), "kq", "cache-before-rope"),
    "V transposed": (BUGS["cache: V by value"], "kqv_out", "cache-transposed"),
}  # fmt: skip
DECODING = {"none": NONE} | {name: bug for name, (bug, _, _) in KV_BUGS.items()}
