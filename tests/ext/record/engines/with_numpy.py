"""Llama in NumPy, a token at a time, with a KV cache: python with_numpy.py model.bin 1,17,5."""

import struct
import sys

import numpy as np


class Config:
    def __init__(self, words):
        self.dim, self.hidden, self.n_layers, self.n_heads, self.n_kv_heads, self.vocab, self.seq_len = words
        self.head_dim = self.dim // self.n_heads


class Weights:
    def __init__(self, c, flat):
        self.flat = flat
        L, d, kv = c.n_layers, c.dim, c.n_kv_heads * c.head_dim
        self.tok_emb = self.take(c.vocab, d)
        self.att_norm = self.take(L, d)
        self.wq, self.wk, self.wv = self.take(L, d, d), self.take(L, kv, d), self.take(L, kv, d)
        self.wo = self.take(L, d, d)
        self.ffn_norm = self.take(L, d)
        self.w1, self.w2, self.w3 = self.take(L, c.hidden, d), self.take(L, d, c.hidden), self.take(L, c.hidden, d)
        self.norm = self.take(d)
        self.out = self.take(c.vocab, d)

    def take(self, *shape):
        n = int(np.prod(shape))
        part, self.flat = self.flat[:n], self.flat[n:]
        return part.reshape(shape)


def load(path):
    with open(path, "rb") as f:
        config = Config(struct.unpack("7i", f.read(28)))
        return config, Weights(config, np.frombuffer(f.read(), dtype=np.float32))


def rmsnorm(x, weight, eps=1e-5):
    return x / np.sqrt(np.mean(x * x) + eps) * weight


def rope(x, pos, head_dim, base=10000.0):
    freq = base ** (-np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    angle = pos * freq
    cos, sin = np.cos(angle), np.sin(angle)
    pairs = x.reshape(-1, head_dim // 2, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    out = np.empty_like(pairs)
    out[..., 0] = a * cos - b * sin
    out[..., 1] = a * sin + b * cos
    return out.reshape(x.shape)


def silu(x):
    return x / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


class Llama:
    def __init__(self, path):
        self.c, self.w = load(path)
        c = self.c
        self.k_cache = np.zeros((c.n_layers, c.seq_len, c.n_kv_heads, c.head_dim), np.float32)
        self.v_cache = np.zeros_like(self.k_cache)

    def attention(self, l, x, pos):
        c, w = self.c, self.w
        q = w.wq[l] @ x
        k = w.wk[l] @ x
        v = w.wv[l] @ x
        q = rope(q, pos, c.head_dim)
        k = rope(k, pos, c.head_dim)
        self.k_cache[l, pos] = k.reshape(c.n_kv_heads, c.head_dim)
        self.v_cache[l, pos] = v.reshape(c.n_kv_heads, c.head_dim)
        q = q.reshape(c.n_heads, c.head_dim)
        out = np.zeros((c.n_heads, c.head_dim), np.float32)
        group = c.n_heads // c.n_kv_heads
        for h in range(c.n_heads):
            kv = h // group
            scores = self.k_cache[l, : pos + 1, kv] @ q[h]
            scores = scores / np.sqrt(c.head_dim)
            out[h] = softmax(scores) @ self.v_cache[l, : pos + 1, kv]
        return w.wo[l] @ out.reshape(-1)

    def ffn(self, l, x):
        w = self.w
        gate = silu(w.w1[l] @ x)
        up = w.w3[l] @ x
        return w.w2[l] @ (gate * up)

    def forward(self, token, pos):
        x = self.w.tok_emb[token].copy()
        for l in range(self.c.n_layers):
            h = rmsnorm(x, self.w.att_norm[l])
            x = x + self.attention(l, h, pos)
            h = rmsnorm(x, self.w.ffn_norm[l])
            x = x + self.ffn(l, h)
        x = rmsnorm(x, self.w.norm)
        return self.w.out @ x


if __name__ == "__main__":
    model = Llama(sys.argv[1])
    tokens = [int(t) for t in sys.argv[2].split(",")]
    for pos, token in enumerate(tokens):
        logits = model.forward(token, pos)
    print(int(np.argmax(logits)))
