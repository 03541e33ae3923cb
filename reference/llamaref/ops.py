"""The maths: pure functions on arrays, each using only those above it.

Axes: b batch, t token (query), s token (key), h head, k KV head, d dim. Every function accepts any
leading batch axes. Norms and softmax are computed in float64 and returned in the dtype they got; a softmax of many keys
is computed in that dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamaref.config import Rope
from llamaref.in_cache import by_rows

Array = NDArray[Any]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    def scaled(rows: Array) -> Array:
        wide = rows.astype(np.float64)
        mean_square = (wide[..., None, :] @ wide[..., None])[..., 0] / rows.shape[-1]
        wide /= np.sqrt(mean_square + eps)
        return np.multiply(wide, weight, out=wide)

    return by_rows(scaled, x, kept=weight.ndim)


def layer_norm(x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis (Ba et al. 2016, arXiv:1607.06450)."""

    def scaled(rows: Array) -> Array:
        wide = rows.astype(np.float64)
        wide -= wide.mean(axis=-1, keepdims=True)
        wide /= np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + eps)
        wide *= weight
        return wide if bias is None else np.add(wide, bias, out=wide)

    return by_rows(scaled, x, kept=weight.ndim)


def rope_theta(rope: Rope, positions: Array, freq_factors: Array | None = None) -> Array:
    """Every position's angles: [token, n_rot / 2].

    theta_i = position * base^(-2i / n_rot) (Su et al. 2021, arXiv:2104.09864), divided by llama 3's
    frequency factors; YaRN blends divided and plain angles (Peng et al. 2023, arXiv:2309.00071).
    """
    half = np.arange(rope.n_rot // 2)
    frequency = rope.base ** (-2.0 * half / rope.n_rot)  # [n_rot / 2]
    if freq_factors is not None:
        frequency = frequency / freq_factors
    theta = positions.astype(np.float64)[:, None] * frequency  # [token, n_rot / 2]
    keep = yarn_keep(rope) if rope.yarn else np.zeros(len(half))
    return np.asarray(theta / rope.factor * (1 - keep) + theta * keep)


def rope_magnitude(rope: Rope) -> float:
    """What cos and sin are multiplied by: YaRN's attention temperature, section 3.4 of the paper.

    llama.cpp applies none for factors up to 1, and none where the scores have it (log_mul).
    """
    stretched = rope.yarn and rope.factor > 1.0 and not rope.log_mul
    return rope.attn_factor * (1.0 + 0.1 * math.log(rope.factor) if stretched else 1.0)


def yarn_keep(rope: Rope) -> Array:
    """How much of each frequency YaRN leaves unscaled: 1 above beta_fast turns, 0 below beta_slow. [n_rot / 2]."""
    low = max(0.0, math.floor(_yarn_pair(rope, rope.beta_fast)))
    high = min(rope.n_rot - 1.0, math.ceil(_yarn_pair(rope, rope.beta_slow)))
    ramp = (np.arange(rope.n_rot // 2) - low) / max(0.001, high - low)
    return np.asarray(1.0 - np.clip(ramp, 0.0, 1.0))


def _yarn_pair(rope: Rope, turns: float) -> float:
    """The pair whose angle turns ``turns`` times over the original context."""
    return rope.n_rot * math.log(rope.n_ctx_orig / (turns * 2 * math.pi)) / (2 * math.log(rope.base))


def rope_angles(rope: Rope, positions: Array, freq_factors: Array | None = None) -> tuple[Array, Array]:
    """cos and sin of the angles, times the magnitude: each [token, n_rot / 2], float64."""
    theta, magnitude = rope_theta(rope, positions, freq_factors), rope_magnitude(rope)
    return np.cos(theta) * magnitude, np.sin(theta) * magnitude


def rope_pairs(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate neighbours (2i, 2i+1) of each head: x [..., t, h, d]; cos, sin [..., t, n_rot / 2]."""

    def rotated(rows: Array, c: Array, s: Array) -> Array:
        out, n_rot = rows.copy(), 2 * c.shape[-1]
        even, odd = rows[..., 0:n_rot:2], rows[..., 1:n_rot:2]  # [..., t, h, n_rot / 2]
        out[..., 0:n_rot:2] = even * c - odd * s
        out[..., 1:n_rot:2] = even * s + odd * c
        return out

    return by_rows(rotated, x, _every_head(cos, x), _every_head(sin, x), kept=2)


def rope_halves(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate (i, i + n_rot / 2) of each head: x [..., t, h, d]; cos, sin [..., t, n_rot / 2]."""

    def rotated(rows: Array, c: Array, s: Array) -> Array:
        out, half = rows.copy(), c.shape[-1]
        first, second = rows[..., :half], rows[..., half : 2 * half]  # [..., t, h, n_rot / 2]
        out[..., :half] = first * c - second * s
        out[..., half : 2 * half] = first * s + second * c
        return out

    return by_rows(rotated, x, _every_head(cos, x), _every_head(sin, x), kept=2)


def _every_head(angles: Array, x: Array) -> Array:
    """cos or sin beside x [..., t, h, d], the same for every head: [..., t, 1, n_rot / 2]."""
    return np.broadcast_to(angles[..., None, :], (*x.shape[:-2], 1, angles.shape[-1]))


def attention_scores(q: Array, k: Array) -> Array:
    """Raw scores, query head h against KV head h // (heads a group): [b, t, h, d], [b, s, k, d] -> [b, h, t, s]."""
    b, t, h, d = q.shape
    n_kv, heads = k.shape[2], h // k.shape[2]
    grouped = q.reshape(b, t, n_kv, heads, d).transpose(0, 2, 3, 1, 4).reshape(b, n_kv, heads * t, d)
    return np.asarray(np.matmul(grouped, k.transpose(0, 2, 3, 1)).reshape(b, h, t, k.shape[1]))  # by [b, k, d, s]


def softmax(x: Array) -> Array:
    """exp(x - max) / sum over the last axis."""

    def shares(rows: Array) -> Array:
        wide = rows.astype(np.float64)
        wide -= wide.max(axis=-1, keepdims=True)
        np.exp(wide, out=wide)
        wide /= wide.sum(axis=-1, keepdims=True)
        return wide

    return by_rows(shares, x)


def softmax_of_many(x: Array) -> Array:
    """The same in the dtype of x: several times as fast, and off by its last digits."""

    def shares(rows: Array) -> Array:
        grown: Array = rows - rows.max(axis=-1, keepdims=True)
        np.exp(grown, out=grown)
        grown *= 1 / grown.sum(axis=-1, keepdims=True)
        return grown

    return by_rows(shares, x)


def causal_softmax(
    scores: Array, scale: float, query_positions: Array, key_positions: Array, sinks: Array | None = None
) -> Array:
    """Attention probabilities: a query sees keys at its own and earlier positions. [b, h, t, s] -> the same.

    ``sinks`` [h] are each head's score of a key without a value (Xiao et al. 2023, arXiv:2309.17453).
    """
    return _causal(softmax, scores, scale, query_positions, key_positions, sinks)


def causal_softmax_of_many(
    scores: Array, scale: float, query_positions: Array, key_positions: Array, sinks: Array | None = None
) -> Array:
    """The same by ``softmax_of_many``: of long prompts, where attention costs more than all else."""
    return _causal(softmax_of_many, scores, scale, query_positions, key_positions, sinks)


def _causal(
    softmax: Callable[[Array], Array],
    scores: Array,
    scale: float,
    query_positions: Array,
    key_positions: Array,
    sinks: Array | None,
) -> Array:
    hidden = key_positions[None, :] > query_positions[:, None]  # [t, s]
    first = int(np.append(hidden.any(axis=0), True).argmax())  # all keys before are seen

    def seen(some: Array, *beside: Array) -> Array:
        scaled = some * np.asarray(scale, scores.dtype)
        np.copyto(scaled[..., first:], -np.inf, where=hidden[:, first:])
        if not beside:
            return softmax(scaled)
        column = np.broadcast_to(beside[0], (*scaled.shape[:-1], 1)).astype(scaled.dtype)
        return np.asarray(softmax(np.concatenate([scaled, column], axis=-1))[..., :-1])

    columns = () if sinks is None else (np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1, 1)),)
    return by_rows(seen, scores, *columns, kept=2)


def softcap(x: Array, cap: float) -> Array:
    """cap * tanh(x / cap): values beyond the cap come near it (Bello et al. 2016, arXiv:1611.09940)."""
    return by_rows(lambda rows: np.tanh(rows * (1 / cap)) * cap, x)


def mask_window(scores: Array, window: int, query_positions: Array, key_positions: Array) -> Array:
    """Scores without those of keys that are ``window`` or more positions back. [b, h, t, s] -> the same."""
    hidden = query_positions[:, None] - key_positions[None, :] >= window  # [t, s]
    return np.asarray(np.where(hidden, -np.inf, scores), scores.dtype)


def attention_values(probs: Array, v: Array) -> Array:
    """Heads' weighted sums of values, merged: [b, h, t, s], [b, s, k, d] -> [b, t, h*d]."""
    b, h, t, s = probs.shape
    n_kv, d = v.shape[2:]
    grouped = probs.reshape(b, n_kv, h // n_kv * t, s)
    mixed = np.matmul(grouped, v.transpose(0, 2, 1, 3)).reshape(b, h, t, d)  # by [b, k, s, d]
    return np.ascontiguousarray(mixed.transpose(0, 2, 1, 3)).reshape(b, t, h * d)


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), as exp(min(x, 0)) / (1 + exp(-|x|)), which never overflows."""
    small = np.abs(x)
    np.exp(np.negative(small, out=small), out=small)
    above = np.maximum(small, x >= 0)  # exp(min(x, 0)): 1 where x is not negative
    small += 1
    return np.divide(above, small, out=above)


def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def swiglu(gate: Array, up: Array) -> Array:
    """silu(gate) * up (Shazeer 2020, arXiv:2002.05202)."""
    return by_rows(lambda g, u: silu(g) * u, gate, up)


def swiglu_oai(gate: Array, up: Array) -> Array:
    """gate * sigmoid(1.702 gate) * (up + 1), gate at most 7, up between -7 and 7 (OpenAI 2025, arXiv:2508.10925)."""

    def gated(g: Array, u: Array) -> Array:
        g, u = np.minimum(g, 7), np.clip(u, -7, 7)
        return np.asarray(g * sigmoid(1.702 * g) * (u + 1))

    return by_rows(gated, gate, up)


def gelu(x: Array) -> Array:
    """x / 2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))) (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""

    def some(rows: Array) -> Array:
        inner = math.sqrt(2 / math.pi) * rows * (1 + 0.044715 * rows * rows)
        return np.asarray(0.5 * rows * (1 + np.tanh(inner.astype(np.float64)).astype(rows.dtype)))

    return by_rows(some, x)


def top_k(probs: Array, k: int) -> Array:
    """Indices of the k largest values, largest first: [..., expert] -> [..., k] int32."""
    return np.argsort(-probs, axis=-1, kind="stable")[..., :k].astype(np.int32)


def best_groups(probs: Array, n_group: int, used: int) -> Array:
    """Minus infinity for experts outside the best groups, those whose two best sum to most: [..., expert] -> the same.

    DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2; 0 or 1 group: all of them.
    """
    if n_group <= 1:
        return probs
    grouped = probs.reshape(*probs.shape[:-1], n_group, -1)  # [..., group, expert / group]
    best = top_k(np.sort(grouped, axis=-1)[..., -2:].sum(axis=-1), used)  # [..., used]
    kept = (np.arange(n_group)[:, None] == best[..., None, :]).any(axis=-1)  # [..., group]
    return np.where(kept[..., None], grouped, -np.inf).reshape(probs.shape).astype(probs.dtype)


def normalize_weights(weights: Array) -> Array:
    """Router weights made to sum to one; the sum is at least float16's smallest normal (llama.cpp, build_moe_ffn)."""
    total = weights.sum(axis=-1, keepdims=True)
    return np.asarray(weights / np.maximum(total, np.asarray(2.0**-14, weights.dtype)))


def causal_conv(rows: Array, weight: Array) -> Array:
    """Every channel's weighted sum over a token and those before it: [b, k - 1 + t, c], [c, k] -> [b, t, c]."""
    spans = weight.shape[1]
    t = rows.shape[1] - spans + 1
    return np.asarray(sum(rows[:, back : back + t] * weight[:, back] for back in range(spans)))


def ssm_scan(x: Array, dt: Array, a: Array, b: Array, c: Array, state: Array) -> tuple[Array, Array]:
    """Selective scan with one decay a head (Dao & Gu 2024, arXiv:2405.21060): outputs as x, and the last state.

    x [b, t, h, d], dt [b, t, h] before its softplus, a [h], b and c [b, t, g, n], state [b, h, d, n].
    """
    group, out = x.shape[2] // b.shape[2], np.empty_like(x)
    dt = np.logaddexp(dt, np.zeros_like(dt))  # softplus
    keep = np.exp(dt * a)  # [b, t, h]
    for t in range(x.shape[1]):
        write, read = (np.repeat(part[:, t], group, axis=1)[..., None, :] for part in (b, c))  # [b, h, 1, n]
        state = state * keep[:, t, :, None, None] + write * (x * dt[..., None])[:, t, ..., None]  # [b, h, d, n]
        out[:, t] = np.matmul(state, read.swapaxes(-1, -2))[..., 0]
    return out, state


def weighted_sum(experts: Array, weights: Array) -> Array:
    """[b, t, used, embd], [b, t, used] -> [b, t, embd]."""
    return np.asarray((experts * weights[..., None]).sum(axis=-2))


def add(branch: Array, residual: Array) -> Array:
    """The residual connection."""
    return branch + residual
