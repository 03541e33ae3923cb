"""Mistakes that were put in once the reading back was built, each with the sentence that is read back of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from proof.strangers.arithmetic import bfloat, half, sigmoid, silu
from proof.strangers.engine import Edit, Engine
from proof.unlisted.bugs import (
    ACTIVATED,
    NORM,
    OUT,
    UNLISTED,
    P,
    Q,
    add,
    at,
    frequencies_as,
    gated,
    matrix_as,
    powers,
    probabilities_as,
    root,
    squared,
    sums_as,
)  # fmt: skip

Array = np.ndarray
HEADS = np.array([0.5, 0.25, 0.125, 0.0625])[:, None, None]


def share(e: Array) -> Array:
    return e / e.sum(axis=-1, keepdims=True)


def without_first(e: Engine, right: Edit, x: Array, stem: str) -> Array:
    """The first token's K is not normalised."""
    y = right(x, stem)
    return np.where((np.arange(len(y)) == 0)[:, None, None], x, y) if stem == "attn_k_norm" else y


def k_late(e: Engine, right: Edit, x: Array, side: str) -> Array:
    late = np.maximum(e.positions - 1, 0)
    return e.turned(x, *e.angles(late), e.in_pairs) if side == "K" else right(x, side)


def times_row(factor: float) -> dict[str, Edit]:
    """V's row 6 is multiplied as it is read."""
    return {
        "read_values": lambda e, right, v: right(
            np.where((np.arange(len(v)) == 6)[:, None, None], v * v.dtype.type(factor), v)
        )
    }


def far(x: Array, hidden: Array, scale: float) -> Array:
    n = np.arange(x.shape[-1])
    return share(powers(x * scale - HEADS * (n[:, None] - n[None]), hidden))


def padded(x: Array, hidden: Array, scale: float) -> Array:
    """Four slots more, with a score of 0."""
    e = np.where(hidden, 0, np.exp(x * scale))
    return e / (e.sum(axis=-1, keepdims=True) + 4)


def clipped(e: Engine, right: Edit, x: Array, w: Array) -> Array:
    """The output projection's input is cut off at a half."""
    is_output = f"kqv_out-{e.layer}" in e.seen and f"attn_out-{e.layer}" not in e.seen
    return right(np.clip(x, -0.5, 0.5) if is_output else x, w)


add(
    "mean magnitude",
    NORM,
    "each row is divided by its mean magnitude plus 1e-05, where its root mean square is right",
    root(lambda x, eps: np.abs(x).mean(axis=-1, keepdims=True) + eps),
)
add(
    "every second channel",
    NORM,
    "its mean square is of one channel in 2 alone, from channel 0 on",
    root(lambda x, eps: np.sqrt(squared(x[..., ::2]) + eps)),
)
add(
    "the first row's size for all",
    NORM,
    "all rows are divided by one number, 0.05781, which is right in row 0",
    root(lambda x, eps: np.sqrt(squared(x) + eps)[:1]),
)
add(
    "K's norm left out at the first token",
    "Kcur_normed-0",
    "is left out: its input comes out as it is, for token 0 alone",
    {"norm": without_first},
    model="qwen3",
)
add(
    "angles in float16",
    Q,
    "its angles are rounded to float16",
    {"theta": lambda e, right, p: half(right(p).astype(np.float32)).astype(float)},
)
add(
    "half steps",
    Q,
    "the rows are rotated by the positions 0 to 8, then 8.5, then 9, then 9.5",
    at(lambda p: np.where(p >= 8, 8 + (p - 8) / 2, p)),
)
add(
    "last pair not turned",
    Q,
    "the frequency of pair 31 is 0 times what it should be",
    frequencies_as(lambda f: np.where(np.arange(len(f)) < 31, f, 0)),
)
add(
    "K a position late",
    "Kcur_rope-0",
    "rotates by the position - 1; positions count from 0, from token 1 on alone",
    {"rotated": k_late},
)
add(
    "ALiBi",
    P,
    "to scores is added the distance from key to query times -0.5, -0.25, -0.125, -0.0625 in heads 0 to 3",
    probabilities_as(far),
)
add("four slots more", P, "its sum counts 4 more with a score of 0", probabilities_as(padded))
add(
    "heads swapped",
    OUT,
    "its heads are in another order: place 0 holds head 1, place 1 holds head 0",
    {"merged": lambda e, right, x: right(x[[1, 0, 2, 3]])},
)
add("a row of V doubled", OUT, "it reads V's row 6 times 2", times_row(2))
add("a key's value lost", OUT, "the value of key 6 is not added", times_row(0))
add(
    "hard swish",
    ACTIVATED,
    "it is gate * clip(gate / 6 + 1/2, 0, 1) * up, where silu(gate) * up is right",
    gated(lambda g, u: g * np.clip(g / 6 + 0.5, 0, 1) * u),
)
add(
    "a steeper SiLU",
    ACTIVATED,
    "it is gate * sigmoid(1.1 * gate) * up, where the slope 1 is right",
    gated(lambda g, u: g * sigmoid(1.1 * g) * u),
)
add(
    "up and a half",
    ACTIVATED,
    "it is silu(ffn_gate-0) * (up + 0.5), where up alone is right",
    gated(lambda g, u: silu(g) * (u + 0.5)),
)
add("up clamped", ACTIVATED, "its up is cut off beyond 1.5", gated(lambda g, u: silu(g) * np.clip(u, -1.5, 1.5)))
add(
    "branch by 1.5 in half of the channels",
    "ffn_inp-0",
    "in channels 128 to 255 it is 1.5 attn_out-0 + embd, where attn_out-0 + embd is right",
    sums_as("ffn_inp", lambda e, b, r: r + np.where(np.arange(256) < 128, b, b * b.dtype.type(1.5))),
)
add(
    "half a row of the next id",
    "embd",
    "in channels 128 to 255 it looks up row 2 for id 1, row 18 for id 17, row 6 for id 5, row 81 for id 80, row 43 for "
    "id 42 and 6 more",
    {"embed": lambda e, right, t: np.concatenate([right(t)[:, :128], right(t + 1)[:, 128:]], axis=1)},
)
add(
    "an expert never chosen",
    "ffn_moe_topk-0",
    "it never chooses expert 3",
    {"choice": lambda e, right, p, n: right(np.where(np.arange(p.shape[1]) == 3, -1, p), n)},
    model="moe",
)
add(
    "the last expert not in the sum",
    "ffn_moe_probs-0",
    "its sum leaves out the last expert",
    {"router_probs": lambda e, right, x: np.exp(x) / np.exp(x)[:, :-1].sum(axis=-1, keepdims=True)},
    model="moe",
)
add(
    "second expert twice",
    "ffn_out-0",
    "the chosen experts count 1, 2 times as much as their weights",
    {"weighted": lambda e, right, down, w: right(down, w * np.array([1, 2], w.dtype))},
    model="moe",
)
add("input clipped", "attn_out-0", "its inputs are cut off beyond 0.5", {"multiplied": clipped})
add(
    "a block of inputs skipped",
    "Qcur_proj-0",
    "its sums leave out inputs 64 to 95",
    matrix_as("attn_q", lambda e, w: np.where((np.arange(256) >= 64) & (np.arange(256) < 96), w.dtype.type(0), w)),
)
add(
    "columns rolled",
    "attn_out-0",
    "its inputs are in another order: the inputs are rolled: each is 1 place earlier",
    matrix_as("attn_output", lambda e, w: np.roll(w, 1, axis=1)),
)
add(
    "K's rows in V",
    "Vcur_proj-0",
    "in channels 64 to 127 it multiplies by rows 64 to 127 of blk.0.attn_k.weight",
    matrix_as("attn_v", lambda e, w: np.concatenate([w[:64], e.file[f"blk.{e.layer}.attn_k.weight"][64:]])),
)
add(
    "a share twice",
    "ffn_up-0",
    "channels 128 to 191 are 2 times what they should be",
    ffn_up=lambda e, x: np.where((np.arange(512) >= 128) & (np.arange(512) < 192), 2 * x, x),
)
add(
    "a share of the last tokens lost",
    "ffn_up-0",
    "channels 256 to 511 are all zero in tokens 8 to 11",
    ffn_up=lambda e, x: np.where((np.arange(512) >= 256) & (np.arange(len(x)) >= 8)[:, None], x.dtype.type(0), x),
)


def in_steps_of(size: float) -> dict[str, Edit]:
    return {"theta": lambda e, right, p: np.round(right(p) / size) * size}


def cut_to_bfloat16(w: Array) -> Array:
    bits = np.ascontiguousarray(w, np.float32).view(np.uint32)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


def inputs_times(first: int, last: int, factor: Any) -> Edit:
    """Some inputs' weights multiplied, [out, 1] or all by one factor."""
    here = (np.arange(256) >= first) & (np.arange(256) <= last)
    return lambda e, w: (w * np.where(here, factor, 1.0)).astype(w.dtype)


def turned(e: Engine, right: Edit, v: Array) -> Array:
    """V's rows rotated by their positions."""
    return right(e.turned(v, *e.angles(np.arange(len(v))), e.in_pairs))


def newest(e: Engine, right: Edit, q: Array, keys: Array) -> Array:
    """Every row of the cache is the one that was put into it last, token by token."""
    own = np.einsum("hts,ts->ht", right(q, keys), np.eye(len(q), dtype=q.dtype))
    return np.broadcast_to(own[..., None], (*own.shape, len(keys)))


def half_of(x: Array) -> Array:
    return half(x.astype(np.float32)).astype(np.float64)


def leaking(e: Engine, right: Edit, scores: Array) -> Array:
    """10 is taken off hidden scores."""
    x = scores * scores.dtype.type(e.softmax_scale())
    n = np.arange(scores.shape[-1])
    return np.where(n[None] > n[:, None], x - 10, x)


EVEN = np.where(np.arange(128) % 2, 2.0, 0.5)[:, None]
KQ = "kq-0"
add(
    "squares by one less",
    NORM,
    "its sum of squares is divided by 255, where 256 is right",
    root(lambda x, eps: np.sqrt((x * x).sum(axis=-1, keepdims=True) / 255 + eps)),
)
add(
    "root in float16",
    NORM,
    "each row's root mean square is rounded to float16",
    root(lambda x, eps: half_of(np.sqrt(squared(x) + eps))),
)
add(
    "mean square in bfloat16",
    NORM,
    "each row's mean square is rounded to bfloat16",
    root(lambda x, eps: np.sqrt(bfloat(squared(x).astype(np.float32)).astype(np.float64) + eps)),
)
add("angles in steps", Q, "its angles are rounded to multiples of 1/64", in_steps_of(1 / 64))
add(
    "weights cut to bfloat16",
    "ffn_gate-0",
    "its weights are cut off to bfloat16",
    matrix_as("ffn_gate", lambda e, w: cut_to_bfloat16(w)),
)
add(
    "a block of inputs by another scale",
    "Kcur_proj-0",
    "the weights of inputs 32 to 63 count 1.25 times",
    matrix_as("attn_k", inputs_times(32, 63, 1.25)),
)
add(
    "a block of inputs by the next one's scales",
    "Kcur_proj-0",
    "the weights of inputs 224 to 255 have another scale in each output, from 0.5 to 2 times",
    matrix_as("attn_k", inputs_times(224, 255, EVEN)),
)
add(
    "K a row late from the fifth on",
    KQ,
    "from key 4 on a score reads K's row of the token before",
    {"read_keys": lambda e, right, k: np.concatenate([right(k)[:4], right(k)[3:-1]])},
)
add(
    "K's last row for all",
    KQ,
    "in place of K's rows 0 to 10 it reads row 11",
    {"read_keys": lambda e, right, k: np.broadcast_to(right(k)[-1:], k.shape)},
)
add("K's newest row for all", KQ, "every score of a query reads K's row of that query's own token", {"scores": newest})
add(
    "K's rows 5 and 7 exchanged",
    KQ,
    "in place of K's rows 5, 7 it reads rows 7, 5",
    {"read_keys": lambda e, right, k: right(k)[[0, 1, 2, 3, 4, 7, 6, 5, 8, 9, 10, 11]]},
)
add(
    "last head reads the first K head",
    KQ,
    "heads 0 to 3 read the K heads 0, 0, 1, 0, where 0, 0, 1, 1 are right",
    {"key_heads": lambda e, right: np.array([0, 0, 1, 0])},
)
add(
    "outputs add up",
    OUT,
    "each token's output is added to those of all tokens before it",
    {"merged": lambda e, right, x: np.cumsum(right(x), axis=0, dtype=x.dtype)},
)
add(
    "V turned as it is read",
    OUT,
    "the rows of V that it reads are rotated by their positions, as K's are",
    {"read_values": turned},
)
add(
    "V a value on",
    OUT,
    "V is read from 1 value further on in memory",
    {"read_values": lambda e, right, v: np.append(right(v).reshape(-1)[1:], v.dtype.type(0)).reshape(v.shape)},
)
add(
    "hidden keys have a score",
    P,
    "keys after a query are not hidden: they have the score -10",
    {"floor": lambda e, right: -10.0},
)
add(
    "hidden keys are lowered",
    P,
    "keys after a query are not hidden: they have -10 added to their scores",
    {"masked": leaking},
)
MISTAKES = tuple(UNLISTED.values())
