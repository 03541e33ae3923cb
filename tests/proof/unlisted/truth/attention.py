"""Checks of what is read back of attention: scores, softmax, sums of V's rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from proof.unlisted.truth.op import Op, numbers

Array = np.ndarray


def scores(op: Op) -> tuple[Array, Array]:
    """Scores [head, query, key] and what is seen of them; a router's as one head."""
    if op.word == "kq_soft_max":
        x = op.of("kq")
        return x, np.broadcast_to(np.tri(x.shape[1], x.shape[2], dtype=bool), x.shape)
    x = op.of("ffn_moe_logits")[None]
    return x, np.ones(x.shape, bool)


def right_scale(op: Op) -> float:
    return op.file.hyper.dim**-0.5 if op.word == "kq_soft_max" else 1.0


def powers(op: Op, scale: Any) -> Array:
    """exp below the row's largest of those that the recorded values see."""
    x, seen = scores(op)
    seen = seen & (op.r.reshape(x.shape) > 0)
    x = np.where(seen, x * scale, -np.inf)
    return np.where(seen, np.exp(x - x.max(axis=-1, keepdims=True, initial=-1e300)), 0.0)


def within_rows(op: Op, scale: Any) -> bool:
    """Whether a row's values are such powers, whatever they sum to."""
    p = powers(op, scale)
    total = op.r.reshape(p.shape).sum(-1, keepdims=True)
    return op.are((p / np.maximum(p.sum(-1, keepdims=True), 1e-300) * total).reshape(op.r.shape))


def head_scales(op: Op, values: str, right: str) -> bool:
    told = [float(value) for value in values.split(", ")]
    scale = np.array(op.fact.values)[:, None, None]
    near = np.allclose(told, op.fact.values, rtol=1e-3) and np.isclose(float(right), right_scale(op), rtol=1e-3)
    return near and within_rows(op, scale)


def one_scale(op: Op, value: str, right: str) -> bool:
    near = np.isclose(float(value), op.fact.values[0], rtol=1e-3) and np.isclose(
        float(right), right_scale(op), rtol=1e-3
    )
    return near and within_rows(op, op.fact.values[0])


def row_scales(op: Op, low: str, high: str, right: str) -> bool:
    values = op.fact.values
    return np.isclose(min(values), float(low), rtol=1e-3) and np.isclose(max(values), float(high), rtol=1e-3)


def sum_plus(op: Op, count: str) -> bool:
    p = powers(op, right_scale(op))
    return op.are((p / (p.sum(-1, keepdims=True) + op.fact.values[0])).reshape(op.r.shape)) and np.isclose(
        float(count), op.fact.values[0], rtol=1e-3
    )


def sum_lacks(op: Op, words: str, spared: str | None) -> bool:
    p = powers(op, right_scale(op))
    lost = lost_keys(words, p)
    lost = lost & ((p > 0).sum(-1, keepdims=True) > 1) if spared else lost
    return op.are((p / np.where(lost, 0.0, p).sum(-1, keepdims=True)).reshape(op.r.shape))


def lost_keys(words: str, p: Array) -> Array:
    """The keys that words speak about, [head, query, key]."""
    key = np.arange(p.shape[-1])
    if words == "each query's own key":
        return np.broadcast_to(np.eye(*p.shape[1:], dtype=bool), p.shape)
    if match := re.fullmatch(r"key (\d+)", words):
        return np.broadcast_to(key == int(match[1]), p.shape)
    places = {"the first key": 0, "the first expert": 0, "the last expert": p.shape[-1] - 1}
    if words in places:
        return np.broadcast_to(key == places[words], p.shape)
    return key == p.argmax(-1)[..., None]


def sum_counts(op: Op, count: str, in_all: bool) -> bool:
    x, seen = scores(op)
    top = np.where(seen, x * right_scale(op), -np.inf).max(-1, keepdims=True)
    n = int(count) - (seen.sum(-1, keepdims=True) if in_all else 0)
    p = powers(op, right_scale(op))
    return op.are((p / (p.sum(-1, keepdims=True) + n * np.exp(-top))).reshape(op.r.shape))


def unseen(op: Op, key: str, queries: str, heads: str | None) -> bool:
    some = range(len(op.r)) if not heads else numbers(heads)
    queries_said = numbers(re.sub(r" and \d+ more", "", queries))
    values = op.r[list(some)][:, :, int(key)]
    return not values[:, queries_said].any() and bool((op.e[list(some)][:, :, int(key)][:, queries_said] > 0).all())


def cut(op: Op, bound: str) -> bool:
    x, seen = scores(op)
    x = np.where(seen, x * right_scale(op), -np.inf)
    below = x.max(-1, keepdims=True) - x
    values = op.r.reshape(x.shape)
    return not values[seen & (below > float(bound))].any() and bool((values[seen & (below <= float(bound))] > 0).all())


def window(op: Op, count: str, heads: str | None) -> bool:
    some = list(range(len(op.r))) if not heads else numbers(heads)
    q, k = np.indices(op.r.shape[1:])
    far = q - k >= int(count)
    return not op.r[some][:, far].any() and bool(op.r[some][:, (q >= k) & ~far].all())


def distance(op: Op, values: str) -> bool:
    x, seen = scores(op)
    q, k = np.indices(x.shape[1:])
    y = np.where(seen, x * right_scale(op) + np.array(op.fact.values)[:, None, None] * (q - k), -np.inf)
    p = np.exp(y - y.max(-1, keepdims=True))
    told = np.allclose([float(value) for value in values.split(", ")], op.fact.values, rtol=1e-3, atol=1e-4)
    return told and op.are(p / p.sum(-1, keepdims=True) * op.r.sum(-1, keepdims=True))


def scored(op: Op, k: Array | None = None, heads: Sequence[int] | None = None) -> Array:
    """Scores [head, query, key] of the recorded Q and K, of other rows of K or other heads of it."""
    h = op.file.hyper
    q, own = op.of("Qcur_rope", (-1, h.heads, h.dim)), op.of("Kcur_rope", (-1, h.kv_heads, h.dim))
    k = own if k is None else k
    reads = np.arange(h.heads) // (h.heads // h.kv_heads) if heads is None else np.array(heads)
    return np.einsum("thd,shd->hts", q, k[:, reads])


def key_rows(op: Op) -> Array:
    h = op.file.hyper
    return op.of("Kcur_rope", (-1, h.kv_heads, h.dim))


def rows_late(op: Op, first: str, last: str, where: str, zero: Sequence[int] = ()) -> bool:
    k = key_rows(op)
    rows = np.arange(len(k))
    some = (rows >= int(first)) & (rows <= (len(k) - 1 if last == "on" else int(last.removeprefix("to "))))
    made = scored(op, k[np.where(some, rows + (-1 if where == "before" else 1), rows)])
    made[:, :, list(zero)] = 0.0
    return op.are(made)


def keys_for_keys(op: Op, were: str, instead: str) -> bool:
    k, rows = key_rows(op), np.arange(len(key_rows(op)))
    if "more" in instead:  # the fact has them all
        rows = np.array(op.fact.values)
        named = [int(n) for n in were.split(" and", maxsplit=1)[0].split(", ")]
        return op.are(scored(op, k[rows])) and list(np.flatnonzero(rows != np.arange(len(k)))[:5]) == named
    rows[numbers(were)] = numbers(instead)
    return op.are(scored(op, k[rows]))


def k_heads(op: Op, last: str, read: str, right: str) -> bool:
    return op.are(scored(op, heads=numbers(read))) and np.allclose(scored(op, heads=numbers(right)), scored(op))


def own_row(op: Op) -> bool:
    every = scored(op)
    own = np.einsum("htt->ht", every)
    return op.are(np.broadcast_to(own[..., None], every.shape))


def leaking(op: Op, score: str | None, more: str | None) -> bool:
    """The whole softmax, hidden keys and all."""
    h = op.file.hyper
    x = op.of("kq") / np.sqrt(h.dim)
    n = np.arange(x.shape[-1])
    value, told = op.fact.values[0], float(score or more or 0)
    hidden = value if score else x + value
    x = np.where(n[None] > n[:, None], hidden, x)
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    p = e / e.sum(axis=-1, keepdims=True)
    return bool(np.isclose(told, value, rtol=1e-3) and np.abs(op.r - p).max() <= 1e-5 * p.max())


def mixed(op: Op, p: Array | None = None, v: Array | None = None, reads: Any = None) -> Array:
    """Sums [token, head * dim] of V's rows."""
    p, v = op.of("kq_soft_max") if p is None else p, values_of(op, op.layer) if v is None else v
    group = len(p) // v.shape[1]
    heads = [v[:, h // group if reads is None else reads[h]] for h in range(len(p))]
    return np.concatenate([p[h] @ heads[h] for h in range(len(p))], axis=1)


def values_of(op: Op, layer: int) -> Array:
    v = np.asarray(op.taps[f"Vcur_proj-{layer}"], np.float64)
    return v.reshape(len(v), -1, op.file.hyper.dim)


def v_heads(op: Op, last: str, was: str, right: str) -> bool:
    reads, should = ([int(n) for n in text.split(", ")] for text in (was, right))
    group = op.file.hyper.heads // op.file.hyper.kv_heads
    is_right = should == [h // group for h in range(int(last) + 1)]
    return is_right and len(reads) == op.file.hyper.heads and op.are(mixed(op, reads=reads))


def head_places(op: Op, words: str) -> bool:
    places, p = np.array(op.fact.values), op.of("kq_soft_max")
    told = all(places[int(a)] == int(b) for a, b in re.findall(r"place (\d+) holds head (\d+)", words))
    group = op.file.hyper.heads // op.file.hyper.kv_heads
    return told and op.are(mixed(op, p=p[places], reads=[int(h) // group for h in places]))


def value_lacks(op: Op, words: str, spared: str | None) -> bool:
    p = op.of("kq_soft_max")
    lost = lost_keys(words.replace("the key of the largest weight", "the largest"), p)
    lost = lost & ((p > 0).sum(-1, keepdims=True) > 1) if spared else lost
    return op.are(mixed(op, p=np.where(lost, 0.0, p)))


def not_rescaled(op: Op, size: str, also: str | None) -> bool:
    """The loop itself, key by key."""
    q, k, p = op.of("kq") * op.file.hyper.dim**-0.5, int(size), op.of("kq_soft_max")
    weights = np.zeros(p.shape)
    for h, t in np.ndindex(p.shape[:2]):
        most, total, row = -np.inf, 0.0, q[h, t, : t + 1]
        for start in range(0, t + 1, k):
            block = row[start : start + k]
            new = max(most, float(block.max()))
            total = total * (1.0 if also else np.exp(most - new)) + np.exp(block - new).sum()
            weights[h, t, start : start + k][: len(block)] = np.exp(block - new)
            most = new
        weights[h, t] /= total
    return op.are(mixed(op, p=weights))


def rows_for_rows(op: Op, rows: str, sources: str) -> bool:
    v, was = (values_of(op, op.layer) for _ in range(2))
    v[[int(n) for n in rows.split(", ")]] = was[[int(n) for n in sources.split(", ")]]
    return op.are(mixed(op, v=v))


def other_rows(op: Op, rows: str, layer: str | None) -> bool:
    v = values_of(op, op.layer)
    v[numbers(rows)] = 0.0 if layer is None else values_of(op, int(layer))[numbers(rows)]
    return op.are(mixed(op, v=v))


def kept_rows(op: Op, changed: Callable[[Array], Array]) -> bool:
    """Whether what was computed is that of changed rows of K, or of V."""
    if op.word == "kq":
        return op.are(scored(op, changed(key_rows(op))))
    return op.are(mixed(op, v=changed(values_of(op, op.layer))))


def part_times(op: Op, what: str, places: str, factor: str) -> bool:
    """Heads, channels or rows, each of which is read times a factor."""
    values, axis = op.fact.values, ("row", "head", "channel").index(what)

    def changed(rows: Array) -> Array:
        shape = [1, 1, 1]
        shape[axis] = -1
        there = np.isin(np.arange(rows.shape[axis]), numbers(places)).reshape(shape)
        return np.where(there, values[0], 1.0) * rows

    return bool(np.isclose(float(factor), values[0], rtol=1e-3)) and kept_rows(op, changed)


def narrower(op: Op, count: str, dim: str) -> bool:
    """The first channels of every head alone."""
    channel = np.arange(op.file.hyper.dim)
    return int(dim) == len(channel) and kept_rows(op, lambda rows: np.where(channel < int(count), rows, 0.0))


def page(op: Op, first: str, last: str, other: str) -> bool:
    """Rows that are read in place of others, as far as a query has them."""
    rows = np.arange(len(key_rows(op)))
    rows[int(first) : int(last) + 1] += int(other) - int(first)
    there = (rows < len(rows)) & (rows[None] <= np.arange(len(rows))[:, None])
    rows = np.minimum(rows, len(rows) - 1)
    if op.word == "kq":
        return op.are(np.where(there, scored(op)[:, :, rows], 0.0))
    p = np.where(there, op.of("kq_soft_max"), 0.0)
    return op.are(mixed(op, p=p, v=values_of(op, op.layer)[rows]))


def lag(op: Op, count: str) -> bool:
    """The newest keys of each query have no probability, all others have some."""
    q, k = np.indices(op.r.shape[1:])
    some = list(op.rows or range(len(q)))
    near, far = (k <= q) & (k > q - int(count)), k <= q - int(count)
    return not op.r[:, some][:, near[some]].any() and bool((op.r[:, some][:, far[some]] > 0).all())


def row_beside(op: Op, part: str, where: str) -> bool:
    """A part of the row before or after it that is added to each."""
    factor = op.fact.values[0]

    def changed(rows: Array) -> Array:
        if where == "head before":
            return rows + factor * np.roll(rows, 1, axis=1)
        padded = np.pad(rows, ((1, 1), (0, 0), (0, 0)))
        return rows + factor * (padded[:-2] if where == "row before" else padded[2:])

    return bool(np.isclose(float(part), factor, rtol=1e-3)) and kept_rows(op, changed)


def channel_plus(op: Op, added: str, places: str) -> bool:
    """Numbers that are added to channels of all heads and rows."""
    some = numbers(places)
    told = [float(each) for each in added.split(", ")]
    exact = op.fact.values[len(some) :]
    plus = np.zeros(op.file.hyper.dim)
    plus[some] = exact
    return np.allclose(told, exact, rtol=1e-3) and kept_rows(op, lambda rows: rows + plus)


def whole_rows(op: Op, how: str) -> bool:
    ways = {"to the nearest whole number": np.rint, "to whole numbers, towards zero": np.trunc,
            "down to whole numbers": np.floor}  # fmt: skip
    return kept_rows(op, ways[how])


def limited_rows(op: Op, what: str, limit: str) -> bool:
    """Values that are limited, or zero below a limit."""
    exact = op.fact.values[0]

    def changed(rows: Array) -> Array:
        return np.clip(rows, -exact, exact) if what == "limits" else np.where(abs(rows) < exact, 0.0, rows)

    return bool(np.isclose(float(limit), exact, rtol=1e-3)) and kept_rows(op, changed)


def turned_values(op: Op) -> bool:
    """V rotated pair by pair, by angles told from the metadata."""
    h = op.file.hyper
    v = values_of(op, op.layer)
    theta = np.arange(len(v))[:, None] * h.base ** (-2.0 * np.arange(h.dim // 2) / h.dim)
    c, s, out = np.cos(theta)[:, None], np.sin(theta)[:, None], v.copy()
    first, second = (
        (slice(0, None, 2), slice(1, None, 2)) if h.pairs else (slice(0, h.dim // 2), slice(h.dim // 2, None))
    )
    out[..., first] = v[..., first] * c - v[..., second] * s
    out[..., second] = v[..., second] * c + v[..., first] * s
    return op.are(mixed(op, v=out))


def shifted_values(op: Op, by: str, where: str) -> bool:
    """All but the channels that come from beyond the memory."""
    h, n = op.file.hyper, int(by)
    v = values_of(op, op.layer)
    moved = np.roll(v.reshape(-1), -n if where == "further on" else n).reshape(v.shape)
    mine, theirs = (x.reshape(-1, h.heads, h.dim)[..., n:-n] for x in (mixed(op, v=moved), op.r))
    return bool(np.abs(mine - theirs).max() <= 1e-4 * np.abs(theirs).max())
