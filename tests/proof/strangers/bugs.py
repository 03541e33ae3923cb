"""Every known mistake as an edit of the stranger's engine, by the name of its injection (tests/proof/injected).

An edit is called with the engine, the right op and the op's arguments. ``needs`` are places that not every arithmetic
has: an engine that never keeps scores cannot take the softmax over the wrong axis, and where the scale is folded into
Q, a scale that is missing is missing in another op.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from proof.strangers.arithmetic import half, sigmoid, silu
from proof.strangers.engine import Bug, Edit, Engine

Array = np.ndarray
SCALE, SCORES, NORM_WEIGHTS, OWN_PAIRS = "scale", "scores", "norm weights", "own pairs"
LEGAL = {"scale in the scores": "scale in scores"}  # injections that are a layout: name -> arithmetic

BUGS: dict[str, Bug] = {}


def add(name: str, edits: Mapping[str, Edit] | None = None, *needs: str, **faults: Edit) -> None:
    """A bug by its name: ops as it has them, or values that pass taps."""
    BUGS[name] = Bug(name, edits or {}, faults, frozenset(needs))


def at(words: Iterable[str], fault: Edit) -> dict[str, Edit]:
    return dict.fromkeys(words, fault)


def wide(function: Callable[..., Array], *arrays: Array) -> Array:
    """A function in float64."""
    return np.asarray(function(*(array.astype(np.float64) for array in arrays)), arrays[0].dtype)


def to_halves(x: Array) -> Array:
    """Values of each head [..., dim] from (2i, 2i+1) to (i, i + dim / 2)."""
    return np.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)


def to_pairs(x: Array) -> Array:
    out = np.empty_like(x)
    out[..., 0::2], out[..., 1::2] = np.split(x, 2, axis=-1)
    return out


# -- the embedding -------------------------------------------------------------------------------------------------


def rows_of(choose: Callable[[Array, int], Array]) -> dict[str, Edit]:
    return {"embed": lambda e, right, tokens: right(choose(tokens, len(e.file["token_embd.weight"])))}


def table_of(e: Engine, tensor: Array, tokens: Array) -> Array:
    return e.a.weights(tensor.astype(e.a.dtype))[tokens]


add("embedding: next row", rows_of(lambda t, n: (t + 1) % n))
add("embedding: row before", rows_of(lambda t, n: (t - 1) % n))
add("embedding: three added tokens", rows_of(lambda t, n: (t + 3) % n))
add("embedding: row 0 for all", rows_of(lambda t, n: t * 0))
add("embedding: first token for all", rows_of(lambda t, n: t * 0 + t[0]))
add("embedding: last token for all", rows_of(lambda t, n: t * 0 + t[-1]))
add("embedding: head's rows", {"embed": lambda e, right, t: table_of(e, e.file["output.weight"], t)})
add("embedding: transposed", {"embed": lambda e, right, t: table_of(
    e, e.file["token_embd.weight"].reshape(e.h.embd, -1).T, t)})  # fmt: skip
add("embedding: times sqrt(d)", embd=lambda e, x: x * math.sqrt(e.h.embd))
add("embedding: times 12", embd=lambda e, x: x * 12)
add("embedding: divided by sqrt(d)", embd=lambda e, x: x / math.sqrt(e.h.embd))
add("embedding: times 0.22", embd=lambda e, x: x * 0.22)
add("embedding: negated", embd=lambda e, x: -x)


# -- norms ---------------------------------------------------------------------------------------------------------


def mean_square(x: Array) -> Array:
    return np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True)


def root(formula: Callable[[Array, float, int], Array]) -> dict[str, Edit]:
    """Norms that divide by formula(mean square, epsilon, channels)."""
    return {"root": lambda e, right, x: formula(mean_square(x), e.epsilon(), x.shape[-1])}


def half_sum(square: Array, eps: float, n: int) -> Array:
    return np.sqrt(half(square * n) / n + eps)


def weight_as(change: Callable[[Array], Array]) -> dict[str, Edit]:
    return {"weighed": lambda e, right, y, weight, bias: right(y, change(weight), bias)}


def in_other_layer(e: Engine, right: Edit, *arguments: Any) -> Any:
    """What an op gives in the other of two layers."""
    e.layer = 1 - e.layer
    try:
        return right(*arguments)
    finally:
        e.layer = 1 - e.layer


def norms_renamed(change: Callable[[str], str], *ops: str) -> dict[str, Edit]:
    """Norms by the weight, and the bias, of another one."""

    def renamed(e: Engine, right: Edit, stem: str) -> Any:
        return right(change(stem) if stem.endswith("norm") else stem)

    return dict.fromkeys(ops or ("norm_weight", "bias"), renamed)


def swapping(one: str, other: str) -> Callable[[str], str]:
    return lambda stem: {one: other, other: one}.get(stem, stem)


def norms_of_other_layer(e: Engine, right: Edit, stem: str) -> Any:
    other = stem.endswith("norm") and stem != "output_norm"
    return in_other_layer(e, right, stem) if other else right(stem)


def left_out(*stems: str) -> dict[str, Edit]:
    return {"norm": lambda e, right, x, stem: x if stem in stems else right(x, stem)}


def projected(e: Engine, side: str) -> Array:
    """Q or K heads as they are before RoPE."""
    word = f"{side}cur_normed" if f"{side}cur_normed-{e.layer}" in e.seen else f"{side}cur_proj"
    return e.here(word).reshape(len(e.positions), -1, e.h.dim)


def plain_heads(e: Engine, side: str) -> Array:
    return e.here(f"{side}cur_proj").reshape(len(e.positions), -1, e.h.dim)


def norm_after_rope(e: Engine, right: Edit, x: Array, stem: str) -> Array:
    sides = {"attn_q_norm": "Q", "attn_k_norm": "K"}
    return right(e.rotated(x, sides[stem]), stem) if stem in sides else right(x, stem)


def over_all_heads(e: Engine, right: Edit, x: Array) -> Array:
    if x.ndim < 3:
        return right(x)
    return np.sqrt(mean_square(x).mean(axis=1, keepdims=True) + e.epsilon())


QK_NORMS = ("attn_q_norm", "attn_k_norm")
add("norm: epsilon times 10", {"epsilon": lambda e, right: right() * 10})
add("norm: epsilon 1e-6 for 1e-5", {"epsilon": lambda e, right: 1e-6})
add("norm: epsilon 1e-8 for 1e-6", {"epsilon": lambda e, right: 1e-8})
add("norm: epsilon outside the root", root(lambda square, eps, n: np.sqrt(square) + eps))
add("norm: no epsilon", {"epsilon": lambda e, right: 0.0})
add("norm: no weight", weight_as(np.ones_like), NORM_WEIGHTS)
add("norm: weight twice", weight_as(lambda w: w * w), NORM_WEIGHTS)
add("norm: weight plus one", weight_as(lambda w: w + 1), NORM_WEIGHTS)
add("norm: weight minus one", weight_as(lambda w: w - 1), NORM_WEIGHTS)
add("norm: attention's and FFN's weights swapped", norms_renamed(swapping("attn_norm", "ffn_norm")), NORM_WEIGHTS)
add(
    "norm: attention's weight for the FFN's, with its bias right",
    norms_renamed(lambda stem: "attn_norm" if stem == "ffn_norm" else stem, "norm_weight"),
    NORM_WEIGHTS,
)
add("norm: next layer's weight", dict.fromkeys(("norm_weight", "bias"), norms_of_other_layer), NORM_WEIGHTS)
add(
    "norm: last layer's weight for the final norm",
    norms_renamed(lambda stem: "ffn_norm" if stem == "output_norm" else stem),
    NORM_WEIGHTS,
)
add("norm: Q's and K's weights swapped", norms_renamed(swapping(*QK_NORMS)))
add("norm: LayerNorm for RMSNorm", {"centred": lambda e, right, x: x - x.mean(axis=-1, keepdims=True)})
add("norm: RMSNorm for LayerNorm", {"centred": lambda e, right, x: x})
add("norm: LayerNorm without bias", {"weighed": lambda e, right, y, weight, bias: right(y, weight, None)})
add("norm: sum for mean", root(lambda square, eps, n: np.sqrt(square * n + eps)))
add("norm: no root", root(lambda square, eps, n: square + eps))
add("norm: none at all", left_out("attn_norm", "ffn_norm", "output_norm", *QK_NORMS))
add("norm: none before the FFN", left_out("ffn_norm"))
add("norm: none at the end", left_out("output_norm"))
add("norm: none of Q and K", left_out(*QK_NORMS))
add("norm: sum overflows", root(half_sum))
add("norm: sum overflows in some rows", root(half_sum))
add("norm: epsilon in float16", {"epsilon": lambda e, right: float(np.float16(right()))})
add("norm: epsilon lost in float16", {"epsilon": lambda e, right: float(np.float16(right()))})
add("QK-norm after RoPE", {
    "norm": norm_after_rope,
    "rotated_both": lambda e, right, q, k: right(plain_heads(e, "Q"), plain_heads(e, "K")),
    "query": lambda e, right, q: right(e.here("Qcur_normed")),
    "key": lambda e, right, k: right(e.here("Kcur_normed")),
}, SCALE)  # fmt: skip
add("QK-norm of all heads at once", {"root": over_all_heads})


# -- products ------------------------------------------------------------------------------------------------------

QKV, FFN = ("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up", "ffn_down")
MATRICES = (*QKV, "attn_output", *FFN, "ffn_gate_inp", "output")
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def bias_as(stems: Iterable[str], change: Callable[[Array], Array | None]) -> dict[str, Edit]:
    stems = tuple(stems)

    def biased(e: Engine, right: Edit, stem: str) -> Array | None:
        b = right(stem)
        return b if b is None or stem not in stems else change(b)

    return {"bias": biased}


def other_layers(stems: Iterable[str], *ops: str) -> dict[str, Edit]:
    """These tensors of the other layer."""
    stems = tuple(stems)

    def other(e: Engine, right: Edit, stem: str) -> Any:
        return in_other_layer(e, right, stem) if stem in stems else right(stem)

    return dict.fromkeys(ops or ("matrix", "bias", "factor"), other)


def renamed(change: Callable[[str], str], *ops: str) -> dict[str, Edit]:
    return dict.fromkeys(ops or ("matrix", "bias", "factor"), lambda e, right, stem: right(change(stem)))


def transposed(stems: Iterable[str]) -> dict[str, Edit]:
    """Matrices read as if they were stored [in, out]."""
    stems = tuple(stems)

    def matrix(e: Engine, right: Edit, stem: str) -> Array:
        w = right(stem)
        return w.reshape(w.shape[::-1]).T if stem in stems else w

    return {"matrix": matrix}


def split_as(order: str) -> dict[str, Edit]:
    """The fused product taken for parts in another order."""

    def split(e: Engine, right: Edit, y: Array) -> Any:
        sizes = {"q": e.h.heads * e.h.dim, "k": e.h.kv_heads * e.h.dim, "v": e.h.kv_heads * e.h.dim}
        edges = np.cumsum([sizes[part] for part in order])[:-1]
        parts = dict(zip(order, np.split(y, edges, axis=-1), strict=True))
        return right(np.concatenate([parts[part] for part in "qkv"], axis=-1))

    return {"split": split}


def head_by_head(e: Engine, right: Edit, y: Array) -> Any:
    """Every KV head's queries, its key and its value side by side."""
    groups = y.reshape(len(y), e.h.kv_heads, -1, e.h.dim)
    parts = groups[:, :, :-2], groups[:, :, -2], groups[:, :, -1]
    return right(np.concatenate([part.reshape(len(y), -1) for part in parts], axis=-1))


def rows_permuted(stems: Iterable[str], change: Callable[[Array], Array], bias: bool = True) -> dict[str, Edit]:
    """Rows of a matrix permuted within each head, and its bias if that goes with it."""
    stems = tuple(stems)

    def finished(e: Engine, right: Edit, y: Array, stem: str) -> Array:
        if stem not in stems:
            return right(y, stem)
        y = right(y, stem) if bias else y
        y = change(y.reshape(len(y), -1, e.h.dim)).reshape(y.shape)
        return y if bias else right(y, stem)

    return {"finished": finished}


def product_of(stem: str, source: Callable[[Engine], Array]) -> dict[str, Edit]:
    """The product with one weight, of another tensor."""

    def linear(e: Engine, right: Edit, x: Array, name: str) -> Array:
        return right(source(e).reshape(x.shape), name) if name == stem else right(x, name)

    return {"linear": linear}


def without_product(stem: str) -> dict[str, Edit]:
    return {"linear": lambda e, right, x, name: x if name == stem else right(x, name)}


def head_of(rows: Callable[[Engine, Array], Array]) -> dict[str, Edit]:
    return {"head": lambda e, right, y: right(rows(e, y))}


def row_before(x: Array) -> Array:
    return x[np.maximum(np.arange(len(x)) - 1, 0)]


def row_late(x: Array) -> Array:
    return np.concatenate([np.zeros_like(x[:1]), x[:-1]])


def capped(cap: float) -> Edit:
    return lambda e, x: cap * np.tanh(x / cap)


def rotated_v(e: Engine, v: Array) -> Array:
    return e.rotated(v.reshape(len(v), -1, e.h.dim), "V").reshape(v.shape)


add("bias: none on Q, K, V", bias_as(QKV, lambda b: None))
add("bias: none on V", bias_as(["attn_v"], lambda b: None))
add("bias: none after attention", bias_as(["attn_output"], lambda b: None))
add("bias: none in the FFN", bias_as(FFN, lambda b: None))
add("bias: none on the head", bias_as(["output"], lambda b: None))
add("bias: twice", bias_as(QKV, lambda b: 2 * b))
add("bias: subtracted", bias_as(QKV, lambda b: -b))
add("bias: twice in the FFN", bias_as(FFN, lambda b: 2 * b))
add("bias: K's and V's swapped", renamed(swapping("attn_k", "attn_v"), "bias"))
add("bias: other layer's", other_layers(QKV, "bias"))
add("scale: ignored in attention", {"factor": lambda e, right, stem: None if "attn" in stem else right(stem)})
add("scale: ignored in the FFN", {"factor": lambda e, right, stem: None if "ffn" in stem else right(stem)})
add("transposed: all", transposed(MATRICES))
add("transposed: after attention", transposed(["attn_output"]))
add("transposed: down", transposed(["ffn_down"]))
add("transposed: router", transposed(["ffn_gate_inp"]))
add("transposed: head", transposed(["output"]))
add("other layer: Q, K, V", other_layers(QKV))
add("other layer: Q, K, V but for biases", other_layers(QKV, "matrix"))
add("other layer: FFN", other_layers(FFN))
add("other layer: after attention", other_layers(["attn_output"]))
add("other layer: experts", other_layers(EXPERTS))
add("other layer: router", other_layers(["ffn_gate_inp"]))
add("gate and up swapped", renamed(swapping("ffn_gate", "ffn_up")))
add("gate and up swapped: experts", renamed(swapping("ffn_gate_exps", "ffn_up_exps")))
add("K and V swapped", renamed(swapping("attn_k", "attn_v")))
add("Q and K swapped", renamed(swapping("attn_q", "attn_k")))
add("Q and K swapped but for biases", renamed(swapping("attn_q", "attn_k"), "matrix"))
add("Q for the output projection", renamed(lambda stem: "attn_q" if stem == "attn_output" else stem, "matrix"))
add("gate for up", renamed(lambda stem: "ffn_gate" if stem == "ffn_up" else stem))
add("head tied", renamed(lambda stem: "token_embd" if stem == "output" else stem, "matrix"))
add("fused: K, Q, V", split_as("kqv"))
add("fused: V, K, Q", split_as("vkq"))
add("fused: Q, V, K", split_as("qvk"))
add("fused: head by head", {"split": head_by_head})
add("Q, K to halves", rows_permuted(QKV[:2], to_halves), OWN_PAIRS)
add("Q, K to pairs", rows_permuted(QKV[:2], to_pairs), OWN_PAIRS)
add("Q to halves", rows_permuted(QKV[:1], to_halves), OWN_PAIRS)
add("Q, K to pairs but for biases", rows_permuted(QKV[:2], to_pairs, bias=False), OWN_PAIRS)
add("Q, K, V of the residual", {"qkv": lambda e, right, x: right(e.layer_input())})
add("FFN of the residual", {"gate_up": lambda e, right, x: right(e.here("ffn_inp"))})
add("FFN of attention's input", {"gate_up": lambda e, right, x: right(e.here("attn_norm"))})
add("router of the residual", product_of("ffn_gate_inp", lambda e: e.here("ffn_inp")))
add("output projection of Q", product_of("attn_output", lambda e: e.here("Qcur_rope")))
add("output projection of attention's input", product_of("attn_output", lambda e: e.here("attn_norm")))
add("down of gate", product_of("ffn_down", lambda e: e.here("ffn_gate")))
add("down of up", product_of("ffn_down", lambda e: e.here("ffn_up")))
add("logits of the residual", head_of(lambda e, y: e.here("l_out", 1)))
add("no output projection", without_product("attn_output"))
add("no down projection", without_product("ffn_down"))
add("RoPE on V", Vcur_proj=rotated_v)
add("logits of the first token", head_of(lambda e, y: np.repeat(y[:1], len(y), axis=0)))
add("logits of the token before", head_of(lambda e, y: row_before(y)))
add("logits a row late", head_of(lambda e, y: row_late(y)))
add("logits capped at 30", result_output=capped(30.0))
add("logits capped at 50", result_output=capped(50.0))
add("logits capped at 8", result_output=capped(8.0))
add("logits divided by 8", result_output=lambda e, x: x / 8)
add("Q scaled already", None, SCALE, Qcur_proj=lambda e, x: x / 8)
add("output projection halved", attn_out=lambda e, x: x * 0.5)
add("down projection by 0.22", ffn_out=lambda e, x: x * 0.22)
add("experts doubled", ffn_moe_down=lambda e, x: x * 2)
add("router negated", ffn_moe_logits=lambda e, x: -x)


# -- RoPE ----------------------------------------------------------------------------------------------------------


def pairs_of(base: float | None = None, part: float = 1, whole: bool = False) -> dict[str, Edit]:
    """Frequencies of another base, or of other pairs: a part of each head's, or all of them."""

    def frequencies(e: Engine, right: Edit) -> Array:
        n = e.h.dim if whole else int(e.h.n_rot * part)
        return (base or e.h.base) ** (-2.0 * np.arange(n // 2) / n)

    return {"frequencies": frequencies}


def plain_theta(e: Engine, positions: Array, stretch: float = 1.0) -> Array:
    return positions[:, None] * e.frequencies() / stretch


def at_positions(change: Callable[[Array], Array]) -> dict[str, Edit]:
    return {"theta": lambda e, right, p: right(change(p))}


def in_steps(change: Callable[[Array, int], Array]) -> dict[str, Edit]:
    """Other positions in decode steps."""
    return {"theta": lambda e, right, p: right(np.where(p < e.n_prefill, p, change(p, e.n_prefill)))}


def stretched_by(change: Callable[[float], float]) -> dict[str, Edit]:
    return {"stretch": lambda e, right: change(right())}


def yarn_inverted(e: Engine, right: Edit, positions: Array) -> Array:
    keep, theta = e.yarn_keep(), plain_theta(e, positions)
    return theta * e.h.factor * (1 - keep) + theta * keep


def factors_as(power: float) -> dict[str, Edit]:
    return {"frequencies": lambda e, right: right() * e.file["rope_freqs.weight"] ** power}


def turning(change: Callable[[Engine, Edit, Array, str], Array]) -> dict[str, Edit]:
    """Heads of one side, Q or K, rotated in another way."""
    return {"rotated": change}


AS_LINEAR = {"theta": lambda e, right, p: plain_theta(e, p, e.h.factor)}
NO_TEMPERATURE = {"magnitude": lambda e, right: 1.0}
add(
    "rope: other layout",
    turning(lambda e, right, x, side: e.turned(x, *e.angles(e.positions), not e.in_pairs)),
    OWN_PAIRS,
)
add("rope: other layout with YaRN", BUGS["rope: other layout"].edits, OWN_PAIRS)
add("rope: base 500000", pairs_of(base=500000.0))
add("rope: base 1000000", pairs_of(base=1e6))
add("rope: file's base ignored", pairs_of(base=10000.0))
add("rope: base 12345", pairs_of(base=12345.0))
add("rope: scaling ignored", {"theta": lambda e, right, p: plain_theta(e, p), **NO_TEMPERATURE})
add("rope: linear scaling twice", stretched_by(lambda factor: factor**2))
add("rope: YaRN of scaled positions", {"theta": lambda e, right, p: right(p / e.h.factor)})
add("rope: YaRN of the factor's square", stretched_by(lambda factor: factor**2))
add("rope: linear scaling inverted", stretched_by(lambda factor: 1 / factor))
add("rope: YaRN inverted", {"theta": yarn_inverted})
add("rope: YaRN of the factor's inverse", stretched_by(lambda factor: 1 / factor))
add("rope: positions divided by 8", {"theta": lambda e, right, p: plain_theta(e, p, 8.0)})
add("rope: positions divided by 2", {"theta": lambda e, right, p: plain_theta(e, p, 2.0)})
add("rope: YaRN as linear", {**AS_LINEAR, **NO_TEMPERATURE})
add("rope: YaRN's angles as linear", AS_LINEAR)
add("rope: YaRN without temperature", NO_TEMPERATURE)
add("rope: factors ignored", factors_as(1))
add("rope: factors inverted", factors_as(2))
add("rope: whole heads", pairs_of(whole=True))
add("rope: half of each head", pairs_of(part=0.5))
add("rope: half of the pairs", {"frequencies": lambda e, right: right()[: e.h.n_rot // 4]})
add("rope: a quarter of each head", pairs_of(part=0.25))
add("rope: other direction", {"angles": lambda e, right, p: (right(p)[0], -right(p)[1])})
add("rope: positions from 1", at_positions(lambda p: p + 1))
add("rope: positions from -1", at_positions(lambda p: p - 1))
add("rope: positions from 2", at_positions(lambda p: p + 2))
add("rope: steps restart", in_steps(lambda p, n: p - n))
add("rope: steps all at 0", in_steps(lambda p, n: p * 0))
add("rope: steps stand still", in_steps(lambda p, n: p * 0 + n))
add("rope: steps stand still at the prompt's end", in_steps(lambda p, n: p * 0 + n - 1))
add("rope: steps lag by one", in_steps(lambda p, n: p - 1))
add("rope: none", turning(lambda e, right, x, side: x))
add("rope: none of K", turning(lambda e, right, x, side: x if side == "K" else right(x, side)))
add("rope: twice", turning(lambda e, right, x, side: right(right(x, side), side)))
add("rope: permuted to halves first", turning(lambda e, right, x, side: right(to_halves(x), side)), OWN_PAIRS)
add("rope: permuted to pairs first", turning(lambda e, right, x, side: right(to_pairs(x), side)), OWN_PAIRS)
add(
    "rope: K permuted to halves first",
    turning(lambda e, right, x, side: right(to_halves(x) if side == "K" else x, side)),
    OWN_PAIRS,
)


# -- attention -----------------------------------------------------------------------------------------------------


def heads_by(change: Callable[[Array, int, int], Array], *ops: str) -> dict[str, Edit]:
    """Query heads that read another KV head: change(query heads, how many, KV heads)."""
    edit: Edit = lambda e, right: change(np.arange(e.h.heads), e.h.heads, e.h.kv_heads)  # noqa: E731
    return dict.fromkeys(ops or ("key_heads", "value_heads"), edit)


def cache_as(change: Callable[[Array], Array], *ops: str) -> dict[str, Edit]:
    """The cache's rows, read in another way."""
    return dict.fromkeys(ops or ("read_keys", "read_values"), lambda e, right, rows: right(change(rows)))


def own_row_empty(e: Engine, right: Edit, rows: Array) -> Array:
    """A decode step reads its own slot before it is written."""
    if e.start < e.n_prefill:
        return right(rows)
    return right(np.concatenate([rows[:-1], np.zeros_like(rows[-1:])]))


def slots_as(held: Callable[[int, int], Sequence[int]], prefill: bool = False) -> dict[str, Edit]:
    """The cache's slots hold the rows of other tokens: held(tokens so far, tokens of the prefill), -1 for none."""

    def edit(e: Engine, right: Edit, rows: Array) -> Array:
        if e.start == 0 and not (prefill and len(rows) > 10):
            return right(rows)
        tokens = np.array(held(len(rows), e.n_prefill))
        return right(rows[tokens] * (tokens >= 0)[:, None, None].astype(rows.dtype))

    return {"read_keys": edit, "read_values": edit}


def first_layers(side: str) -> dict[str, Edit]:
    """Every layer reads the first one's rows."""
    op = "read_keys" if side == "k" else "read_values"
    return {op: lambda e, right, rows: right(e.by_token(e.caches[side, 0]))}


def laid_out(rows: Array, *axes: int) -> Array:
    """Rows in another order of axes, read as if it were the right one."""
    return np.ascontiguousarray(rows.transpose(axes)).reshape(rows.shape)


def normed_again(e: Engine, x: Array, stem: str) -> Array:
    return e.norm(x, stem) if e.name(stem) in e.file else e.normalised(x)


def scale_as(change: Callable[[float, Engine], float]) -> dict[str, Edit]:
    return {"softmax_scale": lambda e, right: change(right(), e)}


def hiding(change: Callable[[Array, Array, int], Array]) -> dict[str, Edit]:
    """Another mask: which keys are hidden from which queries, and where decode begins."""
    return {"hidden": lambda e, right, q, k: change(q, k, e.n_prefill)}


def softmax_as(change: Callable[[Engine, Array, Array], Array]) -> dict[str, Edit]:
    """Probabilities change(engine, scaled scores, hidden keys)."""

    def probabilities(e: Engine, right: Edit, scores: Array) -> Array:
        x = e.a.scores(scores) * scores.dtype.type(e.softmax_scale())
        hidden = e.hidden(e.positions[:, None], np.arange(x.shape[-1])[None, :])
        return np.asarray(change(e, x, hidden), x.dtype)

    return {"probabilities": probabilities}


def over(axis: int) -> Callable[[Engine, Array, Array], Array]:
    """The softmax over an axis, of what the causal loop visits."""

    def softmax(e: Engine, x: Array, hidden: Array) -> Array:
        powers = np.where(hidden, 0, np.exp(x.astype(np.float64)))
        return np.where(hidden, 0, powers / powers.sum(axis=axis, keepdims=True))

    return softmax


def over_masked_heads(e: Engine, x: Array, hidden: Array) -> Array:
    powers = np.where(hidden, 0, np.exp(x.astype(np.float64)))
    return powers / powers.sum(axis=0, keepdims=True)


def without_maximum(e: Engine, x: Array, hidden: Array) -> Array:
    powers = np.where(hidden, x.dtype.type(0), np.exp(x))
    return powers / powers.sum(axis=-1, keepdims=True)


def merged_by(order: tuple[int, int, int]) -> dict[str, Edit]:
    """Heads [head, query, dim] laid out in another order of axes."""
    return {"merged": lambda e, right, x: np.ascontiguousarray(x.transpose(order)).reshape(x.shape[1], -1)}


def first_head(h: Array, n: int, kv: int) -> Array:
    return h * 0


BEFORE_ROPE = {
    "query": lambda e, right, q: right(projected(e, "Q")),
    "key": lambda e, right, k: right(projected(e, "K")),
}
NORMED_AGAIN = {
    "query": lambda e, right, q: right(normed_again(e, q, "attn_q_norm")),
    "key": lambda e, right, k: right(normed_again(e, k, "attn_k_norm")),
}
add("heads tiled", heads_by(lambda h, n, kv: h % kv))
add("heads tiled in scores", heads_by(lambda h, n, kv: h % kv, "key_heads"))
add("heads tiled in values", heads_by(lambda h, n, kv: h % kv, "value_heads"))
add("heads reversed", heads_by(lambda h, n, kv: kv - 1 - h * kv // n))
add("heads all of the first", heads_by(first_head))
add("scores before RoPE", BEFORE_ROPE, SCALE)
add("scores of unrotated Q", {"query": BEFORE_ROPE["query"]}, SCALE)
add("scores of unrotated K", {"key": BEFORE_ROPE["key"]}, SCALE)
add("scores of what is normed again", NORMED_AGAIN, SCALE)
add("scores of what is normed without weight", NORMED_AGAIN, SCALE)
add("scale in the scores as well", {"scores": lambda e, right, q, k: right(q, k) * q.dtype.type(e.scale())}, SCALE)
add("cache: row of the token before", cache_as(row_before))
add("cache: keys' row of the token before", cache_as(row_before, "read_keys"))
add("cache: values' row of the token before", cache_as(row_before, "read_values"))
add("cache: written a slot late", cache_as(row_late))
add("cache: read a slot early", cache_as(lambda rows: np.concatenate([rows[1:], np.zeros_like(rows[:1])])))
add("cache: own row not yet written", dict.fromkeys(("read_keys", "read_values"), own_row_empty))
add("scale missing", scale_as(lambda s, e: 1.0), SCALE)
add("scale twice", scale_as(lambda s, e: s * s), SCALE)
add("scale of d_model", scale_as(lambda s, e: e.h.embd**-0.5), SCALE)
add("scale of d_model / KV heads", scale_as(lambda s, e: (e.h.embd / e.h.kv_heads) ** -0.5), SCALE)
add("scale of 96", scale_as(lambda s, e: 96**-0.5), SCALE)
add("scale 0.3", scale_as(lambda s, e: 0.3), SCALE)
add("no mask", hiding(lambda q, k, n: (k < 0) & (q >= 0)))
add("mask shows the next", hiding(lambda q, k, n: k > q + 1))
add("mask hides the own key, but the first", hiding(lambda q, k, n: (k >= q) & (k > 0)))
add("mask hides the own key", hiding(lambda q, k, n: k >= q))
add("mask of -1e9 hides the own key", {**hiding(lambda q, k, n: k >= q), "floor": lambda e, right: -1e9})
add("steps do not see themselves", hiding(lambda q, k, n: (k > q) | (k == q) & (q >= n)))
add("steps see only themselves", hiding(lambda q, k, n: (k > q) | (k < q) & (q >= n)))
add("mask after the softmax", softmax_as(lambda e, x, hidden: np.where(hidden, 0, e.softmax(x))), SCORES)
add("window of 4", hiding(lambda q, k, n: (k > q) | (k <= q - 4)))
add("window of 8", hiding(lambda q, k, n: (k > q) | (k <= q - 8)))
add("scores capped at 50", {"capped": lambda e, right, x: 50 * np.tanh(x / 50)})
add("scores capped at 30", {"capped": lambda e, right, x: 30 * np.tanh(x / 30)})
add("softmax over queries", softmax_as(over(-2)), SCORES)
add("softmax over heads", softmax_as(over(-3)), SCORES)
add("softmax of masked scores over heads", softmax_as(over_masked_heads), SCORES)
add("exp overflows", softmax_as(without_maximum), SCORES)
add("no softmax", softmax_as(lambda e, x, hidden: np.where(hidden, 0, x)), SCORES)
add("heads not transposed", merged_by((0, 1, 2)))
add("heads interleaved", merged_by((1, 2, 0)))


# -- activations, residuals, the router ----------------------------------------------------------------------------

SUMS = ("ffn_inp", "l_out")
NORM_OF, BRANCH_OF = {"ffn_inp": "attn_norm", "l_out": "ffn_norm"}, {"ffn_inp": "attn_out", "l_out": "ffn_out"}
erf = np.vectorize(math.erf, otypes=[float])


def gated_by(activation: Callable[[Array], Array]) -> dict[str, Edit]:
    return {"gated": lambda e, right, gate, up: wide(lambda g, u: activation(g) * u, gate, up)}


def combined(formula: Callable[[Array, Array], Array]) -> dict[str, Edit]:
    return {"gated": lambda e, right, gate, up: formula(gate, up)}


def gelu_tanh(x: Array) -> Array:
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def sums_as(formula: Callable[[Array, Array], Array]) -> dict[str, Edit]:
    """Residual connections formula(branch, residual)."""
    return {"add": lambda e, right, branch, residual: np.asarray(formula(branch, residual), branch.dtype)}


def residual_of(source: Callable[[Engine, str], Array], words: Iterable[str] = SUMS) -> dict[str, Edit]:
    """Residual connections with another residual."""

    def fault(word: str) -> Edit:
        return lambda e, x: e.here(BRANCH_OF[word]) + source(e, word)

    return {word: fault(word) for word in words}


def sum_normed(word: str) -> Edit:
    """The sum through the norm that belongs to its branch."""
    return lambda e, x: e.normalised(x) * e.file[e.name(NORM_OF[word])].astype(x.dtype)


def choosing(change: Callable[[Array, int], Array]) -> dict[str, Edit]:
    return {"choice": lambda e, right, probs, count: np.broadcast_to(change(probs, count), (len(probs), count))}


def weighing(change: Callable[[Engine, Array, Array], Array]) -> dict[str, Edit]:
    """Weights change(engine, probabilities, choice) of chosen experts."""
    return {"router_weights": lambda e, right, p, chosen: np.asarray(change(e, p, chosen), p.dtype)}


def mixing(weights: Callable[[Engine, Array], Array]) -> dict[str, Edit]:
    """The mixture with other weights."""
    return {"weighted": lambda e, right, down, w: right(down, np.asarray(weights(e, w), w.dtype))}


def experts_as(change: Callable[[Array, int], Array]) -> dict[str, Edit]:
    """Other experts' matrices: change(choice, how many there are)."""

    def experts(e: Engine, right: Edit, x: Array, stem: str, chosen: Array) -> Array:
        return right(x, stem, np.broadcast_to(change(chosen, len(e.matrix(stem))), chosen.shape))

    return {"experts": experts}


add("GELU", gated_by(lambda x: x / 2 * (1 + erf(x / math.sqrt(2)))))
add("GELU by tanh", gated_by(gelu_tanh))
add("quick GELU", gated_by(lambda x: x * sigmoid(1.702 * x)))
add("ReLU", gated_by(lambda x: np.maximum(x, 0)))
add("sigmoid", gated_by(sigmoid))
add("tanh", gated_by(np.tanh))
add("no activation", combined(lambda g, u: g * u))
add("activation of up", combined(lambda g, u: g * silu(u)))
add("activation of the product", combined(lambda g, u: silu(g * u)))
add("no up", combined(lambda g, u: silu(g)))
add("no gate", combined(lambda g, u: u))
add("gate plus up", combined(lambda g, u: silu(g) + u))
add("no residual", sums_as(lambda b, r: b))
add("no residual after the FFN", l_out=lambda e, x: e.here("ffn_out"))
add("no branch", sums_as(lambda b, r: r))
add("no attention", ffn_inp=lambda e, x: e.layer_input())
add("residual twice", sums_as(lambda b, r: b + 2 * r))
add("branch twice", sums_as(lambda b, r: 2 * b + r))
add("branch subtracted", sums_as(lambda b, r: r - b))
add("residual subtracted", sums_as(lambda b, r: b - r))
add("residual normed", **residual_of(lambda e, word: e.here(NORM_OF[word])))
add("residual normed in place before the FFN", **residual_of(lambda e, word: e.here("ffn_norm"), SUMS[1:]))
add("residual from before attention", **residual_of(lambda e, word: e.layer_input(), SUMS[1:]))
add("residual from the layer before", **residual_of(lambda e, word: e.layer_input(e.layer - 1), SUMS[:1]))
add("residual from the embedding", **residual_of(lambda e, word: e.here("embd"), SUMS[1:]))
add("residuals from the embedding", **residual_of(lambda e, word: e.here("embd")))
add("sum normed", ffn_inp=sum_normed("ffn_inp"), l_out=sum_normed("l_out"))
add("sum normed without weight", **at(SUMS, lambda e, x: e.normalised(x)))
add("branch by 0.22", sums_as(lambda b, r: b * b.dtype.type(0.22) + r))
add("residual by 0.5", sums_as(lambda b, r: b + r * b.dtype.type(0.5)))
add("router: sigmoid", {"router_probs": lambda e, right, x: sigmoid(x)})
add("router: nothing", {"router_probs": lambda e, right, x: x})
add("router: worst experts", choosing(lambda p, n: np.argsort(p, axis=-1)[:, :n]))
add("router: first experts", choosing(lambda p, n: np.arange(n)))
add("router: last experts", choosing(lambda p, n: np.arange(p.shape[-1])[-n:]))
add("router: weights of the first", weighing(lambda e, p, chosen: p[:, : chosen.shape[1]]))
add(
    "router: scores for weights",
    weighing(lambda e, p, chosen: np.take_along_axis(e.here("ffn_moe_logits"), chosen, -1)),
)
add("router: equal weights", weighing(lambda e, p, chosen: np.full(chosen.shape, 1 / chosen.shape[1])))
add("router: weights in the other order", weighing(lambda e, p, chosen: np.take_along_axis(p, chosen, -1)[:, ::-1]))
add("router: weights not normalised", {"summing_to_one": lambda e, right, w: w})
add("router: weights through a softmax", {"summing_to_one": lambda e, right, w: e.softmax(w)})
add("mixture: sum", mixing(lambda e, w: np.ones_like(w)))
add("mixture: mean", mixing(lambda e, w: np.full_like(w, 0.5)))
add("mixture: weights not normalised", mixing(lambda e, w: e.here("ffn_moe_weights")))
add("mixture: weights in the other order", mixing(lambda e, w: w[:, ::-1]))
add("experts: next one's matrices", experts_as(lambda chosen, n: (chosen + 1) % n))
add("experts: second's for the first", experts_as(lambda chosen, n: chosen[:, ::-1]))
add("experts: by place", experts_as(lambda chosen, n: np.arange(chosen.shape[1])))
add("experts: first token's", experts_as(lambda chosen, n: chosen[:1]))
add("experts: token before's", experts_as(lambda chosen, n: row_before(chosen)))


# -- float16 that overflows ----------------------------------------------------------------------------------------

ALL = (
    "attn_norm", "Qcur_proj", "Kcur_proj", "Vcur_proj", "Qcur_rope", "Kcur_rope", "kq", "kq_soft_max", "kqv_out",
    "attn_out", "ffn_inp", "ffn_norm", "ffn_gate", "ffn_up", "ffn_swiglu", "ffn_out", "l_out", "result_norm",
    "result_output",
)  # fmt: skip
add("half: up overflows", ffn_up=lambda e, x: half(x))
add("half: all activations", **at(ALL, lambda e, x: half(x)))
add("half: FFN's output", ffn_out=lambda e, x: half(x))
add("half: residuals", **at(SUMS, lambda e, x: half(x)))


# -- decode steps -----------------------------------------------------------------------------------------------------

add("rope: steps twice", turning(lambda e, right, x, side: right(right(x, side) if e.start else x, side)))
add("cache: steps one slot late", slots_as(lambda n, p: [*range(p), -1, *range(p, n)][:n]))
add("cache: steps over each other", slots_as(lambda n, p: [*range(p), n - 1, *[-1] * (n - 1 - p)]))
add("cache: steps over slot 0", slots_as(lambda n, p: [n - 1, *range(1, p), *[-1] * (n - p)]))
add("cache: steps' rows twice", slots_as(lambda n, p: [*range(p), *np.arange(p, n).repeat(2)][:n]))
add(
    "cache: ten rows for twelve",
    slots_as(lambda n, p: [s + (n - 1 - s) // 10 * 10 for s in range(10)] + [-1] * (n - 10), prefill=True)
    | hiding(lambda q, k, n: (k > q) | (k >= 10)),
)
add("cache: rows of layer 0", first_layers("k") | first_layers("v"))
add(
    "cache: steps do not count themselves",
    {"read_keys": own_row_empty} | hiding(lambda q, k, n: (k > q) | (k == q) & (q >= n)),
)
add(
    "cache: K rotated again",
    {"read_keys": lambda e, right, rows: right(e.turned(rows, *e.angles(np.arange(len(rows))), e.in_pairs))},
)
add("cache: V by head", cache_as(lambda rows: laid_out(rows, 1, 0, 2), "read_values"))
add("cache: V by value", cache_as(lambda rows: laid_out(rows, 1, 2, 0), "read_values"))
