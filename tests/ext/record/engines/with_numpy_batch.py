"""Llama in NumPy, the whole prompt at once, heads first: python with_numpy_batch.py model.bin 1,17,5."""

import struct
import sys

import numpy as np


def load(path):
    raw = open(path, "rb").read()
    dim, hidden, n_layers, n_heads, n_kv, vocab, seq_len = struct.unpack("7i", raw[:28])
    flat, at = np.frombuffer(raw[28:], np.float32), 0
    kv = n_kv * (dim // n_heads)
    shapes = dict(
        tok=(vocab, dim),
        an=(n_layers, dim),
        q=(n_layers, dim, dim),
        k=(n_layers, kv, dim),
        v=(n_layers, kv, dim),
        o=(n_layers, dim, dim),
        fn=(n_layers, dim),
        gate=(n_layers, hidden, dim),
        down=(n_layers, dim, hidden),
        up=(n_layers, hidden, dim),
        norm=(dim,),
        out=(vocab, dim),
    )
    params = {}
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        params[name] = flat[at : at + size].reshape(shape)
        at += size
    layers = [
        {n: params[n][i] for n in ("an", "q", "k", "v", "o", "fn", "gate", "down", "up")} for i in range(n_layers)
    ]
    return params, layers, n_heads, n_kv


def norm(x, w):
    return w * x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)


def rotate(x):  # [head, token, dim]
    dim, n = x.shape[-1], x.shape[-2]
    theta = 1.0 / 10000.0 ** (np.arange(0, dim, 2) / dim)
    angle = np.outer(np.arange(n), theta).astype(np.float32)
    z = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)
    return np.stack([z.real, z.imag], -1).reshape(x.shape).astype(np.float32)


def attention(q, k, v):
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    scores = scores + np.triu(np.full(scores.shape[-2:], -np.inf), 1)
    probs = np.exp(scores - scores.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    return (probs @ v).astype(np.float32)


def block(x, p, n_heads, n_kv):
    n, dim = x.shape
    h = norm(x, p["an"])
    q, k, v = h @ p["q"].T, h @ p["k"].T, h @ p["v"].T
    q = q.reshape(n, n_heads, -1).transpose(1, 0, 2)
    k = k.reshape(n, n_kv, -1).transpose(1, 0, 2)
    v = v.reshape(n, n_kv, -1).transpose(1, 0, 2)
    q, k = rotate(q), rotate(k)
    k = np.repeat(k, n_heads // n_kv, axis=0)
    v = np.repeat(v, n_heads // n_kv, axis=0)
    a = attention(q, k, v).transpose(1, 0, 2).reshape(n, dim)
    x = x + a @ p["o"].T
    h = norm(x, p["fn"])
    gate, up = h @ p["gate"].T, h @ p["up"].T
    act = gate / (1 + np.exp(-gate)) * up
    return x + act @ p["down"].T


params, layers, n_heads, n_kv = load(sys.argv[1])
tokens = [int(t) for t in sys.argv[2].split(",")]
x = params["tok"][tokens]
for p in layers:
    x = block(x, p, n_heads, n_kv)
logits = norm(x, params["norm"]) @ params["out"].T
print(int(logits[-1].argmax()))
