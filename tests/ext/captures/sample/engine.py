"""A small engine, as somebody might write it: llama, on NumPy. It records what it computes when it is asked to."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file


class Engine:
    def __init__(self, path):
        file = GGUFReader(path)
        self.w = {t.name: dequantize(t.data, t.tensor_type).astype(np.float32) for t in file.tensors}
        get = {name.removeprefix("llama."): field.contents() for name, field in file.fields.items()}
        self.layers, self.heads = get["block_count"], get["attention.head_count"]
        self.kv_heads, self.eps = get["attention.head_count_kv"], get["attention.layer_norm_rms_epsilon"]
        self.base, self.dim = get.get("rope.freq_base", 10000.0), get["rope.dimension_count"]

    def norm(self, x, name):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps) * self.w[f"{name}.weight"]

    def linear(self, x, name):
        return x @ self.w[f"{name}.weight"].T

    def rope(self, x):
        angles = np.arange(len(x))[:, None] * self.base ** (-np.arange(0, self.dim, 2) / self.dim)
        cos, sin = np.cos(angles)[:, None].astype(np.float32), np.sin(angles)[:, None].astype(np.float32)
        a, b = x[..., 0::2], x[..., 1::2]
        return np.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)

    def run(self, tokens):
        t, n = {}, len(tokens)
        hidden = np.triu(np.full((n, n), -np.inf, np.float32), 1)
        x = t["embd"] = self.w["token_embd.weight"][tokens]
        for i in range(self.layers):
            p = f"blk.{i}."
            h = t[f"attn_norm-{i}"] = self.norm(x, p + "attn_norm")
            q, k, v = (self.linear(h, p + f"attn_{one}") for one in "qkv")
            t |= {f"Qcur_proj-{i}": q, f"Kcur_proj-{i}": k, f"Vcur_proj-{i}": v}
            q = t[f"Qcur_rope-{i}"] = self.rope(q.reshape(n, self.heads, self.dim))
            k = t[f"Kcur_rope-{i}"] = self.rope(k.reshape(n, self.kv_heads, self.dim))
            group = self.heads // self.kv_heads
            k, v = (np.repeat(y.reshape(n, self.kv_heads, self.dim), group, axis=1) for y in (k, v))
            s = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(np.float32(self.dim)) + hidden
            s = np.exp(s - s.max(axis=-1, keepdims=True))
            s = t[f"kq_soft_max-{i}"] = s / s.sum(axis=-1, keepdims=True)
            o = t[f"kqv_out-{i}"] = np.einsum("hqk,khd->qhd", s, v).reshape(n, -1)
            o = t[f"attn_out-{i}"] = self.linear(o, p + "attn_output")
            x = t[f"ffn_inp-{i}"] = x + o
            h = t[f"ffn_norm-{i}"] = self.norm(x, p + "ffn_norm")
            gate, up = (self.linear(h, p + f"ffn_{one}") for one in ("gate", "up"))
            t |= {f"ffn_gate-{i}": gate, f"ffn_up-{i}": up}
            act = t[f"ffn_swiglu-{i}"] = gate / (1 + np.exp(-gate)) * up
            y = t[f"ffn_out-{i}"] = self.linear(act, p + "ffn_down")
            x = t[f"l_out-{i}"] = x + y
        h = t["result_norm"] = self.norm(x, "output_norm")
        t["result_output"] = self.linear(h, "output" if "output.weight" in self.w else "token_embd")
        return t


if __name__ == "__main__":
    model, ids, out = sys.argv[1:]
    recorded = Engine(model).run([int(word) for word in ids.split(",")])
    save_file({name: np.ascontiguousarray(x) for name, x in recorded.items()}, Path(out + ".safetensors"))
