"""Attention of heads, plain or of latent rows: positions, scores, mask, softmax, merging."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from proof.unseen.model import Array


class Attention:
    """The part of an engine that lets a token look back at others."""

    file: Any
    arch: Any
    layer: int
    at: Array
    kept: Any
    tap: Any
    has: Any
    name: Any
    weight: Any
    norm: Any
    product: Any
    linear: Any
    rows: Any
    decoding: Any
    residual: Any

    # -- sizes -----------------------------------------------------------------------------------------------------

    @property
    def heads(self) -> int:
        return int(self.file.get("attention.head_count"))

    @property
    def kv_heads(self) -> int:
        given = self.file.get("attention.head_count_kv", self.heads)
        return int(given[self.layer] if isinstance(given, list) else given)

    @property
    def dim(self) -> int:
        return int(self.file.get("attention.key_length_mla") or self.file.get("attention.key_length"))

    @property
    def local(self) -> bool:
        """Whether this layer sees a window alone."""
        return bool(self.arch.window) and (self.layer + 1) % self.arch.window != 0

    # -- Q, K, V ---------------------------------------------------------------------------------------------------

    def attention(self, y: Array) -> Array:
        q, k, v = (self.tap(f"{side}cur_proj", x) for side, x in zip("QKV", self.qkv(y), strict=True))
        q, k, v = (x.reshape(len(x), -1, self.dim) for x in (q, k, v))
        q, k = self.placed(q, "Q"), self.placed(k, "K")
        if self.arch.queries_scaled:
            q = self.tap("Qcur", q * np.float32(self.query_scale()))
        out = self.merged(self.looked_up(q, self.cached("k", k), self.cached("v", v)))
        return self.tap("attn_out", self.projected(self.tap("kqv_out", out)))

    def projected(self, heads: Array) -> Array:
        return self.linear(heads, "attn_output")

    def qkv(self, y: Array) -> Any:
        if not self.has("attn_qkv"):
            return [self.linear(y, f"attn_{side}") for side in "qkv"]
        sizes = [n * self.dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        parts = self.split(self.linear(y, "attn_qkv"), sizes)
        return [x.reshape(len(x), -1, self.dim) for x in parts]

    def split(self, rows: Array, sizes: list[int]) -> Any:
        """Q, K and V of a fused product."""
        return np.split(rows, np.cumsum(sizes)[:-1], axis=-1)

    def placed(self, x: Array, side: str) -> Array:
        """Heads of Q or K, normalised and rotated where the model does so."""
        stem = f"attn_{side.lower()}_norm"
        if self.has(stem):
            x = self.tap(f"{side}cur_normed", self.norm(x, stem))
        if self.arch.positions in ("pairs", "halves"):
            x = self.tap(f"{side}cur_rope", self.rotated(x, side))
        return x

    # -- RoPE ------------------------------------------------------------------------------------------------------

    @property
    def n_rot(self) -> int:
        return int(self.file.get("rope.dimension_count", self.dim))

    def base(self) -> float:
        own = self.file.get("rope.freq_base", 10000.0)
        return float(self.arch.local_base if self.local and self.arch.local_base else own)

    def scaling(self) -> float:
        return float(self.file.get("rope.scaling.factor", 1.0)) if self.file.get("rope.scaling.type", "") else 1.0

    def factors(self) -> Array:
        """What frequencies are divided by, one for each pair."""
        name = "rope_factors_short.weight"
        return self.file[name] if name in self.file else np.ones(self.n_rot // 2)

    def rope_positions(self) -> Array:
        return self.at

    def frequencies(self) -> Array:
        return self.base() ** (-2.0 * np.arange(self.n_rot // 2) / self.n_rot) / self.factors()

    def kept_share(self) -> Array:
        """YaRN: how much of each pair's own frequency stays."""
        original = self.file.get("rope.scaling.original_context_length")
        pairs = self.n_rot / (2 * math.log(self.base()))
        ends = [pairs * math.log(original / (turns * 2 * math.pi)) for turns in (32, 1)]
        low, high = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), self.n_rot - 1)
        return 1 - np.clip((np.arange(self.n_rot // 2) - low) / max(high - low, 0.001), 0, 1)

    def angles(self) -> Array:
        """[token, pair]."""
        theta = self.rope_positions()[:, None] * self.frequencies()
        if self.scaling() == 1:
            return theta
        keep = self.kept_share()
        return theta / self.scaling() * (1 - keep) + theta * keep

    def magnitude(self) -> float:
        """What YaRN multiplies rotated values by; models of latent attention have it in the scale."""
        return 1.0 if self.has("attn_kv_a_mqa") else 1 + 0.1 * math.log(self.scaling())

    def rotated(self, x: Array, side: str) -> Array:
        """The first values of each head [token, head, dim] turned by their angles."""
        theta = self.angles()[:, None]
        cos, sin = np.cos(theta) * self.magnitude(), np.sin(theta) * self.magnitude()
        n = 2 * theta.shape[-1]
        turned = self.turned(x[..., :n].astype(np.float64), cos, sin)
        return np.concatenate([turned, x[..., n:]], axis=-1).astype(np.float32)

    def turned(self, x: Array, cos: Array, sin: Array) -> Array:
        return in_pairs(x, cos, sin) if self.arch.positions == "pairs" else in_halves(x, cos, sin)

    # -- scores, softmax, values -----------------------------------------------------------------------------------

    def cached(self, side: str, rows: Array) -> Array:
        """The cache with the batch's rows: [key, head, dim]."""
        before = self.kept.get((side, self.layer))
        self.kept[side, self.layer] = rows if before is None else np.concatenate([before, rows])
        return self.kept[side, self.layer]

    def kv_head(self) -> Array:
        """The KV head of every query head."""
        return np.arange(self.heads) // (self.heads // self.kv_heads)

    def key_head(self) -> Array:
        return self.kv_head()

    def value_head(self) -> Array:
        return self.kv_head()

    def looked_up(self, q: Array, keys: Array, values: Array) -> Array:
        """[head, query, dim] of values [key, head, dim]."""
        scores = self.tap("kq", self.scores(q, keys[:, self.key_head()]))
        p = self.tap("kq_soft_max", self.probabilities(scores).astype(np.float32))
        return self.tap("kqv", self.weighed(p, values[:, self.value_head()]))

    def scores(self, q: Array, keys: Array) -> Array:
        return np.einsum("qhd,khd->hqk", q, keys)

    def weighed(self, p: Array, values: Array) -> Array:
        return np.einsum("hqk,khd->hqd", p, values)

    def query_scale(self) -> float:
        return 1 / math.sqrt(self.dim)

    def scale(self) -> float:
        if self.arch.queries_scaled:
            return 1.0
        if self.has("attn_kv_a_mqa"):
            factor = self.file.get("rope.scaling.factor")
            grown = 1 + self.file.get("rope.scaling.yarn_log_multiplier") * math.log(factor)
            return grown * grown / math.sqrt(self.dim)
        return self.file.get("attention.scale") or 1 / math.sqrt(self.dim)

    def width(self) -> int:
        """How many keys back a local layer sees."""
        return int(self.file.get("attention.sliding_window"))

    def hidden(self, queries: Array, keys: Array) -> Array:
        """Which keys a query does not see: [query, 1], [1, key] -> [query, key]."""
        later = keys > queries
        return later | (keys <= queries - self.width()) if self.local else later

    def slopes(self) -> Array:
        """ALiBi's, for a number of heads that is a power of two."""
        return 2.0 ** (-8.0 * (np.arange(self.heads) + 1) / self.heads)

    def biased(self, x: Array, queries: Array, keys: Array) -> Array:
        """Scaled scores with what depends on the distance."""
        if self.arch.positions != "alibi":
            return x
        return x + self.slopes()[:, None, None] * (keys - queries)

    def sinks(self) -> Array | None:
        """A score of each head that no key has."""
        return self.weight("attn_sinks") if self.has("attn_sinks") else None

    def probabilities(self, scores: Array) -> Array:
        queries, keys = self.at[:, None], np.arange(scores.shape[-1])[None]
        x = self.biased(scores.astype(np.float64) * self.scale(), queries, keys)
        return self.softmax(np.where(self.hidden(queries, keys), -np.inf, x))

    def softmax(self, x: Array) -> Array:
        """Over keys, of masked scores [head, query, key]."""
        sinks = self.sinks()
        own = np.full((len(x), 1, 1), -np.inf) if sinks is None else sinks.reshape(-1, 1, 1).astype(np.float64)
        peak = np.maximum(x.max(axis=-1, keepdims=True), own)
        e = np.exp(x - peak)
        return e / (e.sum(axis=-1, keepdims=True) + np.exp(own - peak))

    def merged(self, heads: Array) -> Array:
        """[head, query, dim] -> [query, head * dim]."""
        return heads.transpose(1, 0, 2).reshape(heads.shape[1], -1)

    # -- latent attention ------------------------------------------------------------------------------------------

    def latent_attention(self, y: Array) -> Array:
        """Keys and values are one compressed row, which heads read through matrices of their own."""
        queries = self.latent_queries(y)
        latent, shared = self.latent_parts(self.tap("kv_cmpr_pe", self.product(y, "attn_kv_a_mqa")))
        wide = latent.shape[-1]
        latent = self.tap("kv_cmpr", self.norm(latent, "attn_kv_a_norm"))
        turned = self.tap("k_pe", self.rotated(shared[:, None], "K"))
        keys = self.tap("Kcur", np.concatenate([latent[:, None], turned], axis=-1))
        keys = self.cached("k", keys)
        heads = self.looked_up(queries, keys, keys[..., :wide])
        heads = self.tap("kqv_mla", self.of_heads(heads, "attn_v_b"))
        return self.tap("attn_out", self.projected(self.tap("kqv_out", self.merged(heads))))

    def latent_parts(self, rows: Array) -> Any:
        """What K and V are made of, and the part of K that is rotated."""
        return np.split(rows, [rows.shape[-1] - self.n_rot], axis=-1)

    def query_parts(self, q: Array) -> Any:
        return np.split(q, [q.shape[-1] - self.n_rot], axis=-1)

    def latent_queries(self, y: Array) -> Array:
        narrow = self.tap("q_a_norm", self.norm(self.tap("q_a", self.product(y, "attn_q_a")), "attn_q_a_norm"))
        q = self.tap("q_b", self.product(narrow, "attn_q_b")).reshape(len(y), self.heads, self.dim)
        plain, shared = self.query_parts(q)
        plain = self.tap("q_nope", plain)
        plain = self.tap("q_nope_absorbed", self.of_heads(plain.transpose(1, 0, 2), "attn_k_b"))
        turned = self.tap("q_pe", self.rotated(shared, "Q"))
        return self.tap("Qcur", np.concatenate([plain.transpose(1, 0, 2), turned], axis=-1))

    def of_heads(self, x: Array, stem: str) -> Array:
        """Each head's rows [head, token, in] through its own matrix."""
        return x @ self.weight(stem).swapaxes(-1, -2)


def in_pairs(x: Array, cos: Array, sin: Array) -> Array:
    a, b = x[..., 0::2], x[..., 1::2]
    return np.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)


def in_halves(x: Array, cos: Array, sin: Array) -> Array:
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
