"""Attention of heads, plain or of latent rows: positions, cache, scores, mask, softmax, merging."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray


class Attention:
    """The part of an engine that lets a token look back at others."""

    file: Any
    a: Any
    h: Any
    layer: int
    positions: Array
    caches: dict[tuple[str, int], Array]
    given: Any
    recorded: dict[str, list[Array]]
    tap: Any
    has: Any
    stores: Any
    name: Any
    loaded: Any
    norm: Any
    qkv: Any
    product: Any
    linear: Any

    @property
    def kv_heads(self) -> int:
        own = self.h.kv_heads
        return int(own[self.layer] if isinstance(own, list) else own)

    @property
    def local(self) -> bool:
        """Whether this layer sees a window alone."""
        return bool(self.h.arch.window) and (self.layer + 1) % self.h.arch.window != 0

    @property
    def latent(self) -> bool:
        return bool(self.stores("attn_kv_a_mqa"))

    # -- RoPE ------------------------------------------------------------------------------------------------------

    def base(self) -> float:
        return float(self.h.arch.local_base if self.local and self.h.arch.local_base else self.h.base)

    def factors(self) -> Array:
        """What frequencies are divided by, one for each pair."""
        names = ("rope_freqs.weight", "rope_factors_short.weight")
        return next((self.file[name] for name in names if name in self.file), np.ones(self.h.n_rot // 2))

    def frequencies(self) -> Array:
        """Each pair's angle at position 1, before scaling."""
        return self.base() ** (-2.0 * np.arange(self.h.n_rot // 2) / self.h.n_rot) / self.factors()

    def theta(self, positions: Array) -> Array:
        """Angles [token, n_rot / 2]."""
        plain = positions[:, None].astype(np.float64) * self.frequencies()
        if self.h.scaling == "linear":
            return plain / self.stretch()
        if self.h.scaling == "yarn":
            keep = self.yarn_keep()
            return plain / self.stretch() * (1 - keep) + plain * keep
        return plain

    def stretch(self) -> float:
        """The file's scaling factor."""
        return float(self.h.factor)

    def yarn_keep(self) -> Array:
        """How much of each pair's angle YaRN leaves as it is."""
        n, turns = self.h.n_rot, (32.0, 1.0)
        low, high = (
            n * math.log(self.h.original / (turn * 2 * math.pi)) / (2 * math.log(self.base())) for turn in turns
        )
        low, high = max(0, math.floor(low)), min(n - 1, math.ceil(high))
        return 1 - np.clip((np.arange(n // 2) - low) / max(0.001, high - low), 0, 1)

    def magnitude(self) -> float:
        """What YaRN multiplies rotated values by; models of latent attention have it in the scale."""
        stretched = self.h.scaling == "yarn" and self.stretch() > 1 and not self.latent
        return 1 + 0.1 * math.log(self.stretch()) if stretched else 1.0

    def angles(self, positions: Array) -> tuple[Array, Array]:
        """cos and sin [token, n_rot / 2]."""
        theta, size = self.theta(positions), self.magnitude()
        cos, sin = (function(theta) * size for function in (np.cos, np.sin))
        return self.a.tables(cos.astype(self.a.dtype)), self.a.tables(sin.astype(self.a.dtype))

    @property
    def in_pairs(self) -> bool:
        """Whether this engine rotates (2i, 2i+1)."""
        return bool(self.h.pairs != self.has("other heads"))

    def turned(self, x: Array, cos: Array, sin: Array, in_pairs: bool) -> Array:
        """Every head's pairs rotated: x [token, head, dim]."""
        half, out = cos.shape[-1], x.copy()
        first, second = (
            (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if in_pairs else (slice(0, half), slice(half, 2 * half))
        )
        c, s, a, b = cos[:, None], sin[:, None], x[..., first], x[..., second]
        out[..., first], out[..., second] = a * c - b * s, b * c + a * s
        return out

    def rotated(self, x: Array, side: str) -> Array:
        return self.turned(x, *self.angles(self.positions), self.in_pairs)

    def rotated_both(self, q: Array, k: Array) -> tuple[Array, Array]:
        root = math.sqrt(self.scaled_at("scale in both"))
        q = self.rotated(q, "Q") * q.dtype.type(self.scaled_at("scale in Q") * root)
        k = self.rotated(k, "K") * k.dtype.type(self.scaled_at("scale in K") * root)
        return self.tap("Qcur_rope", q), self.tap("Kcur_rope", k)

    # -- the scale -------------------------------------------------------------------------------------------------

    def scale(self) -> float:
        return 1 / math.sqrt(self.h.dim)

    def scaled_at(self, *layouts: str) -> float:
        """The scale where one of these layouts has it; else 1."""
        return self.scale() if any(map(self.has, layouts)) else 1.0

    def query_scale(self) -> float:
        """Q's, in architectures that have the scale there."""
        return self.scale()

    def softmax_scale(self) -> float:
        folded = ("scale in Wq", "scale in Q", "scale in K", "scale in both", "scale in scores")
        if self.h.arch.queries_scaled or any(map(self.has, folded)):
            return 1.0
        if self.latent:
            grown = 1 + self.file.get("rope.scaling.yarn_log_multiplier") * math.log(self.h.factor)
            return float(grown * grown * self.scale())
        return float(self.file.get("attention.scale") or self.scale())

    # -- heads -----------------------------------------------------------------------------------------------------

    def heads_attended(self, y: Array) -> Array:
        q, k, v = (self.tap(f"{side}cur_proj", part) for side, part in zip("QKV", self.qkv(y), strict=True))
        q, k, v = (part.reshape(len(y), -1, self.h.dim) for part in (q, k, v))
        if self.stores("attn_q_norm"):
            q = self.tap("Qcur_normed", self.norm(q, "attn_q_norm"))
            k = self.tap("Kcur_normed", self.norm(k, "attn_k_norm"))
        if self.h.arch.rotates:
            q, k = self.rotated_both(q, k)
        keys, values, q = self.kept("k", self.key(k)), self.kept("v", self.value(v)), self.query(q)
        if self.h.arch.queries_scaled:
            q = self.tap("Qcur", q * q.dtype.type(self.query_scale()))
        mixed = self.tap("kqv_out", self.attention(q, keys, values))
        return self.tap("attn_out", self.linear(mixed, "attn_output"))

    def query(self, q: Array) -> Array:
        """Q as the scores' product reads it."""
        return self.a.queries(q)

    def key(self, k: Array) -> Array:
        """K as the cache keeps it."""
        return self.a.keys(k)

    def value(self, v: Array) -> Array:
        return self.a.values(v)

    def kept(self, side: str, rows: Array) -> Array:
        """The cache with the step's rows: [key, head, dim]."""
        place, rows = (side, self.layer), self.by_head(rows)
        before = self.caches.get(place)
        self.caches[place] = rows if before is None else np.concatenate([before, rows], axis=-1)
        name, cache = f"kv_{side}-{self.layer}", self.by_token(self.caches[place])
        self.recorded[name] = [cache]
        return self.given[name][: len(cache)].astype(cache.dtype) if name in self.given else cache

    def by_head(self, rows: Array) -> Array:
        """[key, head, dim] -> [head, dim, key]."""
        return rows.transpose(1, 2, 0)

    def by_token(self, cache: Array) -> Array:
        return cache.transpose(2, 0, 1)

    def read_keys(self, keys: Array) -> Array:
        """The cache's K rows as the scores read them."""
        return keys

    def read_values(self, values: Array) -> Array:
        return values

    def key_heads(self) -> Array:
        """The K head of every query head."""
        return np.arange(self.h.heads) // (self.h.heads // self.kv_heads)

    def value_heads(self) -> Array:
        return np.arange(self.h.heads) // (self.h.heads // self.kv_heads)

    def scores(self, q: Array, keys: Array) -> Array:
        """[head, query, key]."""
        scores = np.stack([self.a.multiply(q[:, h], keys[:, k]) for h, k in enumerate(self.key_heads())])
        return scores * scores.dtype.type(self.scaled_at("scale in scores"))

    def capped(self, x: Array) -> Array:
        """Scaled scores on their way into the softmax."""
        return x

    def hidden(self, queries: Array, keys: Array) -> Array:
        """Which keys a query does not see: [query, 1], [1, key] -> [query, key]."""
        later = keys > queries
        return later | (keys <= queries - self.width()) if self.local else later

    def width(self) -> int:
        """How many keys back a local layer sees."""
        return int(self.file.get("attention.sliding_window"))

    def floor(self) -> float:
        """What hidden scores are set to."""
        return -np.inf

    def masked(self, scores: Array, first_key: int = 0) -> Array:
        """Scaled scores, hidden ones far below."""
        x, keys = self.scaled(scores, first_key), np.arange(first_key, first_key + scores.shape[-1])
        hidden = self.hidden(self.positions[:, None], keys[None, :])
        return np.where(hidden, x.dtype.type(self.floor()), x)

    def scaled(self, scores: Array, first_key: int = 0) -> Array:
        """Scaled scores with what depends on the distance."""
        x = self.capped(self.a.scores(scores) * scores.dtype.type(self.softmax_scale()))
        if self.h.arch.positions != "alibi":
            return x
        distance = np.arange(first_key, first_key + scores.shape[-1]) - self.positions[:, None]
        return np.asarray(x + self.slopes()[:, None, None] * distance, x.dtype)

    def slopes(self) -> Array:
        """ALiBi's, for a number of heads that is a power of two."""
        return 2.0 ** (-8.0 * (np.arange(self.h.heads) + 1) / self.h.heads)

    def softmax(self, x: Array) -> Array:
        e = self.a.exp(x - x.max(axis=-1, keepdims=True))
        return e / e.sum(axis=-1, keepdims=True)

    def sinks(self) -> Array | None:
        """A score of each head that no key has."""
        return self.file[self.name("attn_sinks")] if self.stores("attn_sinks") else None

    def over_keys(self, x: Array) -> Array:
        """The softmax of masked scores [head, query, key], sinks with them."""
        sinks = self.sinks()
        if sinks is None:
            return self.softmax(x)
        own = np.broadcast_to(sinks.reshape(-1, 1, 1).astype(x.dtype), (*x.shape[:2], 1))
        return self.softmax(np.concatenate([x, own], axis=-1))[..., :-1]

    def mixed(self, probabilities: Array, values: Array) -> Array:
        """[head, query, key], [key, head, dim] -> [head, query, dim]."""
        p = self.a.probabilities(probabilities)
        return np.stack([self.a.multiply(p[h], values[:, k].T) for h, k in enumerate(self.value_heads())])

    def merged(self, heads: Array) -> Array:
        """[head, query, dim] -> [query, head * dim]."""
        return np.ascontiguousarray(heads.transpose(1, 0, 2)).reshape(heads.shape[1], -1)

    def probabilities(self, scores: Array) -> Array:
        return self.over_keys(self.masked(scores))

    def attention(self, q: Array, keys: Array, values: Array) -> Array:
        if self.a.online:
            return self.merged(self.attended_in_blocks(q, keys, values))
        return self.merged(self.looked_up(q, self.read_keys(keys), self.read_values(values)))

    def looked_up(self, q: Array, keys: Array, values: Array) -> Array:
        """[head, query, dim] of values [key, head, dim]."""
        scores = self.tap("kq", self.scores(q, keys))
        return self.tap("kqv", self.mixed(self.tap("kq_soft_max", self.probabilities(scores)), values))

    def attended_in_blocks(self, q: Array, keys: Array, values: Array) -> Array:
        """Softmax as it goes: a maximum, a sum and a mixture are kept, and rescaled where the maximum grows."""
        keys, values = self.read_keys(keys), self.read_values(values)
        most = np.full((self.h.heads, len(q), 1), -np.inf, q.dtype)
        total, out = np.zeros_like(most), np.zeros((self.h.heads, len(q), self.h.dim), q.dtype)
        for start in range(0, len(keys), self.a.online):
            stop = start + self.a.online
            x = self.masked(self.scores(q, keys[start:stop]), start)
            new = np.maximum(most, x.max(axis=-1, keepdims=True))
            fade = np.where(np.isneginf(most), 0, np.exp(most - new)).astype(q.dtype)
            e = np.where(np.isneginf(x), 0, self.a.exp(x - new)).astype(q.dtype)
            total = total * fade + e.sum(axis=-1, keepdims=True)
            out = out * fade + self.mixed(e, values[start:stop])
            most = new
        return out / total

    # -- latent rows -----------------------------------------------------------------------------------------------

    def latent_attention(self, y: Array) -> Array:
        """Keys and values are one compressed row, which heads read through matrices of their own."""
        queries = self.latent_queries(y)
        latent, shared = self.latent_parts(self.tap("kv_cmpr_pe", self.product(y, "attn_kv_a_mqa")))
        wide = latent.shape[-1]
        latent = self.tap("kv_cmpr", self.norm(latent, "attn_kv_a_norm"))
        turned = self.tap("k_pe", self.rotated(shared[:, None], "K"))
        keys = self.tap("Kcur", np.concatenate([latent[:, None], turned], axis=-1))
        keys = self.read_keys(self.kept("k", keys))
        heads = self.looked_up(queries, keys, keys[..., :wide])
        heads = self.tap("kqv_mla", self.of_heads(heads, "attn_v_b"))
        return self.tap("attn_out", self.linear(self.tap("kqv_out", self.merged(heads)), "attn_output"))

    def latent_parts(self, rows: Array) -> Any:
        """What K and V are made of, and the part of K that is rotated."""
        return np.split(rows, [rows.shape[-1] - self.h.n_rot], axis=-1)

    def query_parts(self, q: Array) -> Any:
        return np.split(q, [q.shape[-1] - self.h.n_rot], axis=-1)

    def latent_queries(self, y: Array) -> Array:
        narrow = self.tap("q_a_norm", self.norm(self.tap("q_a", self.product(y, "attn_q_a")), "attn_q_a_norm"))
        q = self.tap("q_b", self.product(narrow, "attn_q_b")).reshape(len(y), self.h.heads, self.h.dim)
        plain, shared = self.query_parts(q)
        plain = self.tap("q_nope", plain)
        plain = self.tap("q_nope_absorbed", self.of_heads(plain.transpose(1, 0, 2), "attn_k_b"))
        turned = self.tap("q_pe", self.rotated(shared, "Q"))
        return self.tap("Qcur", np.concatenate([plain.transpose(1, 0, 2), turned], axis=-1))

    def of_heads(self, x: Array, stem: str) -> Array:
        """Each head's rows [head, token, in] through its own matrix."""
        return x @ self.loaded(stem).swapaxes(-1, -2)
