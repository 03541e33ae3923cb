"""Each op as it should be, on NumPy. A section for each kind of op, under its own line."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


# -- rope
def rope(x: Array, positions: Array, n_rot: int, base: float, pairs: bool) -> Array:
    """x [token, head, dim]. Pairs (2i, 2i+1), as llama's files need; else halves (i, i + n_rot/2), as most others."""
    theta = positions[:, None] * base ** (-2.0 * np.arange(n_rot // 2) / n_rot)  # position counts from 0, decoding too
    cos, sin = np.cos(theta)[:, None], np.sin(theta)[:, None]
    i = 2 * np.arange(n_rot // 2) if pairs else np.arange(n_rot // 2)
    j = i + 1 if pairs else i + n_rot // 2
    y = x.copy()  # what lies beyond n_rot is not rotated
    y[..., i] = x[..., i] * cos - x[..., j] * sin
    y[..., j] = x[..., i] * sin + x[..., j] * cos
    return y


# -- norms
def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Over the last axis: epsilon inside the root, nothing subtracted, times the norm's own weight, once."""
    mean_square = np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True)
    return np.asarray(x / np.sqrt(mean_square + eps) * weight, x.dtype)


# -- softmax
def causal_softmax(scores: Array, scale: float, positions: Array) -> Array:
    """scores [head, query, key]: scaled by 1/sqrt(head size), masked, and only then exp; over the keys."""
    hidden = np.arange(scores.shape[-1])[None, :] > positions[:, None]  # a query sees its own key
    s = np.where(hidden, -np.inf, scores * scale)
    e = np.exp(s - s.max(axis=-1, keepdims=True))  # the largest is taken off, or exp overflows
    return np.asarray(e / e.sum(axis=-1, keepdims=True), scores.dtype)


# -- attention
def attend(q: Array, k: Array, v: Array, scale: float, positions: Array) -> Array:
    """q [query, head, dim], k and v [key, kv_head, dim]: heads h * group to h * group + group - 1 read KV head h."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)  # repeat, not tile
    weights = causal_softmax(np.einsum("qhd,khd->hqk", q, k), scale, positions)
    return np.asarray(np.einsum("hqk,khd->qhd", weights, v)).reshape(len(q), -1)  # heads side by side


# -- cache
def remember(cache: Array, rows: Array, start: int) -> Array:
    """cache [position, kv_head, dim]: rows go to their positions; attention reads up to and with the newest.

    K is kept after RoPE and never rotated again; each layer has a cache of its own.
    """
    cache[start : start + len(rows)] = rows
    return cache[: start + len(rows)]


# -- matmul
def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """x [token, n_in], weight [n_out, n_in] as the file has its rows: ggml's ne is [n_in, n_out]."""
    y = x @ weight.T
    return y if bias is None else y + bias


# -- activations
def swiglu(gate: Array, up: Array) -> Array:
    """silu(gate) * up: ffn_gate goes through the activation, ffn_up does not."""
    return np.asarray(gate / (1 + np.exp(-gate)) * up)


# -- residuals
def add(x: Array, branch: Array) -> Array:
    """The residual is x as it was before its norm: ffn_inp = x + attn_out, l_out = ffn_inp + ffn_out."""
    return x + branch


# -- embedding
def embed(table: Array, tokens: Array) -> Array:
    """table [vocab, embd]: one row a token id; ids count from 0."""
    return np.asarray(table[tokens])


# -- heads
def join(embedding: Array, hidden: Array) -> Array:
    """What eh_proj multiplies: a token's embedding, then the hidden state of the token before it, each after its norm.

    hidden [token, n], as the trunk gives it; the first token has none before it, and takes zeros.
    """
    before = np.concatenate([np.zeros_like(hidden[:1]), hidden[:-1]])
    return np.concatenate([embedding, before], axis=-1)


# -- misread
def decode_q4_0(block: bytes) -> Array:
    """18 bytes: a float16 scale, then 16 bytes; their low halves are values 0 to 15, their high halves 16 to 31."""
    d, q = np.frombuffer(block[:2], np.float16).astype(np.float32), np.frombuffer(block[2:], np.uint8)
    return np.asarray(d * (np.concatenate([q & 15, q >> 4]).astype(np.float32) - 8))


def decode_q4_k(block: bytes) -> Array:
    """144 bytes: float16 d and dmin, 12 bytes with 8 scales and 8 minima of 6 bits, 128 bytes of halves."""
    d, dmin = np.frombuffer(block[:4], np.float16).astype(np.float32)
    s, q = np.frombuffer(block[4:16], np.uint8), np.frombuffer(block[16:], np.uint8).reshape(4, 32)
    low, high = s[:8] & 63, s[8:]
    scales = np.concatenate([low[:4], (high & 15) | (s[:4] >> 6 << 4)]).astype(np.float32)
    minima = np.concatenate([low[4:], (high >> 4) | (s[4:8] >> 6 << 4)]).astype(np.float32)
    values = np.stack([q & 15, q >> 4], axis=1).reshape(8, 32)  # 32 low halves, then their 32 high halves
    return np.asarray(d * scales[:, None] * values - dmin * minima[:, None], np.float32).reshape(-1)


# -- moe
def route(logits: Array, n_used: int) -> tuple[Array, Array]:
    """logits [token, expert]: softmax over all experts, the largest, and their weights divided by their sum."""
    e = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p = e / e.sum(axis=-1, keepdims=True)
    chosen = np.argsort(-p, axis=-1, kind="stable")[:, :n_used]
    weights = np.take_along_axis(p, chosen, axis=-1)
    return chosen, weights / weights.sum(axis=-1, keepdims=True)


# -- recurrent
def convolve(state: Array, x: Array, weight: Array) -> tuple[Array, Array]:
    """x [token, channel], weight [channel, n]: each value from its token and the n - 1 before it, oldest first.

    state [n - 1, channel]: the last tokens of the batch before, zeros at first -> the results, and the next state.
    """
    n = weight.shape[1]
    seen = np.concatenate([state, x])
    y = sum(seen[j : j + len(x)] * weight[:, j] for j in range(n))
    return np.asarray(y), seen[-(n - 1) :]


# -- precision
def to_bf16(x: Array) -> Array:
    """float32 rounded to bfloat16, to the nearest, ties to even; sums and norms stay in float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + (bits >> 16 & 1)
    return np.asarray((rounded & 0xFFFF0000).view(np.float32))
