"""An engine in NumPy, one method an operation, for decoder layers of attention and FFN; a fault replaces a method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

Array = np.ndarray

PAIRS = ("llama", "granite", "deepseek2", "smollm3")  # RoPE turns neighbours; elsewhere, the two halves
GELU = ("gemma", "gemma2", "gemma3")
SCALED_Q = (*GELU, "phi3")  # Q is scaled, and the scores are not
SCALED_FFN = ("llama", "qwen3")  # whose graphs use the scales that a file may have for FFN weights
LOCAL = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2, "olmo2": 4}  # one layer of so many has no window


class Engine:
    def __init__(self, path: Path) -> None:
        self.file = gguf.GGUFReader(path)
        self.tensors = {t.name: t for t in self.file.tensors}
        self.arch = self.file.fields["general.architecture"].contents()
        self.kept: dict[str, Array] = {}
        self.out: dict[str, list[Array]] = {}
        self.layers, self.heads = self.key("block_count"), self.key("attention.head_count")
        self.kv_heads = self.key("attention.head_count_kv", self.heads)
        self.width = self.key("embedding_length")
        self.dim = self.key("attention.key_length", self.width // self.heads)
        self.rot = self.key("rope.dimension_count", self.dim)
        self.eps = self.key("attention.layer_norm_rms_epsilon") or self.key("attention.layer_norm_epsilon")
        self.k, self.v = dict[int, Array](), dict[int, Array]()  # the cache

    def key(self, name: str, default: Any = None) -> Any:
        """Metadata; zero is unset."""
        field = self.file.fields.get(f"{self.arch}.{name}")
        return (field.contents() if field else None) or default

    def has(self, name: str) -> bool:
        return name in self.tensors

    def decode(self, name: str, data: Array, kind: Any) -> Array:
        """A tensor's values: [..., rows, columns] or [columns]."""
        return gguf.quants.dequantize(data, kind).astype(np.float32)

    def weight(self, name: str) -> Array:
        if name not in self.kept:
            t = self.tensors[name]
            self.kept[name] = self.decode(name, t.data, t.tensor_type)
        return self.kept[name]

    def matmul(self, _name: str, x: Array, w: Array) -> Array:
        return x @ w.T

    def linear(self, name: str, x: Array) -> Array:
        y = self.matmul(name, x, self.weight(f"{name}.weight"))
        if self.has(f"{name}.scale") and (".ffn_" not in name or self.arch in SCALED_FFN):
            y = y * self.weight(f"{name}.scale")
        return self.bias(name, y)

    def bias(self, name: str, y: Array) -> Array:
        return y + self.weight(f"{name}.bias") if self.has(f"{name}.bias") else y

    def tap(self, name: str, x: Array) -> Array:
        self.out.setdefault(name, []).append(np.array(x))
        return x

    def run(self, tokens: list[int], batches: list[int]) -> dict[str, Array]:
        for self.step, end in enumerate(np.cumsum(batches)):
            self.pos = self.positions(np.arange(end - batches[self.step], end))
            self.forward(np.array(tokens[end - batches[self.step] : end]))
        taps = {name: self.join(name, parts) for name, parts in self.out.items()}
        for side, kept in (("k", self.k), ("v", self.v)):
            taps |= {f"kv_{side}-{i}": rows for i, rows in kept.items() if rows.ndim == 3}
        return taps

    def join(self, name: str, parts: list[Array]) -> Array:
        stem = name.partition("-")[0]
        if stem in ("q_nope_absorbed", "kqv", "kqv_mla"):
            return np.concatenate(parts, axis=1)
        if stem in ("kq", "kq_soft_max"):
            n = parts[-1].shape[2]
            return np.concatenate([np.pad(p, ((0, 0), (0, 0), (0, n - p.shape[2]))) for p in parts], axis=1)
        return np.concatenate(parts)

    def positions(self, pos: Array) -> Array:
        return pos

    def forward(self, ids: Array) -> None:
        x = self.tap("embd", self.embed(ids))
        for i in range(self.layers):
            x = self.layer(i, x)
        x = self.tap("result_norm", self.norm("output_norm", x))
        self.tap("result_output", self.logits(x))

    def embed(self, ids: Array) -> Array:
        scale = self.width**0.5 if self.arch in GELU else self.key("embedding_scale", 1.0)
        return self.weight("token_embd.weight")[ids] * np.float32(scale)

    def logits(self, x: Array) -> Array:
        y = self.linear("output" if self.has("output.weight") else "token_embd", x)
        return self.cap("final", y / np.float32(self.key("logit_scale", 1.0)))

    def cap(self, which: str, x: Array) -> Array:
        limit = self.key(f"{which}_logit_softcapping") if self.arch == "gemma2" else None
        return np.float32(limit) * np.tanh(x / np.float32(limit)) if limit else x

    def norm(self, name: str, x: Array) -> Array:
        if self.arch == "stablelm":
            x = x - x.mean(-1, keepdims=True)
        y = self.unit(name, x) * self.weight(f"{name}.weight")
        return self.bias(name, y)

    def unit(self, name: str, x: Array) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(self.eps))

    def add(self, name: str, x: Array, y: Array) -> Array:
        return x + y * np.float32(self.key("residual_scale", 1.0))

    def layer(self, i: int, x: Array) -> Array:
        b = f"blk.{i}."
        h = self.tap(f"attn_norm-{i}", self.norm(b + "attn_norm", x)) if self.has(b + "attn_norm.weight") else x
        mixer = self.latent if self.has(b + "attn_kv_a_mqa.weight") else self.attention
        o = self.tap(f"kqv_out-{i}", mixer(i, h))
        a = self.tap(f"attn_out-{i}", self.linear(b + "attn_output", o))
        if self.has(b + "post_attention_norm.weight") and self.arch != "gpt-oss":
            a = self.tap(f"attn_post_norm-{i}", self.norm(b + "post_attention_norm", a))
        y = self.tap(f"ffn_inp-{i}", self.add(f"ffn_inp-{i}", x, a))
        g = y
        if self.arch == "gpt-oss":
            g = self.tap(f"attn_post_norm-{i}", self.norm(b + "post_attention_norm", y))
        elif self.has(b + "ffn_norm.weight"):
            g = self.tap(f"ffn_norm-{i}", self.norm(b + "ffn_norm", y))
        f = self.tap(f"ffn_out-{i}", self.experts(i, g) if self.has(b + "ffn_gate_inp.weight") else self.ffn(i, g))
        if self.has(b + "post_ffw_norm.weight"):
            f = self.tap(f"ffn_post_norm-{i}", self.norm(b + "post_ffw_norm", f))
        return self.tap(f"l_out-{i}", self.add(f"l_out-{i}", y, f))

    def attention(self, i: int, h: Array) -> Array:
        b = f"blk.{i}.attn_"
        q = self.tap(f"Qcur_proj-{i}", self.linear(b + "q", h))
        k = self.tap(f"Kcur_proj-{i}", self.linear(b + "k", h))
        v = self.tap(f"Vcur_proj-{i}", self.linear(b + "v", h))
        q, k = self.heads_of(i, "q", q), self.heads_of(i, "k", k)
        if self.uses_rope(i):
            q = self.tap(f"Qcur_rope-{i}", self.rope(i, "q", q, self.pos))
            k = self.tap(f"Kcur_rope-{i}", self.rope(i, "k", k, self.pos))
        self.store(i, k, v.reshape(len(v), self.kv_heads, -1))
        keys, values = self.load(i)
        before, after = (self.scale(i), 1.0) if self.arch in SCALED_Q else (1.0, self.scale(i))
        kq = self.tap(f"kq-{i}", self.scores(i, q.transpose(1, 0, 2) * np.float32(before), keys))
        p = self.tap(f"kq_soft_max-{i}", self.probabilities(i, kq * np.float32(after)))
        return self.mix(i, p, values)

    def heads_of(self, i: int, side: str, x: Array) -> Array:
        name = f"blk.{i}.attn_{side}_norm"
        split = x.reshape(len(x), -1, self.dim)
        if not self.has(f"{name}.weight"):
            return split
        whole = self.weight(f"{name}.weight").size != self.dim
        normed = self.norm(name, x).reshape(split.shape) if whole else self.norm(name, split)
        return self.tap(f"{side.upper()}cur_normed-{i}", normed)

    def uses_rope(self, i: int) -> bool:
        return self.arch != "smollm3" or (i + 1) % 4 != 0

    def base(self, i: int) -> float:
        return 1e4 if self.arch == "gemma3" and self.window(i) else self.key("rope.freq_base", 1e4)

    def frequencies(self, i: int) -> tuple[Array, float]:
        """Radians a position of each pair, and what cosine and sine are multiplied by."""
        n, base = self.rot, self.base(i)
        own = base ** (-2.0 * np.arange(n // 2) / n) / self.factors()
        kind, factor = self.key("rope.scaling.type"), self.key("rope.scaling.factor", 1.0)
        if kind != "yarn":
            return own / (factor if kind == "linear" else 1), self.key("rope.scaling.attn_factor", 1.0)
        mixed = own * self.ramp(n, base) + own / factor * (1 - self.ramp(n, base))
        return mixed, 1.0 if self.arch == "deepseek2" else 1 + 0.1 * np.log(factor)

    def ramp(self, n: int, base: float) -> Array:
        """1 where a pair turns so often that it is left as it is, 0 where it is slowed down."""
        context = self.key("rope.scaling.original_context_length")
        low, high = (n * np.log(context / (turns * 2 * np.pi)) / (2 * np.log(base)) for turns in (32.0, 1.0))
        low, high = max(0, np.floor(low)), min(n - 1, np.ceil(high))
        return 1 - np.clip((np.arange(n // 2) - low) / max(0.001, high - low), 0, 1)

    def factors(self) -> Array | float:
        if self.has("rope_freqs.weight"):
            return self.weight("rope_freqs.weight")
        return self.weight(f"rope_factors_{self.side()}.weight") if self.has("rope_factors_long.weight") else 1.0

    def side(self) -> str:
        return "long" if self.key("rope.scaling.original_context_length", 256) < 256 else "short"

    def angles(self, i: int, pos: Array) -> tuple[Array, Array]:
        """Cosines and sines: [token, 1, pair]."""
        turn, size = self.frequencies(i)
        theta = pos[:, None, None] * turn
        return (np.cos(theta) * size).astype(np.float32), (np.sin(theta) * size).astype(np.float32)

    def rope(self, i: int, side: str, x: Array, pos: Array) -> Array:
        cos, sin = self.angles(i, pos)
        return self.rotate(x, cos, sin, self.arch in PAIRS)

    def rotate(self, x: Array, cos: Array, sin: Array, pairs: bool) -> Array:
        y, half = x.copy(), self.rot // 2
        one, two = (slice(0, self.rot, 2), slice(1, self.rot, 2)) if pairs else (slice(half), slice(half, self.rot))
        y[..., one] = x[..., one] * cos - x[..., two] * sin
        y[..., two] = x[..., one] * sin + x[..., two] * cos
        return y

    def store(self, i: int, k: Array, v: Array) -> None:
        for kept, new in ((self.k, k), (self.v, v)):
            rows = self.stored(new)
            kept[i] = np.concatenate([kept[i], rows]) if i in kept else rows

    def stored(self, x: Array) -> Array:
        return x.astype(np.float16).astype(np.float32)

    def load(self, i: int) -> tuple[Array, Array]:
        return self.k[i], self.v[i]

    def owner(self, head: int) -> int:
        """The KV head that a head reads."""
        return head // (self.heads // self.kv_heads)

    def scores(self, i: int, q: Array, k: Array) -> Array:
        return np.stack([q[h] @ k[:, self.owner(h)].T for h in range(self.heads)])

    def scale(self, i: int) -> float:
        return self.key("attention.scale") or self.dim**-0.5

    def window(self, i: int) -> int:
        every, pattern = LOCAL.get(self.arch, 1), self.key("attention.sliding_window_pattern")
        local = pattern[i] if isinstance(pattern, list) else (i + 1) % every != 0
        return self.key("attention.sliding_window", 0) if local else 0

    def hidden(self, i: int, n: int) -> Array:
        """Which of n keys a query does not see: [query, key]."""
        past = self.pos[:, None] - np.arange(n)
        return (past < 0) | ((past >= self.window(i)) if self.window(i) else False)

    def probabilities(self, i: int, scores: Array) -> Array:
        masked = np.where(self.hidden(i, scores.shape[2]), -np.inf, self.cap("attn", scores))
        return self.softmax(i, masked)

    def softmax(self, i: int, x: Array) -> Array:
        name = f"blk.{i}.attn_sinks.weight"
        sink = self.weight(name)[:, None, None] if self.has(name) else np.float32(-np.inf)
        top = np.maximum(x.max(-1, keepdims=True), sink)
        e = np.exp(x - top)
        return (e / (e.sum(-1, keepdims=True) + np.exp(sink - top))).astype(np.float32)

    def mix(self, i: int, p: Array, v: Array) -> Array:
        return np.concatenate([p[h] @ v[:, self.owner(h)] for h in range(self.heads)], axis=1)

    def latent(self, i: int, h: Array) -> Array:
        """DeepSeek's: K and V of all heads from one row a token."""
        b, lora, dim = f"blk.{i}.attn_", self.key("attention.kv_lora_rank"), self.key("attention.key_length_mla")
        nope = dim - self.rot
        q_a = self.tap(f"q_a-{i}", self.linear(b + "q_a", h))
        q_a = self.tap(f"q_a_norm-{i}", self.norm(b + "q_a_norm", q_a))
        q = self.tap(f"q_b-{i}", self.linear(b + "q_b", q_a)).reshape(len(h), self.heads, dim)
        both = self.tap(f"kv_cmpr_pe-{i}", self.linear(b + "kv_a_mqa", h))
        row = self.tap(f"kv_cmpr-{i}", self.norm(b + "kv_a_norm", both[:, :lora]))
        k_pe = self.tap(f"k_pe-{i}", self.rope(i, "k", both[:, None, lora:], self.pos))
        q_pe = self.tap(f"q_pe-{i}", self.rope(i, "q", q[..., nope:], self.pos))
        to_row = self.weight(b + "k_b.weight").transpose(0, 2, 1)
        q_row = self.tap(f"q_nope_absorbed-{i}", q[..., :nope].transpose(1, 0, 2) @ to_row)
        self.store(i, np.concatenate([row, k_pe[:, 0]], axis=1), row)
        keys, values = self.load(i)
        kq = self.tap(f"kq-{i}", np.concatenate([q_row, q_pe.transpose(1, 0, 2)], -1) @ keys.T)
        p = self.tap(f"kq_soft_max-{i}", self.probabilities(i, kq * np.float32(self.scale_latent(dim))))
        rows = self.tap(f"kqv-{i}", p @ values)
        o = self.tap(f"kqv_mla-{i}", rows @ self.weight(b + "v_b.weight").transpose(0, 2, 1))
        return o.transpose(1, 0, 2).reshape(len(h), -1)

    def scale_latent(self, dim: int) -> float:
        log = np.log(self.key("rope.scaling.factor", 1.0))
        return dim**-0.5 * (1 + self.key("rope.scaling.yarn_log_multiplier", 0.0) * log) ** 2

    def ffn(self, i: int, g: Array) -> Array:
        b = f"blk.{i}.ffn_"
        if not self.has(b + "gate.weight"):
            gate, up = np.split(self.tap(f"ffn_up-{i}", self.linear(b + "up", g)), 2, axis=1)
        else:
            gate = self.tap(f"ffn_gate-{i}", self.linear(b + "gate", g))
            up = self.tap(f"ffn_up-{i}", self.linear(b + "up", g))
        kind = "geglu" if self.arch in GELU else "swiglu"
        return self.linear(b + "down", self.tap(f"ffn_{kind}-{i}", self.glu(i, gate, up)))

    def glu(self, i: int, gate: Array, up: Array) -> Array:
        return (self.gelu(gate) if self.arch in GELU else self.silu(gate)) * up

    def silu(self, x: Array) -> Array:
        return x / (1 + np.exp(-x))

    def gelu(self, x: Array) -> Array:
        return 0.5 * x * (1 + np.tanh(np.float32((2 / np.pi) ** 0.5) * (x + np.float32(0.044715) * x**3)))

    def glu_oai(self, gate: Array, up: Array) -> Array:
        gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
        return gate / (1 + np.exp(np.float32(-1.702) * gate)) * (up + 1)

    def experts(self, i: int, g: Array) -> Array:
        b = f"blk.{i}.ffn_"
        logits = self.tap(f"ffn_moe_logits-{i}", self.linear(b + "gate_inp", g))
        chosen, weights = self.route(i, logits)
        x = np.repeat(g[:, None], chosen.shape[1], axis=1)
        if self.has(b + "gate_up_exps.weight"):
            gate, up = np.split(self.by_expert(b + "gate_up_exps", x, chosen), 2, axis=-1)
        else:
            gate, up = self.by_expert(b + "gate_exps", x, chosen), self.by_expert(b + "up_exps", x, chosen)
        self.tap(f"ffn_moe_gate-{i}", gate)
        self.tap(f"ffn_moe_up-{i}", up)
        oai = self.arch == "gpt-oss"
        act = self.glu_oai(gate, up) if oai else self.glu(i, gate, up)
        self.tap(f"ffn_moe_swiglu_oai-{i}" if oai else f"ffn_moe_swiglu-{i}", act)
        down = self.tap(f"ffn_moe_down-{i}", self.by_expert(b + "down_exps", act, chosen))
        total = (down * weights[..., None]).sum(1)
        return total + self.shared(i, g) if self.has(b + "gate_shexp.weight") else total

    def by_expert(self, name: str, x: Array, chosen: Array) -> Array:
        """Each row through the matrix of its expert: [token, used, columns]."""
        w = self.weight(f"{name}.weight")
        y = np.empty((*chosen.shape, w.shape[1]), np.float32)
        for expert in np.unique(chosen):
            y[chosen == expert] = x[chosen == expert] @ w[expert].T
        if self.has(f"{name}.scale") and self.arch in (*SCALED_FFN, "qwen3moe"):
            y = y * self.weight(f"{name}.scale")[chosen][..., None]
        return y + self.weight(f"{name}.bias")[chosen] if self.has(f"{name}.bias") else y

    def shared(self, i: int, g: Array) -> Array:
        b = f"blk.{i}.ffn_"
        gate = self.tap(f"ffn_gate_shexp-{i}", self.linear(b + "gate_shexp", g))
        up = self.tap(f"ffn_up_shexp-{i}", self.linear(b + "up_shexp", g))
        act = self.tap(f"ffn_swiglu-{i}", self.glu(i, gate, up))
        return self.tap(f"ffn_shexp-{i}", self.linear(b + "down_shexp", act))

    def route(self, i: int, logits: Array) -> tuple[Array, Array]:
        """The experts of each token, best first, and their weights."""
        if self.arch == "gpt-oss":
            chosen = self.tap(f"ffn_moe_topk-{i}", self.best(i, logits))
            weights = self.tap(f"ffn_moe_weights-{i}", np.take_along_axis(logits, chosen, 1))
            return chosen, self.tap(f"ffn_moe_weights_softmax-{i}", self.softmax(-1, weights[None])[0])
        probs = self.tap(f"ffn_moe_probs-{i}", self.probabilities_of(i, logits))
        ranked, name = probs, f"blk.{i}.exp_probs_b.bias"
        if self.has(name):
            ranked = self.in_groups(i, self.tap(f"ffn_moe_probs_biased-{i}", probs + self.weight(name)))
        chosen = self.tap(f"ffn_moe_topk-{i}", self.best(i, ranked))
        weights = self.tap(f"ffn_moe_weights-{i}", np.take_along_axis(probs, chosen, 1))
        return chosen, self.scaled(i, self.tap(f"ffn_moe_weights_norm-{i}", self.normed(i, weights)))

    def probabilities_of(self, i: int, logits: Array) -> Array:
        if self.key("expert_gating_func") == 2:
            return 1 / (1 + np.exp(-logits))
        return self.softmax(-1, logits[None])[0]

    def in_groups(self, i: int, probs: Array) -> Array:
        groups, used = (
            probs.reshape(len(probs), self.key("expert_group_count", 1), -1).copy(),
            "expert_group_used_count",
        )
        left_out = np.argsort(-np.sort(groups, -1)[..., -2:].sum(-1), axis=1, kind="stable")[:, self.key(used, 1) :]
        np.put_along_axis(groups, left_out[..., None], -np.inf, 1)
        return groups.reshape(probs.shape)

    def best(self, i: int, probs: Array) -> Array:
        return np.argsort(-probs, axis=1, kind="stable")[:, : self.key("expert_used_count")]

    def normed(self, i: int, weights: Array) -> Array:
        return weights / weights.sum(-1, keepdims=True)

    def scaled(self, i: int, weights: Array) -> Array:
        by = self.key("expert_weights_scale", 0.0)
        return self.tap(f"ffn_moe_weights_scaled-{i}", weights * np.float32(by)) if by else weights
