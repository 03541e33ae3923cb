"""Softmax with mask, ALiBi and sinks; flash attention."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from llamadiff.ext.graph.op import Array, Kernels, Op, op
from llamadiff.numerics import cpu, metrics, tolerances
from llamadiff.numerics.halves import round_f16

# mean squares of rounding to float16: relative, and at the smallest numbers
_U2, _STEP2 = tolerances.ROUNDING["f16"], 2.0**-48 / 12


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


def _in_tiles(n: Op) -> bool:
    kinds = {n.source_kind(1), n.source_kind(2)}
    return n.x().shape[-2] >= cpu.FLASH_TILE and len(kinds) == 1 and kinds <= {"f16", "f32"}


def _sums_in_half(n: Op) -> bool:
    return n.source_kind(2) == "f16" and not _in_tiles(n)


def _kernels(n: Op) -> tuple[int, ...]:
    """Of how many channels of a head the weights are float16 too: none, all, or all but the rest of a step."""
    if not _sums_in_half(n):
        return () if _in_tiles(n) else (0,)
    width = n.x(2).shape[-1]
    return tuple(dict.fromkeys((0, width, *(width - width % lanes for lanes in cpu.FLASH_LANES))))


def _unfollowed(n: Op) -> float:
    return lost_in_half(n) if _sums_in_half(n) else 0.0


def lost_in_half(n: Op) -> float:
    """NMSE of all the roundings to float16 in ``_RunningSums``, each as large as it can be on average."""
    sums = _RunningSums.of(*_scores_and_values(n), halves=n.x(2).shape[-1])
    return metrics.ratio(float(sums.squared_error.sum()), float(np.square(sums.total, dtype=np.float64).sum()))


@op("FLASH_ATTN_EXT", rounds=Kernels(_kernels, _unfollowed))
def flash_attn_ext(n: Op) -> Array:
    """q [.., head, t, d], k and v [.., kv, s, d], mask, sinks -> [.., t, head, d] (arXiv:2205.14135).

    params: scale, max_bias, softcap. What is rounded depends on the CPU, the types and the number of queries
    (ggml-cpu/ops.cpp, ggml_compute_forward_flash_attn_ext_f16): with 64 queries or more, and K and V both float16 or
    both float32, nothing is. Else queries are rounded as K's type asks, and where V is float16 sums are kept in it.
    """
    scores, v = _scores_and_values(n)
    if _sums_in_half(n) and not n.exact:
        return _RunningSums.of(scores, v, n.kernel).over(n.optional(4)).swapaxes(-2, -3)
    probs = probabilities(scores, n.optional(4))
    return np.asarray(np.matmul(probs, v).swapaxes(-2, -3), np.float32)


def _scores_and_values(n: Op) -> tuple[Array, Array]:
    """Scores [.., head, t, s] with scale, cap and mask, and v [.., head, s, d], both float64."""
    q = n.x() if _in_tiles(n) else n.rounded(n.x(), n.source_kind(1))[0]
    q = q.astype(np.float64)
    k, v = (np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3).astype(np.float64) for x in (n.x(1), n.x(2)))
    scale, max_bias, cap = (float(value) for value in n.floats[:3])
    scores = np.matmul(q, k.swapaxes(-1, -2)) * scale
    scores = cap * np.tanh(scores / cap) if cap else scores
    return _masked(scores, n.optional(3), max_bias), v


@dataclass
class _RunningSums:
    """Weighted values, summed key after key as ggml does with V in float16 (flash_attn_ext_f16_one_chunk).

    ``total`` [.., head, t, d] is kept in float16, and scaled anew when a score ``peak``s; ``size`` is the sum of the
    weights. Each key rounds the sum (vec.h, ggml_vec_mad_f16). Where the CPU multiplies in float16 the weight itself is
    rounded as well: in the first ``halves`` channels of each head. A new peak rounds the sum (ggml_vec_scale_f16) and
    there its factor. ``squared_error``: what all of these leave on average at most, u^2 times the square of what is
    rounded, u^2 = 2^-22 / 3, and the step of the smallest numbers, 2^-24.
    """

    total: Array
    size: Array
    peak: Array
    halves: Array
    squared_error: Array

    @classmethod
    def of(cls, scores: Array, v: Array, halves: int) -> _RunningSums:
        """Sums over all keys of scores [.., head, t, s] and v [.., head, s, d]."""
        shape, scores = (*scores.shape[:-1], v.shape[-1]), scores.astype(np.float32)
        one = np.zeros(shape[:-1], np.float32)
        sums = cls(np.zeros(shape), one, one - np.inf, np.arange(shape[-1]) < halves, np.zeros(shape))
        for key in range(scores.shape[-1]):
            if np.isfinite(scores[..., key]).any():
                sums._add(scores[..., key], v[..., key, None, :])
        return sums

    def _add(self, s: Array, v: Array) -> None:
        seen = np.isfinite(s)
        new = seen & (s > self.peak)
        shrink = np.exp(np.where(new & np.isfinite(self.peak), self.peak - s, np.where(new, -np.inf, 0)))
        self.peak = np.where(new, s, self.peak)
        weight = np.exp(np.where(seen, s - self.peak, -np.inf))
        self.size = self.size * shrink + weight
        factor, weights = self._factor(shrink), self._factor(weight)
        before = self.total
        self.total = np.where(new[..., None], self._rounded(before * factor), before)
        added = v * weights
        self.total = np.where(seen[..., None], self._rounded(self.total + added), before)
        self.squared_error *= shrink[..., None].astype(np.float64) ** 2
        self.squared_error += new[..., None] * (2 * _U2 * (before * factor) ** 2 + _STEP2)
        self.squared_error += seen[..., None] * (_U2 * (self.total**2 + added**2) + _STEP2 * (1 + v**2))

    def _factor(self, x: Array) -> Array:
        """A number for each row as its channels are multiplied by it."""
        return np.where(self.halves, round_f16(x)[..., None], x[..., None]).astype(np.float64)

    def _rounded(self, x: Array) -> Array:
        """To float16: at once, or through float32."""
        return np.where(self.halves, round_f16(x), round_f16(x.astype(np.float32)))

    def over(self, sinks: Array | None) -> Array:
        """The sums divided by the weights' sum; a sink [head] is one more weight."""
        total, size = self.total.astype(np.float32), self.size
        if sinks is not None:
            sink = sinks.reshape(*sinks.shape[:-4], -1)[..., :, None].astype(np.float32)
            shrink = np.exp(np.minimum(self.peak - sink, 0))
            total, size = total * shrink[..., None], size * shrink + np.exp(np.minimum(sink - self.peak, 0))
        return np.divide(total, size[..., None], out=np.zeros_like(total), where=size[..., None] > 0)
