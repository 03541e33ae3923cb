"""A stranger's engine for long prompts: chunks, a cache, windows, scaled RoPE; a mistake replaces a method."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

Array = np.ndarray


class Engine:
    """llama, olmo2 and phi3 in float32, ``chunk`` tokens at a time."""

    def __init__(self, path: Path, chunk: int = 256, kept: type = np.float32) -> None:
        file = gguf.GGUFReader(path)
        self.tensors = {t.name: t for t in file.tensors}
        self.fields = {name: field.contents() for name, field in file.fields.items()}
        self.arch = self.fields["general.architecture"]
        self.chunk, self.kept, self.total = chunk, kept, 0
        self.stated: dict[str, str] = {}
        self.everything = False  # whether the last layer computes rows that nobody asked for
        self.layers, self.heads = self.key("block_count"), self.key("attention.head_count")
        self.kv_heads, self.dim = self.key("attention.head_count_kv"), self.key("attention.key_length")
        self.eps = self.key("attention.layer_norm_rms_epsilon")
        self.original = self.key("rope.scaling.original_context_length") or self.key("context_length")
        self.factor = self.key("rope.scaling.factor", 1.0)
        self.kind = self.key("rope.scaling.type", "none")
        window, pattern = self.key("attention.sliding_window", 0), self.key("attention.sliding_window_pattern")
        self.windows = [window if each else 0 for each in pattern] if pattern else [0] * self.layers
        self.weights: dict[str, Array] = {}

    def key(self, name: str, default: Any = None) -> Any:
        return self.fields.get(f"{self.arch}.{name}", default)

    def put(self, of: str, wrong: Callable[..., Any]) -> None:
        """Replace a method by a wrong one, which is given the engine, the right one and its arguments."""
        right = getattr(self, of)
        setattr(self, of, lambda *given: wrong(self, right, *given))

    def weight(self, name: str) -> Array:
        if name not in self.weights:
            t = self.tensors[f"{name}.weight"]
            self.weights[name] = gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32)
        return self.weights[name]

    # -- the run -------------------------------------------------------------------------------------------------------

    def run(self, tokens: Sequence[int], rows: Sequence[int]) -> dict[str, Array]:
        """The taps of some rows, and K and V of all."""
        self.total, self.rows, self.out = len(tokens), np.asarray(rows), dict[str, list[Array]]()
        self.cache: dict[tuple[str, int], Array] = {}
        for start in range(0, len(tokens), self.chunk):
            self.start = start
            self.pos = np.arange(self.start, min(self.start + self.chunk, len(tokens)))
            self.mine: Any = self.rows[(self.rows >= self.start) & (self.rows <= self.pos[-1])] - self.start
            self.forward(np.asarray(tokens)[self.pos])
        taps = {name: np.concatenate(parts) for name, parts in self.out.items()}
        return taps | {f"kv_{side}-{i}": x.astype(self.kept) for (side, i), x in self.cache.items()}

    def tap(self, name: str, x: Array) -> Array:
        self.out.setdefault(name, []).append(x[self.mine])
        return x

    def forward(self, tokens: Array) -> None:
        x = self.tap("embd", self.weight("token_embd")[self.ids(tokens)])
        for layer in range(self.layers):
            self.layer = layer
            x = self.block(layer, x)
        x = self.tap("result_norm", self.norm("output_norm", x))
        self.tap("result_output", self.logits(x))

    def block(self, i: int, x: Array) -> Array:
        post, n = self.arch == "olmo2", len(x)
        h = x if post else self.tap(f"attn_norm-{i}", self.norm(f"blk.{i}.attn_norm", x))
        q, k, v = (self.tap(f"{s}cur_proj-{i}", self.linear(f"blk.{i}.attn_{s.lower()}", h)) for s in "QKV")
        if post:
            q = self.tap(f"Qcur_normed-{i}", self.norm(f"blk.{i}.attn_q_norm", q).reshape(n, -1, self.dim))
            k = self.tap(f"Kcur_normed-{i}", self.norm(f"blk.{i}.attn_k_norm", k).reshape(n, -1, self.dim))
        q, k, v = (each.reshape(n, -1, self.dim) for each in (q, k, v))
        q, k = self.tap(f"Qcur_rope-{i}", self.rope("q", q)), self.tap(f"Kcur_rope-{i}", self.rope("k", k))
        self.store("k", i, k)
        self.store("v", i, v)
        if i == self.layers - 1 and not self.everything:
            x, q, self.pos, self.mine = x[self.mine], q[self.mine], self.pos[self.mine], slice(None)
        a = self.tap(f"kqv_out-{i}", self.attention(i, q).reshape(len(q), self.heads * self.dim))
        a = self.tap(f"attn_out-{i}", self.linear(f"blk.{i}.attn_output", a))
        if post:
            a = self.tap(f"attn_post_norm-{i}", self.norm(f"blk.{i}.post_attention_norm", a))
        x = self.tap(f"ffn_inp-{i}", self.add(a, x))
        h = x if post else self.tap(f"ffn_norm-{i}", self.norm(f"blk.{i}.ffn_norm", x))
        if f"blk.{i}.ffn_gate.weight" in self.tensors:
            g = self.tap(f"ffn_gate-{i}", self.linear(f"blk.{i}.ffn_gate", h))
            u = self.tap(f"ffn_up-{i}", self.linear(f"blk.{i}.ffn_up", h))
        else:
            g, u = np.split(self.tap(f"ffn_up-{i}", self.linear(f"blk.{i}.ffn_up", h)), 2, axis=-1)
        f = self.linear(f"blk.{i}.ffn_down", self.tap(f"ffn_swiglu-{i}", g / (1 + np.exp(-g)) * u))
        self.tap(f"ffn_out-{i}", f)
        if post:
            f = self.tap(f"ffn_post_norm-{i}", self.norm(f"blk.{i}.post_ffw_norm", f))
        return self.tap(f"l_out-{i}", self.add(f, x))

    # -- what a mistake replaces ---------------------------------------------------------------------------------------

    def ids(self, tokens: Array) -> Array:
        return tokens

    def linear(self, name: str, x: Array) -> Array:
        return x @ self.weight(name).T

    def norm(self, name: str, x: Array) -> Array:
        return x / np.sqrt(self.mean(x * x) + np.float32(self.eps)) * self.weight(name)

    def mean(self, squares: Array) -> Array:
        return squares.mean(-1, keepdims=True)

    def add(self, a: Array, x: Array) -> Array:
        return a + x

    def logits(self, x: Array) -> Array:
        return x @ self.weight("output").T

    def positions(self, side: str) -> Array:
        """Of the chunk's tokens, as RoPE has them."""
        return self.pos.astype(np.float64)

    def frequencies(self) -> Array:
        """[pos or 1, dim / 2]"""
        f = self.base() ** (-np.arange(0, self.dim, 2) / self.dim)[None]
        if self.arch == "phi3":
            return f / self.factors()
        if self.kind == "yarn" and not self.windows[self.layer]:
            keep = self.keep()
            return f * keep + f / self.factor * (1 - keep)
        return f / self.factor if self.kind == "linear" else f

    def base(self) -> float:
        return self.key("rope.freq_base", 10000.0)

    def factors(self) -> Array:
        """LongRoPE's, by the room that there is."""
        return self.weight(f"rope_factors_{'long' if self.total > self.original else 'short'}")

    def keep(self) -> Array:
        """How much of each frequency YaRN leaves as it is."""
        pair = [self.dim * math.log(self.original / (b * 2 * math.pi)) / (2 * math.log(self.base())) for b in (32, 1)]
        low, high = max(0, math.floor(pair[0])), min(self.dim - 1, math.ceil(pair[1]))
        return 1 - np.clip((np.arange(self.dim // 2) - low) / max(0.001, high - low), 0, 1)

    def magnitude(self) -> float:
        yarn = self.kind == "yarn" and not self.windows[self.layer]
        return self.key("rope.scaling.attn_factor", 1.0) * (1 + 0.1 * math.log(self.factor) if yarn else 1)

    def angles(self, side: str) -> Array:
        return self.positions(side)[:, None] * self.frequencies()

    def rope(self, side: str, x: Array) -> Array:
        theta = self.angles(side)[:, None]
        cos, sin = ((f(theta) * self.magnitude()).astype(np.float32) for f in (np.cos, np.sin))
        out, half = np.empty_like(x), self.dim // 2
        a, b = (slice(0, None, 2), slice(1, None, 2)) if self.arch == "llama" else (slice(half), slice(half, None))
        out[..., a], out[..., b] = x[..., a] * cos - x[..., b] * sin, x[..., a] * sin + x[..., b] * cos
        return out

    def store(self, side: str, i: int, x: Array) -> None:
        """Puts the chunk's rows into the cache: [token, head, dim]."""
        x, old = x.astype(self.kept).astype(np.float32), self.cache.get((side, i))
        self.cache[side, i] = x if old is None else np.concatenate([old, x])

    def load(self, i: int) -> tuple[Array, Array, Array]:
        """K and V as attention reads them, and the positions of these rows."""
        return self.cache["k", i], self.cache["v", i], np.arange(len(self.cache["k", i]))

    def hidden(self, i: int, at: Array, window: int) -> Array:
        """Which of the keys, at these positions, are not seen: [query, key]."""
        behind = self.pos[:, None] - at
        return (behind < 0) | ((behind >= window) if window else False)

    def attention(self, i: int, q: Array) -> Array:
        """[token, head, dim]"""
        k, v, at = self.load(i)
        scores = self.scores(q, k)
        scores[:, self.hidden(i, at, self.windows[i])] = -np.inf
        return self.mix(scores, v).swapaxes(0, 1)

    def scores(self, q: Array, k: Array) -> Array:
        """[head, query, key]"""
        each = self.heads // self.kv_heads
        q = q.reshape(len(q), self.kv_heads, each, self.dim).transpose(1, 2, 0, 3)
        return (q / np.float32(math.sqrt(self.dim)) @ k.transpose(1, 2, 0)[:, None]).reshape(
            self.heads, q.shape[2], len(k)
        )

    def mix(self, scores: Array, v: Array) -> Array:
        """[head, query, dim]"""
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p = p.reshape(self.kv_heads, self.heads // self.kv_heads, *p.shape[1:])
        mixed = p @ v.swapaxes(0, 1)[:, None] / p.sum(-1, keepdims=True)
        return mixed.reshape(self.heads, *mixed.shape[2:])


def write(path: Path, tokens: Sequence[int], rows: Sequence[int], taps: dict[str, Array], **settings: str) -> Path:
    """A trace of some rows."""
    stated = {"schema": "llamadiff.trace/1", "tokens": [int(tokens[row]) for row in rows],
              "producer": {"name": "long engine", "settings": settings}}  # fmt: skip
    if len(rows) != len(tokens):
        stated["positions"] = [int(row) for row in rows]
    kept = {name: np.ascontiguousarray(x) for name, x in taps.items()}
    save_file(kept, path, metadata={"llamadiff": json.dumps(stated)})
    return path
