"""Attention goes wrong: scale, mask, window, softmax, heads, ALiBi, sinks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from proof.unseen.bugs.bug import bug
from proof.unseen.bugs.rope import to_halves, to_pairs
from proof.unseen.engine import Engine


def _scale(change: Callable[[Engine, float], float]) -> Callable[..., Any]:
    return lambda e: change(e, Engine.scale(e))


def _queries(change: Callable[[Engine, float], float]) -> Callable[..., Any]:
    return lambda e: change(e, Engine.query_scale(e))


def _over(axis: int) -> Callable[..., Any]:
    def softmax(e: Engine, x: Any) -> Any:
        y = np.exp(x)
        return y / np.maximum(y.sum(axis=axis, keepdims=True), 1e-300)

    return softmax


def _mask_after(e: Engine, scores: Any) -> Any:
    queries, keys = e.at[:, None], np.arange(scores.shape[-1])[None]
    x = e.biased(scores.astype(np.float64) * e.scale(), queries, keys)
    return np.where(e.hidden(queries, keys), 0, e.softmax(x))


def _capped(cap: float) -> Callable[..., Any]:
    """Of scaled scores, before anything is added to them."""
    return lambda e, x, q, k: Engine.biased(e, cap * np.tanh(x / cap), q, k)


def _mapped(change: Callable[[Engine], Any]) -> Any:
    """Query heads read other KV heads, where there are fewer of them."""
    return lambda e: change(e) if e.kv_heads < e.heads and not e.has("attn_kv_a_mqa") else Engine.kv_head(e)


def _applied(width: int) -> Callable[..., Any]:
    """A window in layers that have none."""
    return lambda e, q, k: Engine.hidden(e, q, k) if e.local else (k > q) | (k <= q - width)


def _normed(e: Engine, x: Any) -> Any:
    y = x.astype(np.float64)
    return (y / np.sqrt((y * y).mean(axis=-1, keepdims=True) + e.eps)).astype(np.float32)


def _merged(order: tuple[int, ...]) -> Callable[..., Any]:
    return lambda e, heads: np.ascontiguousarray(heads.transpose(order)).reshape(heads.shape[1], -1)


def _slopes(change: Callable[[Any, int], Any]) -> Callable[..., Any]:
    return lambda e: change(Engine.slopes(e), e.heads)


def _sinks(change: Callable[[Engine, Any], Any]) -> Callable[..., Any]:
    def sinks(e: Engine) -> Any:
        own = Engine.sinks(e)
        return own if own is None else change(e, own)

    return sinks


def _permuted(order: Callable[[Any], Any]) -> Callable[..., Any]:
    """The rows of Q and K in another order within each head."""

    def qkv(e: Engine, y: Any) -> Any:
        q, k, v = Engine.qkv(e, y)
        return [order(x.reshape(len(x), -1, e.dim)).reshape(x.shape) for x in (q, k)] + [v]

    def unlike(e: Engine, y: Any) -> Any:
        return qkv(e, y) if e.arch.positions in ("pairs", "halves") else Engine.qkv(e, y)

    return unlike


def _v_rotated(e: Engine, y: Any) -> Any:
    q, k, v = Engine.qkv(e, y)
    if e.arch.positions not in ("pairs", "halves"):
        return q, k, v
    return q, k, e.rotated(v.reshape(len(v), -1, e.dim), "V").reshape(v.shape)


BUGS = (
    bug("scale missing", "attention-scale", scale=_scale(lambda e, s: 1.0)),
    bug("scale twice", "attention-scale", scale=_scale(lambda e, s: s * s)),
    bug("scale of d_model", "attention-scale", scale=_scale(lambda e, s: 1 / math.sqrt(256))),
    bug("scale 0.3", "attention-scale-other", scale=lambda e: 0.3, unlike=("gemma3", "phi3")),
    bug("scale of head size for the file's", "attention-scale attention-scale-other", scale=lambda e:
        1 / math.sqrt(e.dim), unlike=("gemma3", "phi3")),
    bug("scale of Q left out", "multiplier-missing attention-scale scores-scaled", query_scale=lambda e: 1.0),
    bug("scale of Q, and of the scores", "attention-scale attention-scale-other", scale=lambda e:
        1 / math.sqrt(e.dim) if e.arch.queries_scaled else Engine.scale(e)),
    bug("scale of Q of d_model / heads over 2", "multiplier-other scores-scaled", query_scale=_queries(lambda e, s:
        s / 2)),
    bug("scale in the scores as well", "scores-scaled multiplier-missing",  # gemma3: Q's multiplier, 1 / 8, twice
        scores=lambda e, q, k: Engine.scores(e, q, k) / 8),
    bug("no mask", "mask-missing", hidden=lambda e, q, k: k < 0 * q, unlike=("gemma3", "gpt-oss")),
    bug("mask shows the next", "mask-shifted", hidden=lambda e, q, k: Engine.hidden(e, q + 1, k)
        if not e.local else Engine.hidden(e, q, k)),
    bug("mask hides the own key, but the first", "mask-shifted", hidden=lambda e, q, k:
        Engine.hidden(e, q, k) | ((k >= q) & (k > 0)), unlike=("gemma3", "gpt-oss")),
    bug("mask after the softmax", "mask-after-softmax", probabilities=_mask_after),
    bug("window of 4", "window-applied", hidden=_applied(4)),
    bug("window of 8", "window-applied", hidden=_applied(8)),
    bug("window ignored", "window-ignored", hidden=lambda e, q, k: k > q),
    bug("window one too wide", "window-ignored", width=lambda e: Engine.width(e) + 1),
    bug("window one too narrow", "window-ignored", width=lambda e: Engine.width(e) - 1),
    bug("window in the other layers", "window-ignored window-applied", hidden=lambda e, q, k:
        k > q if e.local or not e.arch.window else (k > q) | (k <= q - e.width())),
    bug("scores capped at 5", "softcap-applied", biased=_capped(5.0)),
    bug("scores capped at 2", "softcap-applied", biased=_capped(2.0)),
    bug("softmax over queries", "softmax-axis", softmax=_over(-2), unlike=("gpt-oss",)),
    bug("softmax over heads", "softmax-axis", softmax=_over(-3), unlike=("gpt-oss",)),
    bug("no softmax", "softmax-missing", softmax=lambda e, x: np.where(np.isfinite(x), x, 0)),
    bug("heads tiled", "heads-tiled", kv_head=_mapped(lambda e: np.arange(e.heads) % e.kv_heads)),
    bug("heads tiled in scores", "heads-tiled", key_head=_mapped(lambda e: np.arange(e.heads) % e.kv_heads)),
    bug("heads tiled in values", "heads-tiled", value_head=_mapped(lambda e: np.arange(e.heads) % e.kv_heads)),
    bug("heads reversed", "heads-tiled", kv_head=_mapped(lambda e: Engine.kv_head(e)[::-1])),
    bug("heads all of the first", "heads-tiled", kv_head=_mapped(lambda e: 0 * Engine.kv_head(e))),
    bug("scores of what is normed", "qk-norm-applied qk-norm-after-rope",
        scores=lambda e, q, k: Engine.scores(e, _normed(e, q), _normed(e, k))),
    bug("heads not transposed", "heads-merged-wrong", merged=_merged((0, 1, 2))),
    bug("heads interleaved", "heads-merged-wrong", merged=_merged((1, 2, 0))),
    bug("ALiBi left out", "alibi-wrong", biased=lambda e, x, q, k: x),
    bug("ALiBi's sign", "alibi-wrong", slopes=_slopes(lambda s, n: -s)),
    bug("ALiBi's slopes reversed", "alibi-wrong", slopes=_slopes(lambda s, n: s[::-1])),
    bug("ALiBi's first slope 1", "alibi-wrong", slopes=_slopes(lambda s, n: 2.0 ** (-8.0 * np.arange(n) / n))),
    bug("ALiBi's slopes all 1", "alibi-wrong", slopes=_slopes(lambda s, n: np.ones(n))),
    bug("sinks left out", "sinks-ignored", sinks=lambda e: None),
    bug("sinks zero", "sinks-ignored", sinks=_sinks(lambda e, s: 0 * s)),
    bug("sinks of the other layer", "sinks-ignored", sinks=_sinks(lambda e, s:
        e.file[f"blk.{1 - e.layer}.attn_sinks.weight"])),
    bug("Q, K to halves", "qk-permuted", qkv=_permuted(to_halves)),
    bug("Q, K to pairs", "qk-permuted", qkv=_permuted(to_pairs)),
    bug("RoPE on V", "rope-on-v", qkv=_v_rotated),
)  # fmt: skip
