"""GLM-4.5's trunk and head in NumPy, written from its description; a mistake replaces one step of the head.

It computes all tokens in one go. Taps are called as llama.cpp calls them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Values = dict[str, np.ndarray]
EPS = np.float32(1e-5)
HEADS, KV_HEADS, DIM, ROTATED, USED, LAYERS = 4, 2, 16, 8, 2, 2
BASE, SCALE = 10000.0, np.float32(1.5)


def rms(x: np.ndarray, w: np.ndarray | float = 1.0) -> np.ndarray:
    mean = np.square(x.astype(np.float64)).mean(-1, keepdims=True).astype(np.float32)
    return (x / np.sqrt(mean + EPS)).astype(np.float32) * np.float32(w)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rotate(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Halves of the first ROTATED values of each head turn: [token, head, dim]."""
    half = ROTATED // 2
    angles = positions[:, None] * BASE ** (-np.arange(half) * 2.0 / ROTATED)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:ROTATED]
    out = np.concatenate([a * cos - b * sin, a * sin + b * cos, x[..., ROTATED:]], axis=-1)
    return out.astype(np.float32)


class Weights:
    """A file's tensors in float32."""

    def __init__(self, path: Path) -> None:
        tensors = gguf.GGUFReader(path).tensors
        self.all = {each.name: gguf.quants.dequantize(each.data, each.tensor_type) for each in tensors}

    def __call__(self, name: str) -> np.ndarray:
        return np.asarray(self.all[name], np.float32)


class Head:
    """A run of the trunk, then of the head. Each method is a step, which a mistake may replace."""

    def __init__(self, path: Path) -> None:
        self.w = Weights(path)
        self.taps: Values = {}
        self.layer = LAYERS

    def weight(self, stem: str) -> np.ndarray:
        return self.w(f"blk.{self.layer}.{stem}.weight")

    def tap(self, name: str, x: np.ndarray) -> np.ndarray:
        self.taps[name] = np.array(x, np.float32)
        return x

    # -- a layer, of the trunk or the head's ---------------------------------------------------------------------------

    def projected(self, x: np.ndarray, part: str, heads: int) -> np.ndarray:
        return (x @ self.weight(f"attn_{part}").T + self.w(f"blk.{self.layer}.attn_{part}.bias")).reshape(
            len(x), heads, DIM
        )

    def positions(self, count: int) -> np.ndarray:
        return np.arange(count)

    def seen(self, count: int) -> np.ndarray:
        """Which keys a query sees: [query, key]."""
        return np.tril(np.ones((count, count), bool))

    def attention(self, x: np.ndarray, prefix: str = "") -> np.ndarray:
        i, n = self.layer, len(x)
        q = self.projected(x, "q", HEADS)
        k = self.projected(x, "k", KV_HEADS)
        v = self.projected(x, "v", KV_HEADS)
        q, k = rms(q, self.weight("attn_q_norm")), rms(k, self.weight("attn_k_norm"))
        if prefix:
            self.tap(f"{prefix}Qcur_normed-{i}", q)
            self.tap(f"{prefix}Kcur_normed-{i}", k)
        q, k = rotate(q, self.positions(n)), rotate(k, self.positions(n))
        if prefix:
            self.tap(f"{prefix}Qcur-{i}", q)
            self.tap(f"{prefix}Kcur-{i}", k)
            self.tap(f"{prefix}Vcur-{i}", v)
        out = self.attended(q, k, v).reshape(n, -1) @ self.weight("attn_output").T
        return out.astype(np.float32)

    def attended(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        n = len(q)
        k, v = (np.repeat(side, HEADS // KV_HEADS, axis=1) for side in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.float32(np.sqrt(DIM))
        scores = np.where(self.seen(n)[None], scores, -np.inf)
        return np.einsum("hqk,khd->qhd", softmax(scores), v)

    def dense(self, x: np.ndarray, stem: str = "") -> np.ndarray:
        gate, up, down = (self.weight(f"ffn_{part}{stem}") for part in ("gate", "up", "down"))
        return (silu(x @ gate.T) * (x @ up.T)) @ down.T

    def experts(self, x: np.ndarray) -> np.ndarray:
        probs = 1 / (1 + np.exp(-(x @ self.weight("ffn_gate_inp").T)))
        chosen = np.argsort(-(probs + self.w(f"blk.{self.layer}.exp_probs_b.bias")), axis=-1)[:, :USED]
        share = np.take_along_axis(probs, chosen, -1)
        share = share / share.sum(-1, keepdims=True) * SCALE
        gate, up, down = (self.weight(f"ffn_{part}_exps") for part in ("gate", "up", "down"))
        out = np.zeros_like(x)
        for token, row in enumerate(x):
            for expert, much in zip(chosen[token], share[token], strict=True):
                out[token] += much * ((silu(gate[expert] @ row) * (up[expert] @ row)) @ down[expert].T)
        return out

    def ffn(self, x: np.ndarray, prefix: str = "") -> np.ndarray:
        if self.layer == 0:
            return self.dense(x)
        routed, shared = self.experts(x), self.dense(x, "_shexp")
        if prefix:
            self.tap(f"{prefix}ffn_moe_out-{self.layer}", routed)
            self.tap(f"{prefix}ffn_shexp_out-{self.layer}", shared)
        return routed + shared

    def block(self, x: np.ndarray) -> np.ndarray:
        """A layer of the trunk."""
        x = x + self.attention(rms(x, self.weight("attn_norm")))
        return x + self.ffn(rms(x, self.weight("post_attention_norm")))

    # -- the head ------------------------------------------------------------------------------------------------------

    def trunk(self, tokens: np.ndarray) -> np.ndarray:
        """The hidden states that the trunk gives, after its norm."""
        x = self.w("token_embd.weight")[tokens]
        for self.layer in range(LAYERS):
            x = self.block(x)
            self.tap(f"l_out-{self.layer}", x)
        self.layer = LAYERS
        return self.handed_over(x)

    def handed_over(self, residual: np.ndarray) -> np.ndarray:
        return rms(residual, self.w("output_norm.weight"))

    def taken(self, hidden: np.ndarray) -> np.ndarray:
        """Each token's row is that of the token before it."""
        return np.concatenate([np.zeros_like(hidden[:1]), hidden[:-1]])

    def embedded(self, tokens: np.ndarray) -> np.ndarray:
        return self.weight("nextn.embed_tokens")[tokens]

    def hnorm(self, x: np.ndarray) -> np.ndarray:
        return rms(x, self.weight("nextn.hnorm"))

    def enorm(self, x: np.ndarray) -> np.ndarray:
        return rms(x, self.weight("nextn.enorm"))

    def joined(self, e: np.ndarray, h: np.ndarray) -> np.ndarray:
        return np.concatenate([e, h], axis=-1)

    def projected_join(self, x: np.ndarray) -> np.ndarray:
        return x @ self.weight("nextn.eh_proj").T

    def attn_norm(self, x: np.ndarray) -> np.ndarray:
        return rms(x, self.weight("attn_norm"))

    def residual(self, branch: np.ndarray, x: np.ndarray) -> np.ndarray:
        return branch + x

    def head_norm(self, x: np.ndarray) -> np.ndarray:
        return rms(x, self.weight("nextn.shared_head_norm"))

    def logits(self, x: np.ndarray) -> np.ndarray:
        return x @ self.weight("nextn.shared_head_head").T

    def run(self, tokens: Any) -> Values:
        ids, i = np.asarray(tokens), LAYERS
        hidden = self.tap("trunk_h_nextn", self.trunk(ids))
        h = self.tap("mtp_h_input", self.taken(hidden))
        e = self.tap(f"mtp_tok_embd-{i}", self.embedded(ids))
        h, e = self.tap(f"mtp_hnorm-{i}", self.hnorm(h)), self.tap(f"mtp_enorm-{i}", self.enorm(e))
        x = self.tap(f"mtp_concat-{i}", self.joined(e, h))
        x = self.tap(f"mtp_eh_proj-{i}", self.projected_join(x))
        normed = self.tap(f"mtp_attn_norm-{i}", self.attn_norm(x))
        out = self.tap(f"mtp_attn_out-{i}", self.attention(normed, "mtp_"))
        x = self.tap(f"mtp_ffn_inp-{i}", self.residual(out, x))
        normed = self.tap(f"mtp_post_attn_norm-{i}", rms(x, self.weight("post_attention_norm")))
        out = self.tap(f"mtp_ffn_out-{i}", self.ffn(normed, "mtp_"))
        x = self.tap(f"mtp_post_ffn-{i}", self.residual(out, x))
        x = self.tap("h_nextn", self.head_norm(x))
        self.tap("mtp_shared_head_norm", x)
        self.tap("result_output", self.logits(x))
        return self.taps


Step = Callable[..., np.ndarray]


def run_with(path: Path, tokens: Any, **steps: Step) -> Values:
    """The taps of a run some of whose steps are others: each is given the head, then what the step is given."""
    head = Head(path)
    for name, step in steps.items():
        setattr(head, name, step.__get__(head))
    return head.run(tokens)


class Keeping(Head):
    """A head whose cache still has the keys and values of drafts that were refused: (token, k, v) of each."""

    def __init__(self, path: Path, kept: list[tuple[int, np.ndarray, np.ndarray]]) -> None:
        super().__init__(path)
        self.kept = kept

    def attended(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        if self.layer == LAYERS and self.kept:
            k, v = (np.concatenate([own, *(each[side] for each in self.kept)]) for own, side in ((k, 1), (v, 2)))
        return super().attended(q, k, v)

    def seen(self, count: int) -> np.ndarray:
        later = np.arange(count)[:, None] > np.array([token for token, *_ in self.kept], int)
        return np.hstack([super().seen(count), later]) if self.layer == LAYERS else super().seen(count)

    def drafted(self, token: int) -> tuple[int, np.ndarray, np.ndarray]:
        """Token, key and value of what the head drafts behind a token, after a run."""
        best = np.array([int(self.taps["result_output"][token].argmax())])
        hidden = self.taps["h_nextn"][token][None]
        x = self.projected_join(self.joined(self.enorm(self.embedded(best)), self.hnorm(hidden)))
        x = self.attn_norm(x)
        k = rms(self.projected(x, "k", KV_HEADS), self.weight("attn_k_norm"))
        return token, rotate(k, np.array([token + 1])), self.projected(x, "v", KV_HEADS)


def run_with_refused(path: Path, tokens: Any, behind: list[int]) -> Values:
    """A run in which the drafts behind some tokens were refused, and their keys stayed."""
    kept: list[tuple[int, np.ndarray, np.ndarray]] = []
    for token in behind:
        head = Keeping(path, kept)
        head.run(tokens)
        kept = [*kept, head.drafted(token)]
    return Keeping(path, kept).run(tokens)
