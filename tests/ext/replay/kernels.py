"""Kernels as strangers write them, right and wrong, in NumPy alone; each is given what python_kernel.py describes."""

from __future__ import annotations

import math
import os

import numpy as np

F = np.float32


def _erf(x):
    return np.vectorize(math.erf, otypes=[np.float64])(x)


# -- blocks -----------------------------------------------------------------------------------------------------------


def q8_0(raw):
    """Scales [.., block] and numbers [.., block, 32]: 2 bytes of float16, 32 of int8."""
    blocks = raw.reshape(*raw.shape[:-1], -1, 34)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0].astype(F)
    return scales, blocks[..., 2:].view(np.int8).astype(F)


def q4_k(raw):
    """Scales, minima [.., block, 8] and numbers [.., block, 8, 32] of blocks of 144 bytes."""
    blocks = raw.reshape(*raw.shape[:-1], -1, 144)
    d, dmin = (np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16).astype(F) for at in (0, 2))
    packed, nibbles = blocks[..., 4:16], blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32)
    scales, minima = [], []
    for j in range(8):
        if j < 4:
            scales.append(packed[..., j] & 63)
            minima.append(packed[..., j + 4] & 63)
        else:
            scales.append((packed[..., j + 4] & 15) | ((packed[..., j - 4] >> 6) << 4))
            minima.append((packed[..., j + 4] >> 4) | ((packed[..., j] >> 6) << 4))
    q = np.stack([nibbles & 15, nibbles >> 4], axis=-2).reshape(*blocks.shape[:-1], 8, 32)
    return d * np.stack(scales, -1), dmin * np.stack(minima, -1), q.astype(F)


def weights(op):
    """The weights of a product in float32."""
    raw, kind = op.sources[0], op.types[0]
    if kind == "q8_0":
        scales, q = q8_0(raw)
        return (scales[..., None] * q).reshape(*raw.shape[:-1], -1)
    if kind == "q4_k":
        scales, minima, q = q4_k(raw)
        return (scales[..., None] * q - minima[..., None]).reshape(*raw.shape[:-1], -1)
    return raw.astype(F)


def _served(w, x):
    """Weights for each of x's outer axes."""
    for axis in (0, 1):
        w = np.repeat(w, x.shape[axis] // w.shape[axis], axis=axis)
    return w


def _operands(op):
    x = op.sources[1].astype(F)
    return _served(weights(op), x), x


# -- products ---------------------------------------------------------------------------------------------------------


def matmul_blocked(op):
    w, x = _operands(op)
    y = np.zeros((*x.shape[:-1], w.shape[-2]), F)
    for start in range(0, x.shape[-1], 32):
        y += x[..., start : start + 32] @ w[..., start : start + 32].swapaxes(-1, -2)
    return y


def matmul_reversed(op):
    w, x = _operands(op)
    y = np.zeros((*x.shape[:-1], w.shape[-2]), F)
    for k in reversed(range(x.shape[-1])):
        y += x[..., k, None] * w[..., None, :, k]
    return y


def matmul_pairwise(op):
    w, x = _operands(op)
    products = x[..., :, None, :] * w[..., None, :, :]
    while products.shape[-1] > 1:
        if products.shape[-1] % 2:
            products = np.concatenate([products, np.zeros_like(products[..., :1])], axis=-1)
        products = products[..., ::2] + products[..., 1::2]
    return products[..., 0]


def matmul_fused(op):
    """A product and a sum in one step, rounded once."""
    w, x = (side.astype(np.float64) for side in _operands(op))
    y = np.zeros((*x.shape[:-1], w.shape[-2]), F)
    for k in range(x.shape[-1]):
        y = (y + x[..., k, None] * w[..., None, :, k]).astype(F)
    return y


def matmul_of_eight_bits(op):
    """Activations in blocks of 32 as ggml rounds them on x86."""
    x = op.sources[1].astype(F)
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    inverse = np.divide(F(127), largest, out=np.zeros_like(largest), where=largest > 0)
    d = (largest / F(127)).astype(np.float16).astype(F)
    q = np.rint(blocks * inverse).astype(F)
    scales, numbers = q8_0(_served(op.sources[0], x))
    y = np.zeros((*x.shape[:-1], numbers.shape[-3]), F)
    for b in range(q.shape[-2]):
        y += (q[..., b, :] @ numbers[..., b, :].swapaxes(-1, -2)) * d[..., b, :] * scales[..., None, :, b]
    return y


def matmul_of_superblocks(op):
    """Activations in blocks of 256, as ggml rounds them for K types: the largest becomes -127."""
    x = op.sources[1].astype(F)
    blocks = x.reshape(*x.shape[:-1], -1, 256)
    places = np.abs(blocks).argmax(-1)[..., None]
    largest = np.take_along_axis(blocks, places, -1)
    inverse = np.divide(F(-127), largest, out=np.zeros_like(largest), where=largest != 0)
    q = np.minimum(127, np.rint(inverse * blocks))
    d = np.divide(F(1), inverse, out=np.zeros_like(inverse), where=inverse != 0)
    return (q * d).reshape(x.shape).astype(F) @ _served(weights(op), x).swapaxes(-1, -2)


def matmul_partial_tile_lost(op):
    """Rows after the last whole tile of 32 are not computed."""
    y = matmul_blocked(op)
    y[..., y.shape[-2] // 32 * 32 :, :] = 0
    return y


def matmul_sums_in_half(op):
    w, x = (side.astype(np.float16) for side in _operands(op))
    y = np.zeros((*x.shape[:-1], w.shape[-2]), np.float16)
    for k in range(x.shape[-1]):
        y += x[..., k, None] * w[..., None, :, k]
    return y.astype(F)


def matmul_last_scale_of_the_block_before(op):
    scales, q = q8_0(op.sources[0])
    if scales.shape[-1] > 1:
        scales[..., -1] = 0.97 * scales[..., -1] + 0.03 * scales[..., -2]
    x = op.sources[1].astype(F)
    return x @ _served((scales[..., None] * q).reshape(*q.shape[:-2], -1), x).swapaxes(-1, -2)


def matmul_last_minimum_lost(op):
    """The last eighth of each block of 256 goes without four bits of its minimum."""
    scales, minima, q = q4_k(op.sources[0])
    minima[..., -1, 7] *= F(0.9)
    w = (scales[..., None] * q - minima[..., None]).reshape(*op.sources[0].shape[:-1], -1)
    x = op.sources[1].astype(F)
    return x @ _served(w, x).swapaxes(-1, -2)


# -- norms, softmax, attention ----------------------------------------------------------------------------------------


def rms_norm(op):
    x, total = op.sources[0], 0
    for k in range(x.shape[-1]):
        total = (total + x[..., k] * x[..., k]).astype(F)
    return (x / np.sqrt(total / F(x.shape[-1]) + F(op.parameters["eps"]))[..., None]).astype(F)


def rms_norm_eps_outside(op):
    x = op.sources[0]
    return (x / (np.sqrt((x * x).mean(-1, keepdims=True)) + F(op.parameters["eps"]))).astype(F)


def _scores(op):
    x, mask = op.sources[0] * F(op.parameters["scale"]), op.sources[1] if len(op.sources) > 1 else None
    return x if mask is None else x + mask[..., : x.shape[-2], :].astype(F)


def softmax(op):
    """In one pass over the keys: sum and maximum go along."""
    x = _scores(op)
    peak, total = np.full(x.shape[:-1], -np.inf, F), np.zeros(x.shape[:-1], F)
    for k in range(x.shape[-1]):
        now = np.maximum(peak, x[..., k])
        total = (total * np.exp(peak - now) + np.exp(x[..., k] - now)).astype(F)
        peak = now
    return np.exp(x - peak[..., None]) / total[..., None]


def softmax_by_powers_of_two(op):
    x = _scores(op)
    e = np.exp2((x - x.max(-1, keepdims=True)) * F(math.log2(math.e)))
    return (e / e.sum(-1, keepdims=True)).astype(F)


def softmax_without_maximum(op):
    e = np.exp(_scores(op))
    return (e / e.sum(-1, keepdims=True)).astype(F)


def softmax_unscaled_beyond_one_block(op):
    """A second block of 1024 keys goes unscaled."""
    x = op.sources[0].copy()
    x[..., :1024] *= F(op.parameters["scale"])
    x = x + op.sources[1][..., : x.shape[-2], :]
    e = np.exp(x - x.max(-1, keepdims=True))
    return (e / e.sum(-1, keepdims=True)).astype(F)


def _attention(op, keys, tile=32):
    """Online softmax over tiles of keys, in float32."""
    q, k, v = (op.sources[place].astype(F) for place in range(3))
    k, v = (np.repeat(side, q.shape[1] // side.shape[1], axis=1)[..., :keys, :] for side in (k, v))
    mask = op.sources[3][..., : q.shape[-2], :keys].astype(F)
    peak = np.full((*q.shape[:-1], 1), -np.inf, F)
    total, y = np.zeros_like(peak), np.zeros((*q.shape[:-1], v.shape[-1]), F)
    for at in range(0, keys, tile):
        s = q @ k[..., at : at + tile, :].swapaxes(-1, -2) * F(op.parameters["scale"]) + mask[..., at : at + tile]
        now = np.maximum(peak, s.max(-1, keepdims=True))
        safe = np.where(np.isfinite(now), now, 0)
        shrink, e = np.exp(peak - safe), np.exp(s - safe)
        total, y, peak = total * shrink + e.sum(-1, keepdims=True), y * shrink + e @ v[..., at : at + tile, :], now
    return (y / total).swapaxes(1, 2).astype(F)


def attention(op):
    return _attention(op, op.sources[1].shape[-2])


def attention_without_the_last_key(op):
    return _attention(op, max(1, op.sources[1].shape[-2] - 1))


# -- RoPE -------------------------------------------------------------------------------------------------------------


def _rope(op, positions, base):
    x, half = op.sources[0], op.parameters["n_dims"] // 2
    frequencies = np.power(F(base), np.arange(half, dtype=F) * F(-2) / F(op.parameters["n_dims"]))
    turn = (positions.astype(F)[:, None] * frequencies)[None, :, None, :]
    y = x.copy()
    y[..., 0 : 2 * half : 2] = x[..., 0 : 2 * half : 2] * np.cos(turn) - x[..., 1 : 2 * half : 2] * np.sin(turn)
    y[..., 1 : 2 * half : 2] = x[..., 0 : 2 * half : 2] * np.sin(turn) + x[..., 1 : 2 * half : 2] * np.cos(turn)
    return y


def rope(op):
    return _rope(op, op.sources[1].reshape(-1), op.parameters["freq_base"])


def rope_positions_wrap(op):
    return _rope(op, op.sources[1].reshape(-1) % 2048, op.parameters["freq_base"])


def rope_base_off(op):
    return _rope(op, op.sources[1].reshape(-1), op.parameters["freq_base"] * 1.001)


# -- activations, rows ------------------------------------------------------------------------------------------------


def gelu(op):
    x = op.sources[0]
    return F(0.5) * x * (F(1) + np.tanh(F(math.sqrt(2 / math.pi)) * x * (F(1) + F(0.044715) * x * x)))


def gelu_by_erf(op):
    x = op.sources[0].astype(np.float64)
    return (0.5 * x * (1 + _erf(x / math.sqrt(2)))).astype(F)


def swiglu(op):
    x, gate = op.sources[0], op.sources[1]
    return x / (F(1) + np.exp(np.minimum(-x, 88))) * gate


def swiglu_of_an_approximate_exp(op):
    """exp(x) by (1 + x / 4096) ** 4096."""
    x, gate = op.sources[0], op.sources[1]
    e = np.power(np.maximum(1 - x.astype(np.float64) / 4096, 0), 4096)
    return (x / (1 + e) * gate).astype(F)


def get_rows(op):
    x, rows = op.sources[0], op.sources[1]
    return x[0, 0][rows[0, 0, 0]][None, None].astype(F)


def get_rows_never_the_last(op):
    x, rows = op.sources[0], op.sources[1]
    return x[0, 0][np.minimum(rows[0, 0, 0], max(0, x.shape[-2] - 2))][None, None].astype(F)


# -- ways to fail -----------------------------------------------------------------------------------------------------


def rms_norm_dies_of_many_rows(op):
    if op.sources[0].shape[-2] > 1024:
        os.abort()
    return rms_norm(op)


def rms_norm_refuses_many_rows(op):
    if op.sources[0].shape[-2] > 1024:
        raise NotImplementedError(f"{op.sources[0].shape[-2]} rows")
    return rms_norm(op)


def nothing_but_zeros(op):
    return np.zeros(op.shape, F)
