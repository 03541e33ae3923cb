"""The KV cache goes wrong in decode steps: each batch reads other rows than were put in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from faulty import with_maths
from llamaref import Engine, ops

from proof.injected.base import DECODE, PREFILL, TOKENS, Build, Injection

KQ, KQV, SOFTMAX = ("kq",), ("kqv_out",), ("kq_soft_max",)
COUNT = len(TOKENS)
ROOM = 10  # rows of a cache that is too short
Slots = Callable[[int], list[int]]  # the last token of a batch -> the token whose row is in each slot; -1: none


def _batches() -> Iterator[tuple[int, int]]:
    yield 0, PREFILL
    yield from ((step, step + 1) for step in range(PREFILL, COUNT))


def _held(slots: Slots, rows: Any, stop: int) -> Any:
    """The rows that are in the slots when a batch has been written."""
    tokens = np.array(slots(stop - 1))
    return rows[:, tokens] * (tokens >= 0)[:, None, None].astype(rows.dtype)


def _by_batch(slots: Slots, hidden: int = COUNT) -> Build:
    """An engine whose batches read these slots; those from ``hidden`` on are not looked at."""

    def scores(q: Any, k: Any) -> Any:
        parts = [ops.attention_scores(q[:, a:z], _held(slots, k, z)) for a, z in _batches()]
        return np.concatenate([np.pad(p, ((0, 0), (0, 0), (0, 0), (0, COUNT - p.shape[3]))) for p in parts], axis=2)

    def values(probs: Any, v: Any) -> Any:
        held = [(a, z, _held(slots, v, z)) for a, z in _batches()]
        return np.concatenate([ops.attention_values(probs[:, :, a:z, : h.shape[1]], h) for a, z, h in held], axis=1)

    def softmax(x: Any, scale: float, queries: Any, keys: Any) -> Any:
        seen = np.where(np.arange(COUNT) < hidden, x, np.float32(-np.inf))
        return ops.causal_softmax(seen, scale, queries, keys)

    return with_maths(attention_scores=scores, attention_values=values, causal_softmax=softmax)


def _stuck(place: int) -> Slots:
    """Every decode step writes into one slot; the others stay empty."""

    def slots(last: int) -> list[int]:
        held = [*range(min(last + 1, PREFILL)), *[-1] * (last + 1 - PREFILL)]
        if last >= PREFILL:
            held[place] = last
        return held

    return slots


def _around(last: int) -> list[int]:
    """The newest token of those that share a slot."""
    return [slot + (last - slot) // ROOM * ROOM for slot in range(min(last + 1, ROOM))]


def _twice(last: int) -> list[int]:
    """Each step's row is there twice; as many slots are read as there are tokens."""
    steps = [step for step in range(PREFILL, last + 1) for _ in range(2)]
    return [*range(min(last + 1, PREFILL)), *steps][: last + 1]


def _late(last: int) -> list[int]:
    return [*range(min(last + 1, PREFILL)), -1, *range(PREFILL, last)][: last + 1]


def _unseen(x: Any, scale: float, queries: Any, keys: Any) -> Any:
    own = (keys[None, :] == queries[:, None]) & (queries[:, None] >= PREFILL)
    return ops.causal_softmax(np.where(own, np.float32(-np.inf), x), scale, queries, keys)


def _short_scores(q: Any, k: Any) -> Any:
    """The last column of a step is not computed."""
    scores, steps = ops.attention_scores(q, k), np.arange(PREFILL, COUNT)
    scores[:, :, steps, steps] = 0
    return scores


def _of_layer_0(path: Path) -> Engine:
    """Every layer reads the first one's rows."""
    kept: list[Any] = []

    def first(rows: Any, number: int) -> Any:
        if len(kept) <= number:
            kept.append(rows)
        return kept[number]

    return with_maths(
        attention_scores=lambda q, k: ops.attention_scores(q, first(k, 0)),
        attention_values=lambda probs, v: ops.attention_values(probs, first(v, 1)),
    )(path)


def _rotated_again(path: Path) -> Engine:
    """K goes through its own rotation once more on its way to the scores."""
    angles: list[Any] = []

    def rotate(x: Any, cos: Any, sin: Any) -> Any:
        angles[:] = [cos, sin]
        return ops.rope_pairs(x, cos, sin)

    return with_maths(
        rope_pairs=rotate, attention_scores=lambda q, k: ops.attention_scores(q, ops.rope_pairs(k, *angles))
    )(path)


def _transposed(axes: tuple[int, ...]) -> Build:
    """V is read as if it were laid out in order."""

    def values(probs: Any, v: Any) -> Any:
        parts = []
        for a, z in _batches():
            rows = np.ascontiguousarray(v[:, :z].transpose(axes)).reshape(v[:, :z].shape)
            parts.append(ops.attention_values(probs[:, :, a:z, :z], rows))
        return np.concatenate(parts, axis=1)

    return with_maths(attention_values=values)


INJECTIONS = (
    Injection("cache: steps one slot late", "cache-row-off", KQ + KQV, _by_batch(_late), decode=DECODE),
    Injection("cache: steps over each other", "cache-overwritten", KQ + KQV, _by_batch(_stuck(PREFILL)), decode=DECODE),
    Injection("cache: steps over slot 0", "cache-overwritten", KQ + KQV, _by_batch(_stuck(0)), decode=DECODE),
    Injection("cache: ten rows for twelve", "cache-too-short", KQ + SOFTMAX + KQV, _by_batch(_around, ROOM),
              decode=DECODE),
    Injection("cache: steps' rows twice", "first-row-fed-twice", KQ + KQV, _by_batch(_twice), decode=DECODE),
    Injection("cache: rows of layer 0", "cache-of-another-layer", KQ + KQV, _of_layer_0, layer=1),
    Injection("cache: steps do not count themselves", "decode-key-unseen", KQ + SOFTMAX,
              with_maths(attention_scores=_short_scores, causal_softmax=_unseen), decode=DECODE),
    Injection("cache: K rotated again", "cache-rotated-again", KQ, _rotated_again, decode=DECODE),
    Injection("cache: V by head", "cache-transposed", KQV, _transposed((0, 2, 1, 3)), decode=DECODE),
    Injection("cache: V by value", "cache-transposed", KQV, _transposed((0, 2, 3, 1)), decode=DECODE),
)  # fmt: skip
