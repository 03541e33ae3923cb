"""Attention goes wrong: heads, cache, scale, mask, softmax, merging."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from faulty import with_maths
from llamaref import Engine, ops

from proof.injected.base import (
    DECODE,
    DENSE,
    EVERY,
    PREFILL,
    Build,
    Injection,
    altered,
    altered_at,
    rms,
    round_bf16,
    round_f16,
)

SOFTMAX = ("kq_soft_max",)
KQ, KQV = ("kq",), ("kqv_out",)
GROUPED = ("llama", "qwen3", "moe")


def _keys(change: Callable[[Any, int], Any]) -> dict[str, Any]:
    """Scores of change(keys [b, s, k, d], query heads)."""
    return {"attention_scores": lambda q, k: ops.attention_scores(q, change(k, q.shape[2]))}


def _values(change: Callable[[Any, int], Any]) -> dict[str, Any]:
    return {"attention_values": lambda probs, v: ops.attention_values(probs, change(v, probs.shape[1]))}


def _cache(change: Callable[[Any, int], Any]) -> Build:
    return with_maths(**_keys(change), **_values(change))


def _tiled(x: Any, heads: int) -> Any:
    return x[:, :, np.arange(heads) % x.shape[2]]


def _reversed(x: Any, heads: int) -> Any:
    return x[:, :, (x.shape[2] - 1) - np.arange(heads) * x.shape[2] // heads]


def _first_head(x: Any, heads: int) -> Any:
    return x[:, :, np.zeros(heads, int)]


def _row_before(x: Any, heads: int) -> Any:
    return x[:, np.maximum(np.arange(x.shape[1]) - 1, 0)]


def _row_late(x: Any, heads: int) -> Any:
    """Written one slot too far on; slot 0 is empty."""
    return np.concatenate([np.zeros_like(x[:, :1]), x[:, :-1]], axis=1)


def _row_early(x: Any, heads: int) -> Any:
    """Read one slot too far on; the last one is empty."""
    return np.concatenate([x[:, 1:], np.zeros_like(x[:, :1])], axis=1)


def _stale(x: Any, run: Any) -> Any:
    """A decode step's scores before its own row is written: the slot is empty."""
    out, own = x.copy(), np.arange(PREFILL, x.shape[-1])
    out[..., own, own] = 0
    return out


def _stale_values(x: Any, run: Any) -> Any:
    return ops.attention_values(_stale(run["kq_soft_max"], run), run["kv_v"])


def _unrotated(sides: str) -> Build:
    """Scores of Q or K as they went into RoPE."""

    def build(path: Path) -> Engine:
        kept: list[Any] = []

        def keeping(right: Callable[..., Any]) -> Callable[..., Any]:
            def rotate(x: Any, cos: Any, sin: Any) -> Any:
                kept.append(x)
                return right(x, cos, sin)

            return rotate

        def scores(q: Any, k: Any) -> Any:
            raw_k, raw_q = kept.pop(), kept.pop()
            return ops.attention_scores(raw_q if "q" in sides else q, raw_k if "k" in sides else k)

        maths = {"rope_pairs": keeping(ops.rope_pairs), "rope_halves": keeping(ops.rope_halves)}
        return with_maths(**maths, attention_scores=scores)(path)

    return build


def _normed_scores(x: Any, run: Any) -> Any:
    """Q and K go through their norm, or one without a weight, once they are rotated."""

    def normed(side: str) -> Any:
        stem = f"attn_{side.lower()}_norm"
        has = f"blk.{run.layer}.{stem}.weight" in run.engine.w
        y = rms(run[f"{side}cur_rope"], run.engine.config.rms_eps) * (run.weight(stem) if has else 1)
        return y.astype(x.dtype)

    return ops.attention_scores(normed("Q"), normed("K"))


def _scale(change: Callable[[float], float]) -> Build:
    return with_maths(causal_softmax=lambda x, scale, q, k: ops.causal_softmax(x, change(scale), q, k))


def _scaled_in_product(softmax_scale: float | None) -> Build:
    """The product of Q and K is scaled; the softmax then scales again, or by ``softmax_scale``."""
    return with_maths(
        attention_scores=lambda q, k: ops.attention_scores(q * np.float32(q.shape[-1] ** -0.5), k),
        causal_softmax=lambda x, scale, q, k: ops.causal_softmax(x, softmax_scale or scale, q, k),
    )


def _softmax(fault: Callable[[Any, Any], Any]) -> Build:
    """Probabilities fault(scaled scores [b, h, t, s], hidden [t, s])."""

    def softmax(x: Any, scale: float, queries: Any, keys: Any) -> Any:
        with np.errstate(all="ignore"):
            return np.asarray(fault(x * np.float32(scale), keys[None, :] > queries[:, None]), x.dtype)

    return with_maths(causal_softmax=softmax)


def _visible(hidden: Callable[[Any, Any], Any], floor: float = -np.inf) -> Build:
    """The softmax over the keys that hidden(queries [t, 1], keys [1, s]) leaves."""

    def softmax(x: Any, scale: float, queries: Any, keys: Any) -> Any:
        masked = hidden(queries[:, None], keys[None, :])
        with np.errstate(invalid="ignore"):
            return ops.softmax(np.where(masked, np.float32(floor), x * np.float32(scale)))

    return with_maths(causal_softmax=softmax)


def _over(axis: int) -> Build:
    """The softmax over an axis, of what the causal loop visits."""

    def softmax(x: Any, hidden: Any) -> Any:
        e = np.where(hidden, 0, np.exp(x.astype(np.float64)))
        return np.where(hidden, 0, e / e.sum(axis=axis, keepdims=True))

    return _softmax(softmax)


def _over_heads(x: Any, hidden: Any) -> Any:
    """Over the first axis but one, of masked scores: where all heads are masked it is 0 / 0."""
    e = np.where(hidden, 0, np.exp(x.astype(np.float64)))
    return e / e.sum(axis=1, keepdims=True)


def _without_maximum(x: Any, hidden: Any) -> Any:
    e = np.where(hidden, np.float32(0), np.exp(x))
    return e / e.sum(axis=-1, keepdims=True)


def _merged(order: tuple[int, ...]) -> Build:
    """Heads [b, h, t, d] laid out in another order of axes."""

    def values(probs: Any, v: Any) -> Any:
        b, h, t, _ = probs.shape
        right = ops.attention_values(probs, v).reshape(b, t, h, -1).transpose(0, 2, 1, 3)
        return np.ascontiguousarray(right.transpose(order)).reshape(b, t, -1)

    return with_maths(attention_values=values)


def quantized(kind: str, x: Any) -> Any:
    """Values through the blocks of a type."""
    to = gguf.GGMLQuantizationType[kind]
    rows = np.ascontiguousarray(x, np.float32).reshape(-1, x.shape[-1])
    return gguf.quants.dequantize(gguf.quants.quantize(rows, to), to).reshape(x.shape)


_q8_0 = partial(quantized, "Q8_0")


def rounded_cache(rounded: Callable[[Any], Any]) -> Build:
    return _cache(lambda x, heads: rounded(x))


def _rounded_scores(rounded: Callable[[Any], Any]) -> Build:
    return with_maths(causal_softmax=lambda x, scale, q, k: ops.causal_softmax(rounded(x), scale, q, k))


def _capped(cap: float) -> Build:
    def softmax(x: Any, scale: float, queries: Any, keys: Any) -> Any:
        return ops.causal_softmax(cap * np.tanh(x * np.float32(scale) / cap), 1.0, queries, keys)

    return with_maths(causal_softmax=softmax)


INJECTIONS = (
    Injection("heads tiled", "heads-tiled", KQ + KQV, _cache(_tiled), GROUPED),
    Injection("heads tiled in scores", "heads-tiled", KQ, with_maths(**_keys(_tiled))),
    Injection("heads tiled in values", "heads-tiled", KQV, with_maths(**_values(_tiled))),
    Injection("heads reversed", "heads-tiled", KQ + KQV, _cache(_reversed), DENSE),
    Injection("heads all of the first", "heads-tiled", KQ + KQV, _cache(_first_head), ("llama", "qwen2")),
    Injection("scores before RoPE", "scores-before-rope", KQ, _unrotated("qk"), DENSE),
    Injection("scores of unrotated Q", "scores-before-rope", KQ, _unrotated("q")),
    Injection("scores of unrotated K", "cache-before-rope", KQ, _unrotated("k")),
    Injection("scores of what is normed again", "qk-norm-after-rope", KQ, altered(kq=_normed_scores), ("qwen3",)),
    Injection("scores of what is normed without weight", "qk-norm-applied", KQ, altered(kq=_normed_scores)),
    Injection("scale in the scores", "scores-scaled", KQ + SOFTMAX, _scaled_in_product(1.0), DENSE, choice=True),
    Injection("scale in the scores as well", "scores-scaled", KQ, _scaled_in_product(None)),
    Injection("cache: row of the token before", "cache-row-off", KQ + KQV, _cache(_row_before), DENSE),
    Injection("cache: keys' row of the token before", "cache-row-off", KQ, with_maths(**_keys(_row_before))),
    Injection("cache: values' row of the token before", "cache-row-off", KQV, with_maths(**_values(_row_before))),
    Injection("cache: written a slot late", "cache-row-off", KQ + KQV, _cache(_row_late)),
    Injection("cache: read a slot early", "cache-row-off", KQ + KQV, _cache(_row_early)),
    Injection("cache: own row not yet written", "cache-row-off", KQ + KQV,
              altered(kq=_stale, kqv_out=_stale_values), decode=DECODE),
    Injection("scale missing", "attention-scale", SOFTMAX, _scale(lambda s: 1.0), EVERY),
    Injection("scale twice", "attention-scale", SOFTMAX, _scale(lambda s: s * s), DENSE),
    Injection("scale of d_model", "attention-scale", SOFTMAX, _scale(lambda s: 256**-0.5), DENSE),
    Injection("scale of d_model / KV heads", "attention-scale", SOFTMAX,
              _scale(lambda s: (256 / 2) ** -0.5), ("llama", "qwen3")),
    Injection("scale of 96", "attention-scale-other", SOFTMAX, _scale(lambda s: 96**-0.5), DENSE),
    Injection("scale 0.3", "attention-scale-other", SOFTMAX, _scale(lambda s: 0.3)),
    Injection("no mask", "mask-missing", SOFTMAX, _visible(lambda q, k: k < 0), EVERY),
    Injection("mask shows the next", "mask-shifted", SOFTMAX, _visible(lambda q, k: k > q + 1), DENSE),
    Injection("mask hides the own key, but the first", "mask-shifted", SOFTMAX,
              _visible(lambda q, k: (k >= q) & (k > 0)), DENSE),
    Injection("mask hides the own key", "mask-shifted", SOFTMAX, _visible(lambda q, k: k >= q)),
    Injection("mask of -1e9 hides the own key", "mask-shifted", SOFTMAX, _visible(lambda q, k: k >= q, -1e9)),
    Injection("steps do not see themselves", "decode-key-unseen", SOFTMAX,
              _visible(lambda q, k: (k > q) | (k == q) & (q >= PREFILL)), DENSE, decode=DECODE),
    Injection("steps see only themselves", "decode-key-unseen", SOFTMAX,
              _visible(lambda q, k: (k > q) | (k < q) & (q >= PREFILL)), DENSE, decode=DECODE),
    Injection("mask after the softmax", "mask-after-softmax", SOFTMAX,
              _softmax(lambda x, hidden: np.where(hidden, 0, ops.softmax(x))), DENSE),
    Injection("window of 4", "window-applied", SOFTMAX, _visible(lambda q, k: (k > q) | (k <= q - 4)), DENSE),
    Injection("window of 8", "window-applied", SOFTMAX, _visible(lambda q, k: (k > q) | (k <= q - 8))),
    Injection("scores capped at 50", "softcap-applied", SOFTMAX, _capped(50.0), DENSE),
    Injection("scores capped at 30", "softcap-applied", SOFTMAX, _capped(30.0)),
    Injection("softmax over queries", "softmax-axis", SOFTMAX, _over(-2), DENSE),
    Injection("softmax over heads", "softmax-axis", SOFTMAX, _over(-3), DENSE),
    Injection("softmax of masked scores over heads", "softmax-axis", SOFTMAX, _softmax(_over_heads), DENSE),
    Injection("exp overflows", "softmax-overflow", SOFTMAX, _softmax(_without_maximum), ("llama-large",)),
    Injection("no softmax", "softmax-missing", SOFTMAX, _softmax(lambda x, hidden: np.where(hidden, 0, x)), DENSE),
    Injection("heads not transposed", "heads-merged-wrong", KQV, _merged((0, 1, 2, 3)), DENSE),
    Injection("heads interleaved", "heads-merged-wrong", KQV, _merged((0, 2, 3, 1)), DENSE),
    Injection("cache in float16", "cache-rounded", KQ + KQV, rounded_cache(round_f16), DENSE,
              says="reads K from a cache of type F16"),
    Injection("cache in bfloat16", "cache-rounded", KQ + KQV, rounded_cache(round_bf16),
              says="reads K from a cache of type BF16"),
    Injection("cache in Q8_0", "cache-rounded", KQ + KQV, rounded_cache(_q8_0), DENSE,
              says="reads K from a cache of type Q8_0"),
    Injection("recorded cache in Q8_0", "cache-rows-rounded", ("kv_k", "kv_v"),
              altered_at(["kv_k", "kv_v"], lambda x, run: _q8_0(x)), says="keeps its rows as Q8_0"),
    Injection("softmax of float16", "softmax-of-rounded", SOFTMAX, _rounded_scores(round_f16), DENSE,
              says="rounds scaled scores to F16"),
    Injection("softmax of bfloat16", "softmax-of-rounded", SOFTMAX, _rounded_scores(round_bf16),
              says="rounds scaled scores to BF16"),
)  # fmt: skip
