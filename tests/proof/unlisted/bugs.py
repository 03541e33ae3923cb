"""Forty mistakes that no known bug describes, each with the sentence that is read back of it.

The engine is the stranger's (proof/strangers), which shares no code with what looks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from proof.strangers.arithmetic import half, sigmoid, silu
from proof.strangers.engine import Bug, Edit, Engine

Array = np.ndarray
TOKENS = (1, 17, 5, 80, 42, 9, 33, 64, 5, 2, 71, 28)


@dataclass(frozen=True)
class Unlisted:
    """A mistake: the first tap that it falsifies, and what is said of that."""

    name: str
    tap: str
    sentence: str
    bug: Bug
    model: str = "llama"
    kind: str = "F16"


UNLISTED: dict[str, Unlisted] = {}


def add(
    name: str, tap: str, sentence: str, edits: Mapping[str, Edit] | None = None, *,
    model: str = "llama", kind: str = "F16", **faults: Edit,
) -> None:  # fmt: skip
    """A mistake by its name: ops as it has them, or values that pass taps."""
    UNLISTED[name] = Unlisted(name, tap, sentence, Bug(name, edits or {}, faults), model, kind)


def wide(x: Array) -> Array:
    return x.astype(np.float64)


# -- norms ---------------------------------------------------------------------------------------------------------


def root(formula: Callable[[Array, float], Array]) -> dict[str, Edit]:
    """Norms that divide by formula(values in float64, epsilon)."""
    return {"root": lambda e, right, x: formula(wide(x), e.epsilon())}


def squared(x: Array) -> Array:
    return np.mean(x * x, axis=-1, keepdims=True)


def weight_as(change: Callable[[Array], Array]) -> dict[str, Edit]:
    return {"weighed": lambda e, right, y, weight, bias: right(y, change(weight), bias)}


def ones_from(weight: Array, start: int) -> Array:
    return np.where(np.arange(len(weight)) < start, weight, weight.dtype.type(1))


NORM = "attn_norm-0"
add(
    "mean square clamped from below",
    NORM,
    "each row's mean square counts as at least 0.004",
    root(lambda x, eps: np.sqrt(np.maximum(squared(x), 0.004))),
)
add(
    "squares without the last 4",
    NORM,
    "its mean square is of channels 0 to 251 alone, divided by 256",
    root(lambda x, eps: np.sqrt((x[..., :-4] ** 2).sum(-1, keepdims=True) / x.shape[-1] + eps)),
)
add(
    "another power",
    NORM,
    "each row is divided by its mean square to the power 0.4, where 0.5 is right",
    root(lambda x, eps: (squared(x) + eps) ** 0.4),
)
add(
    "normalised twice",
    NORM,
    "it is applied twice, weight and all",
    {"norm": lambda e, right, x, stem: right(right(x, stem), stem)},
)
add("weight plus a half", NORM, "its weight is the file's plus 0.5", weight_as(lambda w: w + w.dtype.type(0.5)))
add(
    "weight of the first channels only",
    NORM,
    "its weight is 1 in channels 192 to 255",
    weight_as(lambda w: ones_from(w, 192)),
)
add(
    "weight a channel late",
    NORM,
    "its weight is in another order: the channels are rolled: each is 1 place later",
    weight_as(lambda w: np.roll(w, 1)),
)


# -- RoPE ----------------------------------------------------------------------------------------------------------


def at(change: Callable[[Array], Array]) -> dict[str, Edit]:
    """Other positions."""
    return {"theta": lambda e, right, p: right(change(p))}


def frequencies_as(change: Callable[[Array], Array]) -> dict[str, Edit]:
    return {"frequencies": lambda e, right: change(right())}


def last_head_ahead(e: Engine, right: Edit, x: Array, side: str) -> Array:
    """The last head of each side is one position ahead."""
    out = right(x, side)
    out[:, -1] = e.turned(x, *e.angles(e.positions + 1), e.in_pairs)[:, -1]
    return out


def in_place(e: Engine, right: Edit, x: Array, cos: Array, sin: Array, in_pairs: bool) -> Array:
    """The second value of a pair is made of the first one's new value."""
    out, c, s = right(x, cos, sin, in_pairs), cos[:, None], sin[:, None]
    first, second = (slice(0, None, 2), slice(1, None, 2)) if in_pairs else (slice(0, 32), slice(32, 64))
    out[..., second] = x[..., second] * c + out[..., first] * s
    return out


def longer(e: Engine, right: Edit, x: Array, cos: Array, sin: Array, in_pairs: bool) -> Array:
    """Pairs 16 and up come out longer."""
    size = np.where(np.arange(cos.shape[-1]) < 16, 1.0, 1.1).astype(cos.dtype)
    return right(x, cos * size, sin * size, in_pairs)


Q = "Qcur_rope-0"
add("positions modulo 8", Q, "the rows are rotated by the positions 0 to 7, then 0 to 3", at(lambda p: p % 8))
add(
    "a table of 8 positions, its last for the rest",
    Q,
    "the rows are rotated by the positions 0 to 7, then 4 times 7",
    at(lambda p: np.minimum(p, 7)),
)
add(
    "each pair by the next one's frequency",
    Q,
    "by their frequencies the pairs are rolled: each is 1 place earlier",
    frequencies_as(lambda f: np.roll(f, -1)),
)
add(
    "slow pairs slowed by 4",
    Q,
    "the frequencies of pairs 16 to 31 are 0.25 times what they should be",
    frequencies_as(lambda f: np.where(np.arange(len(f)) < 16, f, f / 4)),
)
add("frequencies in float16", Q, "its frequencies are rounded to float16", frequencies_as(half))
add(
    "last head one position ahead",
    Q,
    "the rows of head 3 are rotated by the positions 1 to 12",
    {"rotated": last_head_ahead},
)
add("rotated in place", Q, "the second value of each pair is made of the other one's new value", {"turned": in_place})
add(
    "slow pairs longer",
    Q,
    "pairs 16 to 31 come out 1.1 times as long as they should",
    {"turned": longer},
    model="qwen3",
)


# -- softmax -------------------------------------------------------------------------------------------------------


def probabilities_as(change: Callable[[Array, Array, float], Array]) -> dict[str, Edit]:
    """Probabilities change(raw scores in float64, hidden keys, scale)."""

    def probabilities(e: Engine, right: Edit, scores: Array) -> Array:
        hidden = e.hidden(e.positions[:, None], np.arange(scores.shape[-1])[None, :])
        return np.asarray(change(wide(scores), hidden, e.softmax_scale()), scores.dtype)

    return {"probabilities": probabilities}


def powers(x: Array, hidden: Array) -> Array:
    return np.where(hidden, 0, np.exp(x - np.where(hidden, -np.inf, x).max(axis=-1, keepdims=True)))


def by_head(x: Array, hidden: Array, scale: float) -> Array:
    """Each head has a temperature of its own."""
    e = powers(x * scale / np.array([1.0, 1.25, 1.5, 2.0])[:, None, None], hidden)
    return e / e.sum(axis=-1, keepdims=True)


def without_own_key(x: Array, hidden: Array, scale: float) -> Array:
    """The sum's loop ends one key early, but for the first query's."""
    e, n = powers(x * scale, hidden), x.shape[-1]
    own = np.eye(n, dtype=bool) & (np.arange(n) > 0)[:, None]
    return e / np.where(own, 0, e).sum(axis=-1, keepdims=True)


def with_one(x: Array, hidden: Array, scale: float) -> Array:
    """The sum begins at one."""
    e = powers(x * scale, hidden)
    return e / (1 + e.sum(axis=-1, keepdims=True))


def without_key_3(x: Array, hidden: Array, scale: float) -> Array:
    """A slot of the cache is taken for empty."""
    n = np.arange(x.shape[-1])
    e = powers(x * scale, hidden | ((n == 3)[None, :] & (n > 3)[:, None]))
    return e / e.sum(axis=-1, keepdims=True)


def cut_at_2(x: Array, hidden: Array, scale: float) -> Array:
    """Powers of less than -2 are taken for zero."""
    e = powers(x * scale, hidden)
    e = np.where(e < np.exp(-2.0), 0, e)
    return e / e.sum(axis=-1, keepdims=True)


P = "kq_soft_max-0"
add(
    "a temperature for each head",
    P,
    "scores are multiplied by 0.125, 0.1, 0.08333, 0.0625 in heads 0 to 3, where 0.125 is right",
    probabilities_as(by_head),
)
add(
    "own key not in the sum",
    P,
    "its sum leaves out each query's own key, where there is another key",
    probabilities_as(without_own_key),
)
add("one in the sum", P, "its sum is 1 too large, where the largest term is 1", probabilities_as(with_one))
add("key 3 unseen", P, "key 3 is not seen by queries 4 to 11", probabilities_as(without_key_3))
add(
    "small powers cut",
    P,
    "keys whose scaled score is more than 2 below the row's largest get nothing",
    probabilities_as(cut_at_2),
)


# -- attention's output --------------------------------------------------------------------------------------------


def weights_as(change: Callable[[Array], Array]) -> dict[str, Edit]:
    return {"mixed": lambda e, right, p, values: right(change(p), values)}


def without_last(p: Array) -> Array:
    """A query's last key, its own, is not added; the first one has no other."""
    own = np.eye(p.shape[-1], dtype=bool) & (np.arange(p.shape[-1]) > 0)[:, None]
    return np.where(own, 0, p).astype(p.dtype)


def stale_row(e: Engine, right: Edit, values: Array) -> Array:
    """Row 5 is still that of token 4."""
    return right(values[np.where(np.arange(len(values)) == 5, 4, np.arange(len(values)))])


def overlapping(e: Engine, right: Edit, values: Array) -> Array:
    """Layer 1's first rows lie where layer 0's last ones are."""
    rows = values.copy()
    if e.layer == 1:
        rows[:4] = e.by_token(e.caches["v", 0])[:4]
    return right(rows)


def not_rescaled(e: Engine, right: Edit, scores: Array) -> Array:
    """The sum of values is not rescaled where the maximum of blocks of 4 keys grows: as weights of the values."""
    x = e.masked(scores).astype(np.float64)
    most = np.maximum.accumulate(x, axis=-1)[..., np.minimum(np.arange(x.shape[-1]) // 4 * 4 + 3, x.shape[-1] - 1)]
    e_kept = np.where(np.isneginf(x), 0, np.exp(x - most))
    total = np.exp(x - x.max(axis=-1, keepdims=True)).sum(axis=-1, keepdims=True)
    return np.asarray(e_kept / total, scores.dtype)


def online(e: Engine, right: Edit, q: Array, keys: Array, values: Array) -> Array:
    scores = e.tap("kq", e.scores(q, e.read_keys(keys)))
    e.tap("kq_soft_max", e.probabilities(scores))
    return e.merged(e.mixed(not_rescaled(e, right, scores), e.read_values(values)))


OUT = "kqv_out-0"
add(
    "heads of V mixed up",
    OUT,
    "heads 0 to 3 read the V heads 0, 1, 1, 1, where 0, 0, 1, 1 are right",
    {"value_heads": lambda e, right: np.array([0, 1, 1, 1])},
)
add(
    "last key's value not added",
    OUT,
    "the value of each query's own key is not added, where there is another key",
    weights_as(without_last),
)
add("a row of V stale", OUT, "in place of V's row 5 it reads row 4", {"read_values": stale_row})
add(
    "rows of V of another layer",
    "kqv_out-1",
    "in place of V's rows 0 to 3 it reads layer 0's",
    {"read_values": overlapping},
)
add(
    "online softmax not rescaled",
    OUT,
    "what was summed is not rescaled where the largest score grows, from one block of 4 keys to the next",
    {"attention": online},
)


# -- activation, sums, lookup --------------------------------------------------------------------------------------


def gated(function: Callable[[Array, Array], Array]) -> dict[str, Edit]:
    """The FFN's activation in float64."""
    return {"gated": lambda e, right, gate, up: np.asarray(function(wide(gate), wide(up)), gate.dtype)}


def sums_as(word: str, change: Callable[[Engine, Array, Array], Array]) -> dict[str, Edit]:
    """The residual connection after attention or after the FFN: change(engine, branch, residual)."""

    def added(e: Engine, right: Edit, branch: Array, residual: Array) -> Array:
        after_ffn = f"ffn_inp-{e.layer}" in e.seen
        return change(e, branch, residual) if after_ffn == (word == "l_out") else right(branch, residual)

    return {"add": added}


def first_192(e: Engine, branch: Array, residual: Array) -> Array:
    """The loop of the addition leaves out its remainder."""
    return np.where(np.arange(branch.shape[-1]) < 192, branch + residual, residual)


ACTIVATED = "ffn_swiglu-0"
add(
    "sigmoid of a table that ends at -2",
    ACTIVATED,
    "where ffn_gate-0 <= -2.003, silu(ffn_gate-0) is another function, off by up to 0.41",
    gated(lambda g, u: g * sigmoid(np.maximum(g, -2.0)) * u),
)
add(
    "SiLU of the magnitude",
    ACTIVATED,
    "where ffn_gate-0 <= -0.001027, it is silu(-gate) * up",
    gated(lambda g, u: silu(np.abs(g)) * u),
)
add("gate clamped", ACTIVATED, "its gate is cut off above 1.5", gated(lambda g, u: silu(np.minimum(g, 1.5)) * u))
add(
    "residual a token late",
    "ffn_inp-0",
    "from token 1 on it is attn_out-0 + embd[t-1], where attn_out-0 + embd is right",
    sums_as("ffn_inp", lambda e, b, r: b + r[np.maximum(np.arange(len(r)) - 1, 0)]),
)
add(
    "remainder not added",
    "l_out-0",
    "in channels 192 to 255 it is ffn_inp-0, where ffn_out-0 + ffn_inp-0 is right",
    sums_as("l_out", first_192),
)
add(
    "a third term",
    "l_out-0",
    "it is ffn_out-0 + ffn_inp-0 + 0.5 ffn_norm-0, where ffn_out-0 + ffn_inp-0 is right",
    sums_as("l_out", lambda e, b, r: b + r + np.float32(0.5) * e.here("ffn_norm")),
)
add(
    "ids modulo 64",
    "embd",
    "it looks up row 16 for id 80, row 0 for id 64, row 7 for id 71",
    {"embed": lambda e, right, t: right(t % 64)},
)


# -- the router ----------------------------------------------------------------------------------------------------

add(
    "first and third expert",
    "ffn_moe_topk-0",
    "it chooses the experts of ranks 1 and 3, where 1 and 2 are right",
    {"choice": lambda e, right, p, n: np.argsort(-p, axis=-1, kind="stable")[:, [0, 2]]},
    model="moe",
)
add(
    "weights by their sum and a half",
    "ffn_moe_weights_norm-0",
    "weights are divided by their sum plus 0.5",
    {"summing_to_one": lambda e, right, w: w / (w.sum(axis=-1, keepdims=True) + w.dtype.type(0.5))},
    model="moe",
)


# -- products ------------------------------------------------------------------------------------------------------


def matrix_as(stem: str, change: Callable[[Engine, Array], Array]) -> dict[str, Edit]:
    """Another matrix in the place of one."""
    return {"matrix": lambda e, right, name: change(e, right(name)) if name == stem else right(name)}


def zero_columns(w: Array) -> Array:
    """Eight at a time, and the remainder is forgotten: the last of 256 inputs."""
    return np.where(np.arange(w.shape[1]) < 248, w, w.dtype.type(0))


def in_tiles(w: Array, size: int = 64) -> Array:
    """Each tile transposed in its place."""
    tiles = w.reshape(w.shape[0] // size, size, w.shape[1] // size, size)
    return tiles.transpose(0, 3, 2, 1).reshape(w.shape)


def by_8_heads(w: Array) -> Array:
    """Rows put from pairs into halves as if there were 8 heads."""
    return w.reshape(8, -1, 2, w.shape[-1]).swapaxes(1, 2).reshape(w.shape)


def blocks_in_halves(w: Array) -> Array:
    """The two halves of each block of 32 change places."""
    return w.reshape(len(w), -1, 2, 16)[:, :, ::-1].reshape(w.shape)


add(
    "last of a thread's share",
    "ffn_up-0",
    "channels 509 to 511 are all zero",
    ffn_up=lambda e, x: np.where(np.arange(x.shape[-1]) < 509, x, x.dtype.type(0)),
)
add(
    "inputs left over",
    "Vcur_proj-0",
    "its sums leave out inputs 248 to 255",
    matrix_as("attn_v", lambda e, w: zero_columns(w)),
)
add(
    "K of Q's rows",
    "Kcur_proj-0",
    "it multiplies by rows 64 to 191 of blk.0.attn_q.weight",
    matrix_as("attn_k", lambda e, w: e.file[f"blk.{e.layer}.attn_q.weight"][64:192]),
)
add(
    "tiles transposed",
    "attn_out-0",
    "blk.0.attn_output.weight is transposed in tiles of 64",
    matrix_as("attn_output", lambda e, w: in_tiles(w)),
)
add(
    "K permuted as 8 heads",
    "Kcur_proj-0",
    "each head's channels are in halves (i, i+8) where pairs (2i, 2i+1) are right, by 8 heads of 16 where the model "
    "has 2",
    matrix_as("attn_k", lambda e, w: by_8_heads(w)),
)
add(
    "halves of blocks swapped",
    "ffn_out-0",
    "its inputs are in another order: of each block of 32, 16 to 31, 0 to 15",
    matrix_as("ffn_down", lambda e, w: blocks_in_halves(w)),
    kind="Q8_0",
)
