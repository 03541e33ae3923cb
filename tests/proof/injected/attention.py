"""Attention goes wrong: heads, cache, scale, mask, softmax, merging, ALiBi, sinks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from proof.injected.base import (
    DECODE,
    DENSE,
    EVERY,
    SAME,
    SCALE,
    SCORES,
    bug,
    elsewhere,
    projected,
    read_as,
    row_before,
    row_late,
)
from proof.strangers.arithmetic import bfloat, eight, half
from proof.strangers.engine import Array, Edit, Engine

SOFTMAX = ("kq_soft_max",)
KQ, KQV = ("kq",), ("kqv_out",)
GROUPED = ("llama", "qwen3", "moe")
q8_0 = partial(eight, keep=half, late=True)


def heads_by(change: Callable[[Array, int, int], Array], *ops: str) -> dict[str, Edit]:
    """Query heads that read another KV head: change(query heads, how many, KV heads)."""
    edit: Edit = lambda e, right: change(np.arange(e.h.heads), e.h.heads, e.kv_heads)  # noqa: E731
    return dict.fromkeys(ops or ("key_heads", "value_heads"), edit)


def cache_as(change: Callable[[Array], Array], *ops: str) -> dict[str, Edit]:
    """The cache's rows, read in another way."""
    return dict.fromkeys(ops or ("read_keys", "read_values"), lambda e, right, rows: right(change(rows)))


def own_row_empty(e: Engine, right: Edit, rows: Array) -> Array:
    """A decode step reads its own slot before it is written."""
    if e.start < e.n_prefill:
        return right(rows)
    return right(np.concatenate([rows[:-1], np.zeros_like(rows[-1:])]))


def normed_again(e: Engine, x: Array, stem: str) -> Array:
    return e.norm(x, stem) if e.name(stem) in e.file else e.normalised(x)


def scale_as(change: Callable[[float, Engine], float]) -> dict[str, Edit]:
    return {"softmax_scale": lambda e, right: change(right(), e)}


def hiding(change: Callable[[Array, Array, int], Array]) -> dict[str, Edit]:
    """Another mask where no window is: which keys are hidden from which queries, and where decode begins."""
    return {"hidden": lambda e, right, q, k: right(q, k) if e.local else change(q, k, e.n_prefill)}


def softmax_as(change: Callable[[Engine, Array, Array], Array]) -> dict[str, Edit]:
    """Probabilities change(engine, scaled scores, hidden keys)."""

    def probabilities(e: Engine, right: Edit, scores: Array) -> Array:
        x = e.scaled(scores)
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


def reading(rounded: Callable[[Array], Array]) -> dict[str, Edit]:
    """Products that read fewer bits of the cache than are recorded of it."""
    return cache_as(rounded)


def keeping(rounded: Callable[[Array], Array]) -> dict[str, Edit]:
    """A cache of fewer bits, recorded as it is kept."""
    return {"key": lambda e, right, k: rounded(right(k)), "value": lambda e, right, v: rounded(right(v))}


def scores_rounded(rounded: Callable[[Array], Array]) -> dict[str, Edit]:
    """A softmax of scores in fewer bits."""
    return {"probabilities": lambda e, right, scores: right(rounded(scores))}


def query_scale_as(change: Callable[[float], float]) -> dict[str, Edit]:
    """Where Q has the scale."""
    return {"query_scale": lambda e, right: change(right())}


def normed_plainly(e: Engine, right: Edit, q: Array, keys: Array) -> Array:
    return right(q / e.root(q), keys / e.root(keys))


def outside_windows(e: Engine, right: Edit, q: Array, k: Array) -> Array:
    """The window is in the other layers."""
    return right(q, k) if not e.h.arch.window else k > q if e.local else (k > q) | (k <= q - e.width())


def slopes_as(change: Callable[[Array], Array]) -> dict[str, Edit]:
    return {"slopes": lambda e, right: change(right())}


def sinks_as(change: Callable[[Engine, Array], Array]) -> dict[str, Edit]:
    return {"sinks": lambda e, right: None if right() is None else change(e, right())}


BEFORE_ROPE: dict[str, Edit] = {
    "query": lambda e, right, q: right(projected(e, "Q")),
    **read_as(lambda e: None if e.latent else projected(e, "K")),
}
NORMED_AGAIN: dict[str, Edit] = {
    "query": lambda e, right, q: right(normed_again(e, q, "attn_q_norm")),
    "read_keys": lambda e, right, rows: right(normed_again(e, rows, "attn_k_norm")),
}
SCALED_SCORES: dict[str, Edit] = {"scores": lambda e, right, q, k: right(q, k) * q.dtype.type(e.scale())}
OTHER_SCALE = "attention-scale attention-scale-other"
INJECTIONS = (
    bug("heads tiled", "heads-tiled", KQ + KQV, heads_by(lambda h, n, kv: h % kv), models=GROUPED, others=SAME),
    bug("heads tiled in scores", "heads-tiled", KQ, heads_by(lambda h, n, kv: h % kv, "key_heads"), others=SAME),
    bug("heads tiled in values", "heads-tiled", KQV, heads_by(lambda h, n, kv: h % kv, "value_heads"), others=SAME),
    bug("heads reversed", "heads-tiled", KQ + KQV, heads_by(lambda h, n, kv: kv - 1 - h * kv // n), models=DENSE,
        others=SAME),
    bug("heads all of the first", "heads-tiled", KQ + KQV, heads_by(first_head), models=("llama", "qwen2"),
        others=SAME),
    bug("scores before RoPE", "scores-before-rope", KQ, BEFORE_ROPE, models=DENSE, needs=(SCALE,), others=SAME),
    bug("scores of unrotated Q", "scores-before-rope", KQ, {"query": BEFORE_ROPE["query"]}, needs=(SCALE,),
        others=SAME),
    bug("scores of unrotated K", "cache-before-rope", KQ, {"read_keys": BEFORE_ROPE["read_keys"]}, needs=(SCALE,),
        others=SAME),
    bug("scores of what is normed again", "qk-norm-after-rope", KQ, NORMED_AGAIN, models=("qwen3",), needs=(SCALE,)),
    bug("scores of what is normed without weight", "qk-norm-applied", KQ, NORMED_AGAIN, needs=(SCALE,)),
    bug("scale in the scores as well", "scores-scaled", KQ, SCALED_SCORES, needs=(SCALE,),
        others="scores-scaled multiplier-missing"),
    bug("cache: row of the token before", "cache-row-off", KQ + KQV, cache_as(row_before), models=DENSE, others=SAME),
    bug("cache: keys' row of the token before", "cache-row-off", KQ, cache_as(row_before, "read_keys"), others=SAME),
    bug("cache: values' row of the token before", "cache-row-off", KQV, cache_as(row_before, "read_values"),
        others=SAME),
    bug("cache: written a slot late", "cache-row-off", KQ + KQV, cache_as(row_late), others=SAME),
    bug("cache: read a slot early", "cache-row-off", KQ + KQV,
        cache_as(lambda rows: np.concatenate([rows[1:], np.zeros_like(rows[:1])])), others=SAME),
    bug("cache: own row not yet written", "cache-row-off", KQ + KQV,
        dict.fromkeys(("read_keys", "read_values"), own_row_empty), decode=DECODE),
    bug("scale missing", "attention-scale", SOFTMAX, scale_as(lambda s, e: 1.0), models=EVERY, needs=(SCALE,),
        others=SAME),
    bug("scale twice", "attention-scale", SOFTMAX, scale_as(lambda s, e: s * s), models=DENSE, needs=(SCALE,),
        others=SAME),
    bug("scale of d_model", "attention-scale", SOFTMAX, scale_as(lambda s, e: e.h.embd**-0.5), models=DENSE,
        needs=(SCALE,), others=SAME),
    bug("scale of d_model / KV heads", "attention-scale", SOFTMAX,
        scale_as(lambda s, e: (e.h.embd / e.h.kv_heads) ** -0.5), models=("llama", "qwen3"), needs=(SCALE,)),
    bug("scale of 96", "attention-scale-other", SOFTMAX, scale_as(lambda s, e: 96**-0.5), models=DENSE, needs=(SCALE,)),
    bug("scale 0.3", "attention-scale-other", SOFTMAX, scale_as(lambda s, e: 0.3), needs=(SCALE,), others=SAME,
        unlike=("gemma3", "phi3")),
    bug("no mask", "mask-missing", SOFTMAX, hiding(lambda q, k, n: (k < 0) & (q >= 0)), models=EVERY, others=SAME,
        unlike=("gemma3", "gpt-oss")),
    bug("mask shows the next", "mask-shifted", SOFTMAX, hiding(lambda q, k, n: k > q + 1), models=DENSE, others=SAME),
    bug("mask hides the own key, but the first", "mask-shifted", SOFTMAX, hiding(lambda q, k, n: (k >= q) & (k > 0)),
        models=DENSE, others=SAME, unlike=("gemma3", "gpt-oss")),
    bug("mask hides the first key", "first-key-unseen", SOFTMAX, hiding(lambda q, k, n: (k > q) | (k == 0) & (q > 0)),
        models=DENSE, others=SAME, unlike=("gemma3", "gpt-oss")),
    bug("mask hides the own key", "mask-shifted", SOFTMAX, hiding(lambda q, k, n: k >= q)),
    bug("mask of -1e9 hides the own key", "mask-shifted", SOFTMAX,
        {**hiding(lambda q, k, n: k >= q), "floor": lambda e, right: -1e9}),
    bug("steps do not see themselves", "decode-key-unseen", SOFTMAX,
        hiding(lambda q, k, n: (k > q) | (k == q) & (q >= n)), models=DENSE, decode=DECODE, others=SAME,
        unlike=("gemma3", "gpt-oss")),
    bug("steps see only themselves", "decode-key-unseen", SOFTMAX,
        {"hidden": lambda e, right, q, k: right(q, k) | (k < q) & (q >= e.n_prefill)}, models=DENSE, decode=DECODE,
        others=SAME),
    bug("mask after the softmax", "mask-after-softmax", SOFTMAX,
        softmax_as(lambda e, x, hidden: np.where(hidden, 0, e.over_keys(x))), models=DENSE, needs=(SCORES,),
        others=SAME),
    bug("window of 4", "window-applied", SOFTMAX, hiding(lambda q, k, n: (k > q) | (k <= q - 4)), models=DENSE,
        others=SAME),
    bug("window of 8", "window-applied", SOFTMAX, hiding(lambda q, k, n: (k > q) | (k <= q - 8)), others=SAME),
    bug("scores capped at 50", "softcap-applied", SOFTMAX, {"capped": lambda e, right, x: 50 * np.tanh(x / 50)},
        models=DENSE),
    bug("scores capped at 30", "softcap-applied", SOFTMAX, {"capped": lambda e, right, x: 30 * np.tanh(x / 30)}),
    bug("softmax over queries", "softmax-axis", SOFTMAX, softmax_as(over(-2)), models=DENSE, needs=(SCORES,),
        others=SAME, unlike=("gpt-oss",)),
    bug("softmax over heads", "softmax-axis", SOFTMAX, softmax_as(over(-3)), models=DENSE, needs=(SCORES,), others=SAME,
        unlike=("gpt-oss",)),
    bug("softmax of masked scores over heads", "softmax-axis", SOFTMAX, softmax_as(over_masked_heads), models=DENSE,
        needs=(SCORES,)),
    bug("exp overflows", "softmax-overflow", SOFTMAX, softmax_as(without_maximum), models=("llama-large",),
        needs=(SCORES,)),
    bug("no softmax", "softmax-missing", SOFTMAX, softmax_as(lambda e, x, hidden: np.where(hidden, 0, x)), models=DENSE,
        needs=(SCORES,), others=SAME),
    bug("heads not transposed", "heads-merged-wrong", KQV, merged_by((0, 1, 2)), models=DENSE, others=SAME),
    bug("heads interleaved", "heads-merged-wrong", KQV, merged_by((1, 2, 0)), models=DENSE, others=SAME),
    bug("scale in the scores", "scores-scaled", KQ + SOFTMAX, {**SCALED_SCORES, **scale_as(lambda s, e: 1.0)},
        models=DENSE, choice=True),
    bug("cache in float16", "cache-rounded", KQ + KQV, reading(half), models=DENSE,
        says="reads K from a cache of type F16"),
    bug("cache in bfloat16", "cache-rounded", KQ + KQV, reading(bfloat), says="reads K from a cache of type BF16"),
    bug("cache in Q8_0", "cache-rounded", KQ + KQV, reading(q8_0), models=DENSE,
        says="reads K from a cache of type Q8_0"),
    bug("recorded cache in Q8_0", "cache-rows-rounded", ("kv_k", "kv_v"), keeping(q8_0), says="keeps its rows as Q8_0"),
    bug("softmax of float16", "softmax-of-rounded", SOFTMAX, scores_rounded(half), models=DENSE,
        says="rounds scaled scores to F16"),
    bug("softmax of bfloat16", "softmax-of-rounded", SOFTMAX, scores_rounded(bfloat),
        says="rounds scaled scores to BF16"),
    elsewhere("scale of head size for the file's", OTHER_SCALE, scale_as(lambda s, e: e.scale()),
              unlike=("gemma3", "phi3")),
    elsewhere("scale of Q left out", "multiplier-missing attention-scale scores-scaled",
              query_scale_as(lambda s: 1.0)),
    elsewhere("scale of Q, and of the scores", OTHER_SCALE,
              scale_as(lambda s, e: e.scale() if e.h.arch.queries_scaled else s)),
    elsewhere("scale of Q of d_model / heads over 2", "multiplier-other scores-scaled",
              query_scale_as(lambda s: s / 2)),
    elsewhere("window ignored", "window-ignored", {"hidden": lambda e, right, q, k: k > q}),
    elsewhere("window one too wide", "window-ignored", {"width": lambda e, right: right() + 1}),
    elsewhere("window one too narrow", "window-ignored", {"width": lambda e, right: right() - 1}),
    elsewhere("window in the other layers", "window-ignored window-applied", {"hidden": outside_windows}),
    elsewhere("scores capped at 5", "softcap-applied", {"capped": lambda e, right, x: 5 * np.tanh(x / 5)}),
    elsewhere("scores capped at 2", "softcap-applied", {"capped": lambda e, right, x: 2 * np.tanh(x / 2)}),
    elsewhere("scores of what is normed", "qk-norm-applied qk-norm-after-rope", {"scores": normed_plainly}),
    elsewhere("ALiBi left out", "alibi-wrong", slopes_as(lambda s: 0 * s)),
    elsewhere("ALiBi's sign", "alibi-wrong", slopes_as(lambda s: -s)),
    elsewhere("ALiBi's slopes reversed", "alibi-wrong", slopes_as(lambda s: s[::-1])),
    elsewhere("ALiBi's first slope 1", "alibi-wrong", slopes_as(lambda s: 2.0 ** (-8.0 * np.arange(len(s)) / len(s)))),
    elsewhere("ALiBi's slopes all 1", "alibi-wrong", slopes_as(np.ones_like)),
    elsewhere("sinks left out", "sinks-ignored", {"sinks": lambda e, right: None}),
    elsewhere("sinks zero", "sinks-ignored", sinks_as(lambda e, s: 0 * s)),
    elsewhere("sinks of the other layer", "sinks-ignored",
              sinks_as(lambda e, s: e.file[f"blk.{1 - e.layer}.attn_sinks.weight"])),
)  # fmt: skip
