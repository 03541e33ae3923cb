"""The maths: pure functions on arrays, each using only those above it.

Axes: b batch, t token (query), s token (key), h head, k KV head, d dim. Every function accepts any
leading batch axes. Norms and softmax are computed in float64 and returned in the dtype they got.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamaref.config import Rope

Array = NDArray[Any]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang & Sennrich 2019, arXiv:1910.07467)."""
    wide = x.astype(np.float64)
    mean_square = np.mean(wide * wide, axis=-1, keepdims=True)
    return np.asarray(wide / np.sqrt(mean_square + eps) * weight, x.dtype)


def layer_norm(x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis (Ba et al. 2016, arXiv:1607.06450)."""
    wide = x.astype(np.float64)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + eps) * weight
    return np.asarray(scaled if bias is None else scaled + bias, x.dtype)


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
    n_rot = 2 * cos.shape[-1]
    out = x.copy()
    even, odd = x[..., 0:n_rot:2], x[..., 1:n_rot:2]  # [..., t, h, n_rot / 2]
    c, s = cos[..., None, :], sin[..., None, :]  # [..., t, 1, n_rot / 2]
    out[..., 0:n_rot:2] = even * c - odd * s
    out[..., 1:n_rot:2] = even * s + odd * c
    return out


def rope_halves(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate (i, i + n_rot / 2) of each head: x [..., t, h, d]; cos, sin [..., t, n_rot / 2]."""
    half = cos.shape[-1]
    out = x.copy()
    first, second = x[..., :half], x[..., half : 2 * half]  # [..., t, h, n_rot / 2]
    c, s = cos[..., None, :], sin[..., None, :]  # [..., t, 1, n_rot / 2]
    out[..., :half] = first * c - second * s
    out[..., half : 2 * half] = first * s + second * c
    return out


def attention_scores(q: Array, k: Array) -> Array:
    """Raw scores, query head h against KV head h // (heads a group): [b, t, h, d], [b, s, k, d] -> [b, h, t, s]."""
    b, t, h, d = q.shape
    n_kv = k.shape[2]
    grouped = q.reshape(b, t, n_kv, h // n_kv, d).transpose(0, 2, 3, 1, 4)  # [b, k, h/k, t, d]
    keys = k.transpose(0, 2, 3, 1)[:, :, None]  # [b, k, 1, d, s]
    return np.asarray(np.matmul(grouped, keys).reshape(b, h, t, k.shape[1]))


def softmax(x: Array) -> Array:
    """exp(x - max) / sum over the last axis."""
    wide = x.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    np.exp(wide, out=wide)
    wide /= wide.sum(axis=-1, keepdims=True)
    return np.asarray(wide, x.dtype)


def causal_softmax(
    scores: Array,
    scale: float,
    query_positions: Array,
    key_positions: Array,
    window: int = 0,
    sinks: Array | None = None,
) -> Array:
    """Attention probabilities: a query sees keys at its own and earlier positions. [b, h, t, s] -> the same.

    With a ``window`` these are the last so many; ``sinks`` [h] are scores of a key without a value (Xiao et al. 2023,
    arXiv:2309.17453).
    """
    ahead = key_positions[None, :] - query_positions[:, None]  # [t, s]
    hidden = (ahead > 0) | (ahead <= -window) if window else ahead > 0
    x = np.where(hidden, -np.inf, scores * np.asarray(scale, scores.dtype))
    if sinks is None:
        return softmax(x)
    column = np.broadcast_to(sinks[:, None, None], (*x.shape[:-1], 1))
    return softmax(np.concatenate([x, column], axis=-1))[..., :-1]


def attention_values(probs: Array, v: Array) -> Array:
    """Heads' weighted sums of values, merged: [b, h, t, s], [b, s, k, d] -> [b, t, h*d]."""
    b, h, t, s = probs.shape
    n_kv, d = v.shape[2:]
    grouped = probs.reshape(b, n_kv, h // n_kv, t, s)  # [b, k, h/k, t, s]
    values = v.transpose(0, 2, 1, 3)[:, :, None]  # [b, k, 1, s, d]
    mixed = np.matmul(grouped, values).reshape(b, h, t, d)
    return np.ascontiguousarray(mixed.transpose(0, 2, 1, 3)).reshape(b, t, h * d)


def silu(x: Array) -> Array:
    """x * sigmoid(x); exp(-|x|) never overflows."""
    e = np.exp(-np.abs(x))
    return x * np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)); exp(-|x|) never overflows."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def swiglu(gate: Array, up: Array) -> Array:
    """silu(gate) * up (Shazeer 2020, arXiv:2002.05202)."""
    return silu(gate) * up


def swiglu_oai(gate: Array, up: Array) -> Array:
    """gate * sigmoid(1.702 gate) * (up + 1), gate at most 7, up between -7 and 7 (OpenAI 2025, gpt-oss)."""
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return np.asarray(silu(gate * 1.702) / 1.702 * (up + 1))


def gelu(x: Array) -> Array:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""
    root = math.sqrt(2 / math.pi)
    return np.asarray(0.5 * x * (1 + np.tanh(root * x * (1 + 0.044715 * x * x))))


def top_k(probs: Array, k: int) -> Array:
    """Indices of the k largest values, largest first: [..., expert] -> [..., k] int32."""
    return np.argsort(-probs, axis=-1, kind="stable")[..., :k].astype(np.int32)


def best_groups(probs: Array, n_groups: int, used: int) -> Array:
    """Minus infinity for experts outside the best groups, those whose two best sum to most: [..., expert] -> the same.

    DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2.
    """
    if n_groups <= 1:
        return probs
    grouped = probs.reshape(*probs.shape[:-1], n_groups, -1)  # [..., group, expert / group]
    best = top_k(np.sort(grouped, axis=-1)[..., -2:].sum(axis=-1), used)  # [..., used]
    kept = (np.arange(n_groups)[:, None] == best[..., None, :]).any(axis=-1)  # [..., group]
    return np.where(kept[..., None], grouped, -np.inf).reshape(probs.shape).astype(probs.dtype)


def normalized(weights: Array) -> Array:
    """Router weights made to sum to one; the sum is at least float16's smallest normal (llama.cpp, build_moe_ffn)."""
    total = weights.sum(axis=-1, keepdims=True)
    return np.asarray(weights / np.maximum(total, np.asarray(2.0**-14, weights.dtype)))


def causal_conv(x: Array, weight: Array, before: Array) -> Array:
    """Every channel's sum over a token and those before it: x [b, t, c], weight [c, k], before [b, k - 1, c]."""
    rows = np.concatenate([before, x], axis=1)  # [b, k - 1 + t, c]
    t = x.shape[1]
    return np.asarray(sum(rows[:, tap : tap + t] * weight[:, tap] for tap in range(weight.shape[1])))


def ssm_scan(x: Array, dt: Array, a: Array, b: Array, c: Array, state: Array) -> tuple[Array, Array]:
    """Selective scan with a decay a head (Dao & Gu 2024, arXiv:2405.21060): outputs as x, and the last state.

    x [b, t, h, d], dt [b, t, h] before its softplus, a [h], b and c [b, t, g, n], state [b, h, d, n].
    """
    group = x.shape[2] // b.shape[2]
    step = np.logaddexp(dt, 0)  # softplus
    keep = np.exp(step * a)[..., None, None]  # [b, t, h, 1, 1]
    write = np.repeat(b, group, axis=2)[..., None, :] * (x * step[..., None])[..., None]  # [b, t, h, d, n]
    read = np.repeat(c, group, axis=2)[..., None]  # [b, t, h, n, 1]
    out = np.empty_like(x)
    for t in range(x.shape[1]):
        state = state * keep[:, t] + write[:, t]
        out[:, t] = np.matmul(state, read[:, t])[..., 0]
    return out, state


def weighted_sum(experts: Array, weights: Array) -> Array:
    """[b, t, used, embd], [b, t, used] -> [b, t, embd]."""
    return np.asarray((experts * weights[..., None]).sum(axis=-2))


def add(branch: Array, residual: Array) -> Array:
    """The residual connection."""
    return branch + residual
