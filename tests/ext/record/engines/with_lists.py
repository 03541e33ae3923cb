"""Llama in Python alone, in the way of llama2.c: python with_lists.py model.bin 1,17,5."""

import math
import struct
import sys
from array import array


def load(path):
    with open(path, "rb") as f:
        sizes = struct.unpack("7i", f.read(28))
        flat = array("f")
        flat.frombytes(f.read())
    return sizes, flat


def matrices(flat, at, layers, rows, columns):
    out = []
    for _ in range(layers):
        out.append([list(flat[at + r * columns : at + (r + 1) * columns]) for r in range(rows)])
        at += rows * columns
    return out, at


def rmsnorm(x, weight):
    ss = sum(v * v for v in x) / len(x) + 1e-5
    scale = 1.0 / math.sqrt(ss)
    return [w * (scale * v) for w, v in zip(weight, x)]


def matmul(w, x):
    out = [0.0] * len(w)
    for i, row in enumerate(w):
        val = 0.0
        for a, b in zip(row, x):
            val += a * b
        out[i] = val
    return out


def rotate(v, pos, head_size):
    for i in range(0, len(v), 2):
        freq = 1.0 / (10000.0 ** ((i % head_size) / head_size))
        c, s = math.cos(pos * freq), math.sin(pos * freq)
        v[i], v[i + 1] = v[i] * c - v[i + 1] * s, v[i] * s + v[i + 1] * c


def softmax(x):
    top = max(x)
    e = [math.exp(v - top) for v in x]
    total = sum(e)
    return [v / total for v in e]


def main(path, tokens):
    (dim, hidden, n_layers, n_heads, n_kv, vocab, seq_len), flat = load(path)
    head_size = dim // n_heads
    kv_dim = n_kv * head_size
    (emb,), at = matrices(flat, 0, 1, vocab, dim)
    (att_norm,), at = matrices(flat, at, 1, n_layers, dim)
    wq, at = matrices(flat, at, n_layers, dim, dim)
    wk, at = matrices(flat, at, n_layers, kv_dim, dim)
    wv, at = matrices(flat, at, n_layers, kv_dim, dim)
    wo, at = matrices(flat, at, n_layers, dim, dim)
    (ffn_norm,), at = matrices(flat, at, 1, n_layers, dim)
    w1, at = matrices(flat, at, n_layers, hidden, dim)
    w2, at = matrices(flat, at, n_layers, dim, hidden)
    w3, at = matrices(flat, at, n_layers, hidden, dim)
    (final,), at = matrices(flat, at, 1, 1, dim)
    (head,), at = matrices(flat, at, 1, vocab, dim)
    keys = [[] for _ in range(n_layers)]
    values = [[] for _ in range(n_layers)]
    for pos, token in enumerate(tokens):
        x = list(emb[token])
        for l in range(n_layers):
            xb = rmsnorm(x, att_norm[l])
            q = matmul(wq[l], xb)
            k = matmul(wk[l], xb)
            v = matmul(wv[l], xb)
            rotate(q, pos, head_size)
            rotate(k, pos, head_size)
            keys[l].append(k)
            values[l].append(v)
            xb = []
            for h in range(n_heads):
                g = h // (n_heads // n_kv) * head_size
                qh = q[h * head_size : (h + 1) * head_size]
                att = [sum(a * b for a, b in zip(qh, kt[g : g + head_size])) / math.sqrt(head_size) for kt in keys[l]]
                att = softmax(att)
                xb += [sum(p * vt[g + i] for p, vt in zip(att, values[l])) for i in range(head_size)]
            xb2 = matmul(wo[l], xb)
            for i in range(dim):
                x[i] += xb2[i]
            xb = rmsnorm(x, ffn_norm[l])
            hb = matmul(w1[l], xb)
            hb2 = matmul(w3[l], xb)
            for i in range(hidden):
                hb[i] = hb[i] / (1.0 + math.exp(-hb[i])) * hb2[i]
            xb = matmul(w2[l], hb)
            for i in range(dim):
                x[i] += xb[i]
        x = rmsnorm(x, final[0])
        logits = matmul(head, x)
    print(logits.index(max(logits)))


main(sys.argv[1], [int(t) for t in sys.argv[2].split(",")])
