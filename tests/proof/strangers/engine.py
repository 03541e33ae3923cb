"""A stranger's engine: a forward pass in small ops, each of which an arithmetic carries out and a bug may replace.

Arrays are [token, ...]. Every tap passes ``Engine.tap`` under llama.cpp's word for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from proof.strangers.arithmetic import Arithmetic
from proof.strangers.model import File

Array = np.ndarray
Edit = Callable[..., Any]
OUTSIDE = ("output", "token_embd", "output_norm")
FOLDED = {
    "attn_q": "attn_norm", "attn_k": "attn_norm", "attn_v": "attn_norm", "attn_qkv": "attn_norm",
    "ffn_gate": "ffn_norm", "ffn_up": "ffn_norm", "ffn_gate_inp": "ffn_norm", "ffn_gate_exps": "ffn_norm",
    "ffn_up_exps": "ffn_norm", "output": "output_norm", "token_embd": "output_norm",
}  # fmt: skip


@dataclass(frozen=True)
class Bug:
    """What an engine does wrongly.

    ``edits`` replace ops: name -> edit(engine, right op, *arguments); ``faults`` change what passes a tap: word ->
    fault(engine, value). ``needs`` are places that some arithmetics lack (Arithmetic.lacks).
    """

    name: str
    edits: Mapping[str, Edit] = field(default_factory=dict)
    faults: Mapping[str, Edit] = field(default_factory=dict)
    needs: frozenset[str] = frozenset()


NONE = Bug("none")


class Engine:
    """Runs one file with one arithmetic, and perhaps one bug."""

    def __init__(self, file: File, arithmetic: Arithmetic, bug: Bug = NONE) -> None:
        self.file, self.a, self.bug, self.h = file, arithmetic, bug, file.hyper
        self.layer, self.start, self.n_prefill = 0, 0, 0
        self.seen: dict[str, Array] = {}
        self.given: Mapping[str, Array] = {}
        self.recorded: dict[str, list[Array]] = {}
        self.caches: dict[tuple[str, int], Array] = {}
        for op, edit in bug.edits.items():
            setattr(self, op, partial(edit, self, getattr(self, op)))

    # -- the run ---------------------------------------------------------------------------------------------------

    def run(
        self, tokens: Sequence[int], n_prefill: int = 0, given: Mapping[str, Array] | None = None
    ) -> dict[str, Array]:
        """Every tap: a prefill, then one token a step. Of taps that are ``given``, those values are gone on with."""
        self.n_prefill = n_prefill or len(tokens)
        self.n_tokens, self.given = len(tokens), given or {}
        self.recorded, self.caches = {}, {}
        edges = [0, *range(self.n_prefill, len(tokens) + 1)]
        with np.errstate(all="ignore"):
            for start, stop in pairwise(edges):
                self.seen, self.start = {}, start
                self.forward(np.asarray(tokens[start:stop]))
        return {name: self._joined(name, parts) for name, parts in self.recorded.items()}

    def _joined(self, name: str, parts: list[Array]) -> Array:
        axis = int(is_scores(name))
        if axis:
            room = max(part.shape[2] for part in parts)
            parts = [np.pad(part, ((0, 0), (0, 0), (0, room - part.shape[2]))) for part in parts]
        return np.concatenate(parts, axis=axis)

    def tap(self, word: str, x: Array, layered: bool = True) -> Array:
        """A named value: rounded as results are, recorded, and gone on with."""
        name = f"{word}-{self.layer}" if layered else word
        if word in self.bug.faults:
            x = np.asarray(self.bug.faults[word](self, x), x.dtype)
        if x.dtype.kind == "f":
            x = self.a.results(x)
        if word not in self.a.unrecorded:
            self.recorded.setdefault(name, []).append(x)
        if name in self.given:
            x = self._of_given(name, x)
        self.seen[name] = x
        return x

    def _of_given(self, name: str, x: Array) -> Array:
        rows = slice(self.start, self.start + x.shape[int(is_scores(name))])
        values = self.given[name]
        values = values[:, rows, : x.shape[2]] if is_scores(name) else values[rows]
        return values.reshape(x.shape).astype(x.dtype)

    def here(self, word: str, layer: int | None = None) -> Array:
        """A tap that has passed: of this layer, another one, or outside the layers."""
        return self.seen[word] if word in self.seen else self.seen[f"{word}-{self.layer if layer is None else layer}"]

    def layer_input(self, layer: int | None = None) -> Array:
        layer = self.layer if layer is None else layer
        return self.seen["embd"] if layer <= 0 else self.seen[f"l_out-{layer - 1}"]

    @property
    def positions(self) -> Array:
        """Those of the present step's tokens."""
        return np.arange(self.start, min(self.n_tokens, max(self.n_prefill, self.start + 1)))

    def has(self, word: str) -> bool:
        """Whether a choice of layout was made."""
        return word in self.a.layout

    # -- weights as they are loaded --------------------------------------------------------------------------------

    def name(self, stem: str, end: str = "weight") -> str:
        return f"{stem}.{end}" if stem in OUTSIDE else f"blk.{self.layer}.{stem}.{end}"

    def matrix(self, stem: str) -> Array:
        """A weight as the file has it: [out, in], or [expert, out, in]."""
        return self.file[self.name(stem)]

    def bias(self, stem: str) -> Array | None:
        return self.file.tensors.get(self.name(stem, "bias"))

    def factor(self, stem: str) -> Array | None:
        """The weight's own scale, which attention and llama's FFN have."""
        return self.file.tensors.get(self.name(stem, "scale"))

    def norm_weight(self, stem: str) -> Array:
        return self.file[self.name(stem)]

    def head_stem(self) -> str:
        return "output" if "output.weight" in self.file else "token_embd"

    def loaded(self, stem: str) -> Array:
        """A matrix as this engine keeps it."""
        w = self.matrix(stem)
        if self.has("norms folded") and stem in FOLDED:
            w = w * self.norm_weight(FOLDED[stem])
        return self.a.weights(self._reordered(stem, w).astype(self.a.dtype))

    def loaded_bias(self, stem: str) -> Array | None:
        b = self.bias(stem)
        if self.has("norms folded") and self.h.layer_norm and stem in FOLDED:
            shift = self.matrix(stem) @ self.bias(FOLDED[stem])
            b = shift if b is None else b + shift
        return None if b is None else self._reordered(stem, b).astype(self.a.dtype)

    def _reordered(self, stem: str, rows: Array) -> Array:
        """Rows of Q and K in the other order of RoPE, Q's times the scale: as the layout has them."""
        normed = self.name("attn_q_norm") in self.file
        if self.has("other heads") and stem in ("attn_q", "attn_k"):
            rows = self._other_heads(rows)
        if self.has("scale in Wq") and stem == "attn_q" and not normed:
            rows = rows * np.float32(self.scale())
        return rows

    def _other_heads(self, rows: Array) -> Array:
        """Rows of each head [n, ...] from pairs to halves, or from halves to pairs: those that RoPE rotates."""
        heads = rows.reshape(-1, self.h.dim, *rows.shape[1:])
        part = heads[:, : self.h.n_rot]
        split = part.reshape(len(heads), *((-1, 2) if self.h.pairs else (2, -1)), *rows.shape[1:]).swapaxes(1, 2)
        return np.concatenate([split.reshape(part.shape), heads[:, self.h.n_rot :]], axis=1).reshape(rows.shape)

    def head_norm_weight(self, stem: str) -> Array:
        """QK-norm's weight in this engine's layout."""
        w = self.norm_weight(stem)
        if self.has("other heads"):
            w = self._other_heads(w)
        if self.has("scale in Wq") and stem == "attn_q_norm":
            w = w * np.float32(self.scale())
        return w

    # -- ops -------------------------------------------------------------------------------------------------------

    def embed(self, tokens: Array) -> Array:
        return self.a.weights(self.file["token_embd.weight"].astype(self.a.dtype))[tokens]

    def epsilon(self) -> float:
        return self.h.eps

    def centred(self, x: Array) -> Array:
        """Without its mean, where the model has LayerNorm."""
        return x - x.mean(axis=-1, keepdims=True) if self.h.layer_norm else x

    def root(self, x: Array) -> Array:
        """What a norm divides by: sqrt(mean square + epsilon)."""
        return np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(self.epsilon()))

    def normalised(self, x: Array) -> Array:
        x = self.centred(x)
        return x / np.asarray(self.root(x), x.dtype)

    def norm(self, x: Array, stem: str) -> Array:
        y = self.a.norms(self.normalised(x))
        if stem.startswith(("attn_q_", "attn_k_")):
            return self.weighed(y, self.head_norm_weight(stem), None)
        if self.has("norms folded"):
            return y
        return self.weighed(y, self.norm_weight(stem), self.bias(stem) if self.h.layer_norm else None)

    def weighed(self, y: Array, weight: Array, bias: Array | None) -> Array:
        y = y * weight.astype(y.dtype)
        return y if bias is None else y + bias.astype(y.dtype)

    def multiplied(self, x: Array, w: Array) -> Array:
        return self.a.multiply(self.a.activations(x), w)

    def product(self, x: Array, stem: str) -> Array:
        """x @ W.T."""
        return self.a.products(self.multiplied(x, self.loaded(stem)))

    def linear(self, x: Array, stem: str) -> Array:
        """The product with the weight's scale and bias; in the FFN the scale is last."""
        return self.finished(self.product(x, stem), stem)

    def finished(self, y: Array, stem: str) -> Array:
        factor, bias = self.factor(stem), self.loaded_bias(stem)
        if bias is not None and stem.startswith("ffn_"):
            y, bias = y + bias, None
        if factor is not None:
            y = y * factor.astype(y.dtype)
        return y if bias is None else y + bias

    def qkv(self, x: Array) -> tuple[Array, Array, Array]:
        if self.name("attn_qkv") in self.file:
            return self.split(self.linear(x, "attn_qkv"))
        if not self.has("fused"):
            return self.linear(x, "attn_q"), self.linear(x, "attn_k"), self.linear(x, "attn_v")
        order = ("attn_v", "attn_k", "attn_q")
        parts = [self.loaded(stem) for stem in order]
        y = self.a.products(self.multiplied(x, np.concatenate(parts)))
        v, k, q = np.split(y, np.cumsum([len(part) for part in parts])[:-1], axis=-1)
        return self.finished(q, "attn_q"), self.finished(k, "attn_k"), self.finished(v, "attn_v")

    def split(self, y: Array) -> tuple[Array, Array, Array]:
        """Q, K and V of the fused product [token, (q, k, v)]."""
        q, k, v = np.split(y, np.cumsum([self.h.heads, self.h.kv_heads]) * self.h.dim, axis=-1)
        if self.has("other heads"):
            q, k = (self._other_heads(part.T).T for part in (q, k))
        if self.has("scale in Wq"):
            q = q * q.dtype.type(self.scale())
        if self.name("attn_qkv", "bias") in self.file:
            return q, k, v
        return self.finished(q, "attn_q"), self.finished(k, "attn_k"), self.finished(v, "attn_v")

    def frequencies(self) -> Array:
        """Each pair's angle at position 1, before scaling."""
        frequency = self.h.base ** (-2.0 * np.arange(self.h.n_rot // 2) / self.h.n_rot)
        factors = "rope_freqs.weight"
        return frequency / self.file[factors] if factors in self.file else frequency

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
        return self.h.factor

    def yarn_keep(self) -> Array:
        """How much of each pair's angle YaRN leaves as it is."""
        n, turns = self.h.n_rot, (32.0, 1.0)
        low, high = (
            n * math.log(self.h.original / (turn * 2 * math.pi)) / (2 * math.log(self.h.base)) for turn in turns
        )
        low, high = max(0, math.floor(low)), min(n - 1, math.ceil(high))
        return 1 - np.clip((np.arange(n // 2) - low) / max(0.001, high - low), 0, 1)

    def magnitude(self) -> float:
        stretched = self.h.scaling == "yarn" and self.stretch() > 1
        return 1 + 0.1 * math.log(self.stretch()) if stretched else 1.0

    def angles(self, positions: Array) -> tuple[Array, Array]:
        """cos and sin [token, n_rot / 2]."""
        theta, size = self.theta(positions), self.magnitude()
        cos, sin = (function(theta) * size for function in (np.cos, np.sin))
        return self.a.tables(cos.astype(self.a.dtype)), self.a.tables(sin.astype(self.a.dtype))

    @property
    def in_pairs(self) -> bool:
        """Whether this engine rotates (2i, 2i+1)."""
        return self.h.pairs != self.has("other heads")

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

    def add(self, branch: Array, residual: Array) -> Array:
        return branch + residual

    def gated(self, gate: Array, up: Array) -> Array:
        return self.a.silu(gate) * up

    # -- attention -------------------------------------------------------------------------------------------------

    def scale(self) -> float:
        return 1 / math.sqrt(self.h.dim)

    def scaled_at(self, *layouts: str) -> float:
        """The scale where one of these layouts has it; else 1."""
        return self.scale() if any(map(self.has, layouts)) else 1.0

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
        return np.arange(self.h.heads) // (self.h.heads // self.h.kv_heads)

    def value_heads(self) -> Array:
        return np.arange(self.h.heads) // (self.h.heads // self.h.kv_heads)

    def scores(self, q: Array, keys: Array) -> Array:
        """[head, query, key]."""
        scores = np.stack([self.a.multiply(q[:, h], keys[:, k]) for h, k in enumerate(self.key_heads())])
        return scores * scores.dtype.type(self.scaled_at("scale in scores"))

    def softmax_scale(self) -> float:
        folded = ("scale in Wq", "scale in Q", "scale in K", "scale in both", "scale in scores")
        return 1.0 if any(map(self.has, folded)) else self.scale()

    def capped(self, x: Array) -> Array:
        """Scaled scores on their way into the softmax."""
        return x

    def hidden(self, queries: Array, keys: Array) -> Array:
        """Which keys a query does not see: [query, 1], [1, key] -> [query, key]."""
        return keys > queries

    def floor(self) -> float:
        """What hidden scores are set to."""
        return -np.inf

    def masked(self, scores: Array, first_key: int = 0) -> Array:
        """Scaled scores, hidden ones far below."""
        x = self.capped(self.a.scores(scores) * scores.dtype.type(self.softmax_scale()))
        keys = np.arange(first_key, first_key + scores.shape[-1])
        hidden = self.hidden(self.positions[:, None], keys[None, :])
        return np.where(hidden, x.dtype.type(self.floor()), x)

    def softmax(self, x: Array) -> Array:
        e = self.a.exp(x - x.max(axis=-1, keepdims=True))
        return e / e.sum(axis=-1, keepdims=True)

    def mixed(self, probabilities: Array, values: Array) -> Array:
        """[head, query, key], [key, head, dim] -> [head, query, dim]."""
        p = self.a.probabilities(probabilities)
        return np.stack([self.a.multiply(p[h], values[:, k].T) for h, k in enumerate(self.value_heads())])

    def merged(self, heads: Array) -> Array:
        """[head, query, dim] -> [query, head * dim]."""
        return np.ascontiguousarray(heads.transpose(1, 0, 2)).reshape(heads.shape[1], -1)

    def probabilities(self, scores: Array) -> Array:
        return self.softmax(self.masked(scores))

    def attention(self, q: Array, keys: Array, values: Array) -> Array:
        if self.a.online:
            return self.merged(self.attended_in_blocks(q, keys, values))
        scores = self.tap("kq", self.scores(q, self.read_keys(keys)))
        probabilities = self.tap("kq_soft_max", self.probabilities(scores))
        return self.merged(self.mixed(probabilities, self.read_values(values)))

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

    # -- the layers ------------------------------------------------------------------------------------------------

    def forward(self, tokens: Array) -> Array:
        self.layer = 0
        x = self.tap("embd", self.embed(tokens), layered=False)
        for layer in range(self.h.layers):
            self.layer = layer
            x = self.block(x)
        y = self.tap("result_norm", self.norm(x, "output_norm"), layered=False)
        return self.tap("result_output", self.a.logits(self.head(y)), layered=False)

    def head(self, y: Array) -> Array:
        return self.linear(y, self.head_stem())

    def block(self, x: Array) -> Array:
        y = self.tap("attn_norm", self.norm(x, "attn_norm"))
        q, k, v = (self.tap(f"{side}cur_proj", part) for side, part in zip("QKV", self.qkv(y), strict=True))
        q, k, v = (part.reshape(len(x), -1, self.h.dim) for part in (q, k, v))
        if self.name("attn_q_norm") in self.file:
            q = self.tap("Qcur_normed", self.norm(q, "attn_q_norm"))
            k = self.tap("Kcur_normed", self.norm(k, "attn_k_norm"))
        q, k = self.rotated_both(q, k)
        keys, values = self.kept("k", self.key(k)), self.kept("v", self.value(v))
        mixed = self.tap("kqv_out", self.attention(self.query(q), keys, values))
        out = self.tap("attn_out", self.linear(mixed, "attn_output"))
        x = self.tap("ffn_inp", self.add(out, x))
        y = self.tap("ffn_norm", self.norm(x, "ffn_norm"))
        y = self.mixture(y) if self.name("ffn_gate_inp") in self.file else self.ffn(y)
        return self.tap("l_out", self.add(self.tap("ffn_out", y), x))

    def rotated_both(self, q: Array, k: Array) -> tuple[Array, Array]:
        root = math.sqrt(self.scaled_at("scale in both"))
        q = self.rotated(q, "Q") * q.dtype.type(self.scaled_at("scale in Q") * root)
        k = self.rotated(k, "K") * k.dtype.type(self.scaled_at("scale in K") * root)
        return self.tap("Qcur_rope", q), self.tap("Kcur_rope", k)

    def ffn(self, y: Array) -> Array:
        gate, up = self.gate_up(y)
        gate, up = self.tap("ffn_gate", gate), self.tap("ffn_up", up)
        return self.linear(self.tap("ffn_swiglu", self.gated(gate, up)), "ffn_down")

    def gate_up(self, y: Array) -> tuple[Array, Array]:
        if not self.has("fused"):
            return self.linear(y, "ffn_gate"), self.linear(y, "ffn_up")
        gate, up = self.loaded("ffn_gate"), self.loaded("ffn_up")
        rows = np.stack([gate, up], axis=1).reshape(-1, gate.shape[1])
        both = self.a.products(self.multiplied(y, rows))
        return self.finished(both[:, 0::2], "ffn_gate"), self.finished(both[:, 1::2], "ffn_up")

    # -- experts ---------------------------------------------------------------------------------------------------

    def mixture(self, y: Array) -> Array:
        logits = self.tap("ffn_moe_logits", self.linear(y, "ffn_gate_inp"))
        probs = self.tap("ffn_moe_probs", self.router_probs(logits))
        chosen = self.tap("ffn_moe_topk", self.choice(probs, self.h.used).astype(np.int32))
        weights = self.tap("ffn_moe_weights", self.router_weights(probs, chosen))
        weights = self.tap("ffn_moe_weights_norm", self.summing_to_one(weights))
        each = np.repeat(y[:, None], self.h.used, axis=1)
        gate = self.tap("ffn_moe_gate", self.experts(each, "ffn_gate_exps", chosen))
        up = self.tap("ffn_moe_up", self.experts(each, "ffn_up_exps", chosen))
        inner = self.tap("ffn_moe_swiglu", self.gated(gate, up))
        down = self.tap("ffn_moe_down", self.experts(inner, "ffn_down_exps", chosen))
        return self.weighted(down, weights)

    def router_probs(self, logits: Array) -> Array:
        return self.softmax(logits)

    def choice(self, probs: Array, count: int) -> Array:
        return np.argsort(-probs, axis=-1, kind="stable")[:, :count]

    def router_weights(self, probs: Array, chosen: Array) -> Array:
        return np.take_along_axis(probs, chosen, axis=-1)

    def summing_to_one(self, weights: Array) -> Array:
        least = weights.dtype.type(2.0**-14)  # as llama.cpp, where scores went wrong
        return weights / np.maximum(weights.sum(axis=-1, keepdims=True), least)

    def experts(self, x: Array, stem: str, chosen: Array) -> Array:
        """Every token's product with its experts' matrices: [token, used, in] -> [token, used, out]."""
        w, x = self.loaded(stem), self.a.activations(x)
        out = np.zeros((*x.shape[:2], w.shape[1]), x.dtype)
        for expert in np.unique(chosen):
            mine = chosen == expert
            out[mine] = self.a.multiply(x[mine], w[expert])
        return self.a.products(out)

    def weighted(self, down: Array, weights: Array) -> Array:
        return (down * weights[..., None]).sum(axis=1)


def is_scores(name: str) -> bool:
    """Whether a tap is [head, query, key]."""
    return name.startswith(("kq-", "kq_soft_max-"))
