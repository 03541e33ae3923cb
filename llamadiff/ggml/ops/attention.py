"""Softmax with mask, ALiBi and sinks; flash attention."""

from __future__ import annotations

import math

import numpy as np

from llamadiff.arithmetic import round_f16
from llamadiff.ggml.op import Array, Op, op
from llamadiff.ggml.ops.products import rounded


def slopes(n_head: int, max_bias: float) -> Array:
    """ALiBi's slope of each head (arXiv:2108.12409; ggml_compute_forward_soft_max): [head, 1, 1]."""
    if max_bias <= 0:
        return np.ones((n_head, 1, 1))
    power = 1 << math.floor(math.log2(n_head))
    first, second = 2.0 ** (-max_bias / power), 2.0 ** (-max_bias / 2 / power)
    heads = [first ** (h + 1) if h < power else second ** (2 * (h - power) + 1) for h in range(n_head)]
    return np.asarray(heads)[:, None, None]


def _masked(x: Array, mask: Array | None, max_bias: float) -> Array:
    """Scores [.., head, query, key] plus slope times mask; the mask may have more rows than there are queries."""
    if mask is None:
        return x
    mask = mask[..., : x.shape[-2], :].astype(np.float64)
    for axis in (-4, -3):
        if 1 < mask.shape[axis] < x.shape[axis]:
            mask = np.concatenate([mask] * (x.shape[axis] // mask.shape[axis]), axis=axis)
    with np.errstate(invalid="ignore"):
        return np.asarray(x + slopes(x.shape[-3], max_bias) * mask)


def probabilities(x: Array, sinks: Array | None) -> Array:
    """exp(x - max) / sum over keys; a sink [head] is one more key, that has no value."""
    peak = x.max(axis=-1, keepdims=True)
    sink = None if sinks is None else sinks.reshape(*sinks.shape[:-4], -1)[..., :, None, None].astype(np.float64)
    peak = peak if sink is None else np.maximum(peak, sink)
    e = np.exp(x - np.where(np.isfinite(peak), peak, 0.0))
    total = e.sum(axis=-1, keepdims=True)
    total = total if sink is None else total + np.exp(sink - peak)
    return np.asarray(np.divide(e, total, out=np.zeros_like(e), where=total > 0))


@op("SOFT_MAX")
def soft_max(n: Op) -> Array:
    """softmax(scale * x + slope * mask): params[0] scale, params[1] max_bias; sources x, mask, sinks."""
    x = n.x().astype(np.float64) * float(n.floats[0])
    masked = _masked(x, n.optional(1), float(n.floats[1]))
    return probabilities(masked, n.optional(2)).astype(np.float32)


@op("FLASH_ATTN_EXT", rounds=True)
def flash_attn_ext(n: Op) -> Array:
    """q [.., head, t, d], k and v [.., kv, s, d], mask, sinks -> [.., t, head, d] (arXiv:2205.14135).

    params: scale, max_bias, softcap. Queries are rounded as K's type asks.
    """
    q, k, v = rounded(n.x(), n.source_kind(1), n.exact).astype(np.float64), n.x(1), n.x(2)
    scale, max_bias, cap = (float(value) for value in n.floats[:3])
    k, v = (np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3).astype(np.float64) for x in (k, v))
    scores = np.matmul(q, k.swapaxes(-1, -2)) * scale
    scores = cap * np.tanh(scores / cap) if cap else scores
    scores = _masked(scores, n.optional(3), max_bias)
    if n.source_kind(2) == "f16" and not n.exact:
        return _summed_in_half(scores, v, n.optional(4)).swapaxes(-2, -3)
    probs = probabilities(scores, n.optional(4))
    return np.asarray(np.matmul(probs, v).swapaxes(-2, -3), np.float32)


def _summed_in_half(scores: Array, v: Array, sinks: Array | None) -> Array:
    """Key after key, as ggml does with V in float16: the sum is kept in float16 and scaled anew at each new maximum.

    Scores [.., head, t, s], v [.., head, s, d] -> [.., head, t, d]; from ops.cpp,
    ggml_compute_forward_flash_attn_ext_f16_one_chunk.
    """
    scores = scores.astype(np.float32)
    total = np.zeros((*scores.shape[:-1], v.shape[-1]), np.float32)
    peak, size = np.full(scores.shape[:-1], -np.inf, np.float32), np.zeros(scores.shape[:-1], np.float32)
    for key in range(scores.shape[-1]):
        s = scores[..., key]
        seen = np.isfinite(s)
        if not seen.any():
            continue
        new = seen & (s > peak)
        shrink = np.where(new, np.where(np.isfinite(peak), np.exp(peak - s), 0), 1).astype(np.float32)
        peak = np.where(new, s, peak)
        weight = np.where(seen, np.exp(np.where(seen, s - peak, 0)), 0).astype(np.float32)
        total = np.where(new[..., None], round_f16(total * shrink[..., None]), total)
        added = round_f16(total + v[..., key, None, :].astype(np.float32) * weight[..., None])
        total = np.where(seen[..., None], added, total)
        size = size * shrink + weight
    if sinks is not None:
        sink = sinks.reshape(*sinks.shape[:-4], -1)[..., :, None].astype(np.float32)
        shrink = np.exp(np.minimum(peak - sink, 0))
        total, size = total * shrink[..., None], size * shrink + np.exp(np.minimum(sink - peak, 0))
    return np.divide(total, size[..., None], out=np.zeros_like(total), where=size[..., None] > 0)
