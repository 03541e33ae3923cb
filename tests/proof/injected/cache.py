"""The KV cache goes wrong in decode steps: each batch reads other rows than were put in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from proof.injected.attention import KQ, KQV, SOFTMAX, cache_as, hiding, own_row_empty
from proof.injected.base import DECODE, SAME, bug
from proof.injected.rope import WORDS, turning
from proof.strangers.engine import Array, Edit, Engine


def slots_as(held: Callable[[int, int], Sequence[int]], prefill: bool = False) -> dict[str, Edit]:
    """The cache's slots hold the rows of other tokens: held(tokens so far, tokens of the prefill), -1 for none."""

    def edit(e: Engine, right: Edit, rows: Array) -> Array:
        if e.start == 0 and not (prefill and len(rows) > 10):
            return right(rows)
        tokens = np.array(held(len(rows), e.n_prefill))
        return right(rows[tokens] * (tokens >= 0)[:, None, None].astype(rows.dtype))

    return {"read_keys": edit, "read_values": edit}


def first_layers(side: str) -> dict[str, Edit]:
    """Every layer reads the rows of the first one that has a cache."""

    def edit(e: Engine, right: Edit, rows: Array) -> Array:
        first = e.by_token(e.caches[side, min(layer for of, layer in e.caches if of == side)])
        return right(first if first.shape == rows.shape else rows)

    return {"read_keys" if side == "k" else "read_values": edit}


def laid_out(rows: Array, *axes: int) -> Array:
    """Rows in another order of axes, read as if it were the right one."""
    return np.ascontiguousarray(rows.transpose(axes)).reshape(rows.shape)


def rotated_again(e: Engine, right: Edit, rows: Array) -> Array:
    turns = e.h.arch.rotates and not e.latent
    return right(e.turned(rows, *e.angles(np.arange(len(rows))), e.in_pairs) if turns else rows)


INJECTIONS = (
    bug("rope: steps twice", "rope-twice", WORDS,
        turning(lambda e, right, x, side: right(right(x, side) if e.start else x, side)), decode=DECODE, others=SAME),
    bug("cache: steps one slot late", "cache-row-off", KQ + KQV,
        slots_as(lambda n, p: [*range(p), -1, *range(p, n)][:n]), decode=DECODE),
    bug("cache: steps over each other", "cache-overwritten", KQ + KQV,
        slots_as(lambda n, p: [*range(p), n - 1, *[-1] * (n - 1 - p)]), decode=DECODE, others=SAME),
    bug("cache: steps over slot 0", "cache-overwritten", KQ + KQV,
        slots_as(lambda n, p: [n - 1, *range(1, p), *[-1] * (n - p)]), decode=DECODE, others=SAME),
    bug("cache: steps' rows twice", "first-row-fed-twice", KQ + KQV,
        slots_as(lambda n, p: [*range(p), *np.arange(p, n).repeat(2)][:n]), decode=DECODE),
    bug("cache: ten rows for twelve", "cache-too-short", KQ + SOFTMAX + KQV,
        slots_as(lambda n, p: [s + (n - 1 - s) // 10 * 10 for s in range(10)] + [-1] * (n - 10), prefill=True)
        | hiding(lambda q, k, n: (k > q) | (k >= 10)), decode=DECODE),
    bug("cache: rows of layer 0", "cache-of-another-layer", KQ + KQV, first_layers("k") | first_layers("v"), layer=1,
        others=SAME),
    bug("cache: steps do not count themselves", "decode-key-unseen", KQ + SOFTMAX,
        {"read_keys": own_row_empty} | hiding(lambda q, k, n: (k > q) | (k == q) & (q >= n)), decode=DECODE),
    bug("cache: K rotated again", "cache-rotated-again", KQ, {"read_keys": rotated_again}, decode=DECODE, others=SAME),
    bug("cache: V by head", "cache-transposed", KQV, cache_as(lambda rows: laid_out(rows, 1, 0, 2), "read_values"),
        decode=DECODE, others=SAME),
    bug("cache: V by value", "cache-transposed", KQV, cache_as(lambda rows: laid_out(rows, 1, 2, 0), "read_values"),
        decode=DECODE),
)  # fmt: skip
