"""An inference engine of many architectures, written from their descriptions: NumPy, and every op a method.

A mistake is put in by overriding methods. It shares no code with llamadiff or its reference engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from proof.unseen.architectures import ARCHITECTURES
from proof.unseen.attention import Attention
from proof.unseen.experts import Experts
from proof.unseen.model import Array, File
from proof.unseen.recurrent import Recurrent


class Engine(Attention, Experts, Recurrent):
    """One model with its caches; ``run`` gives every tap."""

    def __init__(self, file: File) -> None:
        self.file, self.arch = file, ARCHITECTURES[file.arch]
        self.layer = 0
        self.at: Array = np.zeros(0, int)  # positions of the tokens that pass
        self.n_prefill = 0
        self.kept: dict[tuple[str, int], Array] = {}  # caches and states, by name and layer
        self.rows: dict[str, list[Array]] = {}
        self.residual: Array = None  # what goes into the layer, or into the last norm
        self.between: Array = None  # what goes into the FFN's norm
        self.attended: Array = None  # what attention's norm gave
        eps = file.get("attention.layer_norm_rms_epsilon", None)
        self.eps = float(np.float32(eps if eps is not None else file.get("attention.layer_norm_epsilon")))

    # -- a run -----------------------------------------------------------------------------------------------------

    def run(self, tokens: Sequence[int], n_prefill: int = 0) -> dict[str, Array]:
        """Every tap; the tokens from ``n_prefill`` on go through one by one."""
        self.n_prefill = n_prefill or len(tokens)
        ends = [self.n_prefill, *range(self.n_prefill + 1, len(tokens) + 1)]
        for start, end in zip([0, *ends], ends, strict=False):
            self.at = np.arange(start, end)
            self.forward(np.array(tokens[start:end]))
        return {name: _joined(parts) for name, parts in self.rows.items()}

    def tap(self, word: str, x: Array, layered: bool = True) -> Array:
        name = self.arch.names.get(word, word)
        if name:
            self.rows.setdefault(f"{name}-{self.layer}" if layered else name, []).append(np.array(x))
        return x

    @property
    def decoding(self) -> bool:
        return bool(self.at[0] >= self.n_prefill)

    def forward(self, tokens: Array) -> None:
        self.layer = 0
        x = self.embedded(tokens)
        for layer in range(self.file.get("block_count")):
            self.layer, self.residual = layer, x
            x = self.block(x)
        self.residual = x
        stem = "output_norm" if "output_norm.weight" in self.file else "token_embd_norm"
        y = self.tap("result_norm", self.norm(x, stem), layered=False)
        self.tap("result_output", self.logits(y), layered=False)

    # -- ends ------------------------------------------------------------------------------------------------------

    def embedding(self, tokens: Array) -> Array:
        return self.file["token_embd.weight"][tokens]

    def embedding_scale(self) -> float:
        own = self.file.get("embedding_scale") or 1.0
        return math.sqrt(self.file.get("embedding_length")) if self.arch.embedding_of_root else own

    def embedded(self, tokens: Array) -> Array:
        x = self.tap("embd", self.embedding(tokens) * np.float32(self.embedding_scale()), layered=False)
        if self.arch.positions == "learned":
            positions = self.tap("pos_embd", self.learned(self.at), layered=False)
            x = self.tap("inpL", self.with_positions(x, positions), layered=False)
        if self.arch.positions == "alibi":
            x = self.tap("inp_norm", self.norm(x, "token_embd_norm"))
        return x

    def learned(self, positions: Array) -> Array:
        return self.file["position_embd.weight"][positions]

    def with_positions(self, x: Array, positions: Array) -> Array:
        return x + positions

    def head(self) -> str:
        return "output" if "output.weight" in self.file else "token_embd"

    def logit_scale(self) -> float:
        return 1.0 / (self.file.get("logit_scale") or 1.0)

    def logits(self, y: Array) -> Array:
        return self.product(y, self.head()) * np.float32(self.logit_scale())

    # -- tensors, norms and products -------------------------------------------------------------------------------

    def name(self, stem: str) -> str:
        """A tensor of this layer, or of none."""
        return stem if f"{stem}.weight" in self.file else f"blk.{self.layer}.{stem}"

    def has(self, stem: str, end: str = "weight") -> bool:
        return f"{self.name(stem)}.{end}" in self.file

    def weight(self, stem: str) -> Array:
        return self.file[f"{self.name(stem)}.weight"]

    def bias(self, stem: str) -> Array:
        name = f"{self.name(stem)}.bias"
        return self.file[name] if name in self.file else np.float32(0)

    def normalised(self, x: Array, eps: float) -> Array:
        """A norm without its weight; of centred values, where the architecture has LayerNorm."""
        wide = x.astype(np.float64)
        wide = wide - wide.mean(axis=-1, keepdims=True) if self.arch.layer_norm else wide
        return wide / np.sqrt((wide * wide).mean(axis=-1, keepdims=True) + eps)

    def norm(self, x: Array, stem: str) -> Array:
        y = self.normalised(x, self.eps) * self.norm_weight(stem) + self.norm_bias(stem)
        return y.astype(np.float32)

    def norm_weight(self, stem: str) -> Array:
        return self.weight(stem)

    def norm_bias(self, stem: str) -> Array:
        return self.bias(stem)

    def product(self, x: Array, stem: str) -> Array:
        return x @ self.weight(stem).T

    def linear(self, x: Array, stem: str) -> Array:
        return self.product(x, stem) + self.bias(stem)

    # -- layers ----------------------------------------------------------------------------------------------------

    def add(self, branch: Array, residual: Array) -> Array:
        return branch * np.float32(self.residual_scale()) + residual

    def residual_scale(self) -> float:
        return self.file.get("residual_scale") or 1.0

    def mixed_tokens(self, y: Array) -> Array:
        """What lets tokens see each other: attention, a state space, a short convolution."""
        if self.has("ssm_in"):
            return self.state_space(y)
        if self.has("shortconv.in_proj"):
            return self.short_convolution(y)
        return self.latent_attention(y) if self.has("attn_kv_a_mqa") else self.attention(y)

    def block(self, x: Array) -> Array:
        before, between = self.arch.norms
        word = before if self.arch.parallel else "attn_norm"
        self.attended = self.tap(word, self.norm(x, before))
        y = self.mixed_tokens(self.attended)
        if self.has("post_attention_norm") and between != "post_attention_norm":
            y = self.tap("attn_post_norm", self.norm(y, "post_attention_norm"))
        if self.arch.parallel:
            return self.tap("l_out", self.beside(y, x))
        if not self.has(between):
            return self.tap("l_out", self.add(y, x))
        self.between = x = self.tap("ffn_inp", self.add(y, x))
        y = self.fed_forward(self.tap("ffn_norm", self.norm(x, between)))
        if self.has("post_ffw_norm"):
            y = self.tap("ffn_post_norm", self.norm(y, "post_ffw_norm"))
        return self.tap("l_out", self.add(y, x))

    def beside(self, attended: Array, x: Array) -> Array:
        """Attention and the FFN of the same input, added to it."""
        stem = self.arch.norms[1]
        return self.fed_forward(self.tap(stem, self.norm(x, stem))) + attended + x

    def fed_forward(self, y: Array) -> Array:
        if self.has("ffn_gate_inp"):
            return self.tap("ffn_out", self.of_experts(y))
        return self.tap("ffn_out", self.linear(self.inner(y), "ffn_down"))

    def inner(self, y: Array) -> Array:
        """What goes into the down projection."""
        if self.has("ffn_gate"):
            gate, up = self.tap("ffn_gate", self.linear(y, "ffn_gate")), self.tap("ffn_up", self.linear(y, "ffn_up"))
            return self.tap("ffn_geglu" if self.arch.activation == "gelu" else "ffn_swiglu", self.gated(gate, up))
        both = self.tap("ffn_up", self.linear(y, "ffn_up"))
        if both.shape[-1] > self.weight("ffn_down").shape[-1]:
            return self.tap("ffn_swiglu", self.gated(*self.halves(both)))
        return self.tap("ffn_gelu", self.activated(both))

    def halves(self, both: Array) -> Any:
        """Gate and up of a matrix that holds both."""
        return np.split(both, 2, axis=-1)

    def activated(self, x: Array) -> Array:
        if self.arch.activation == "gelu":
            return 0.5 * x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * x * (1 + np.float32(0.044715) * x * x)))
        return silu(x)

    def gated(self, gate: Array, up: Array) -> Array:
        if self.arch.activation != "oai":
            return self.activated(gate) * up
        gate, up = np.minimum(gate, np.float32(7)), np.clip(up, np.float32(-7), np.float32(7))
        return gate / (1 + np.exp(np.float32(-1.702) * gate)) * (up + 1)


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def _joined(parts: list[Array]) -> Array:
    """Rows of several batches; scores [head, query, key] get room for all keys."""
    if len(parts) == 1:
        return parts[0]
    if parts[0].ndim == 3 and parts[0].shape[-1] != parts[-1].shape[-1]:
        last = parts[-1].shape[-1]
        return np.concatenate([np.pad(x, ((0, 0), (0, 0), (0, last - x.shape[-1]))) for x in parts], axis=1)
    return np.concatenate(parts, axis=1 if _heads_first(parts) else 0)


def _heads_first(parts: list[Array]) -> bool:
    """Whether rows are the second axis: the batches differ there."""
    return parts[0].ndim == 3 and parts[0].shape[0] == parts[-1].shape[0] and parts[0].shape[1] != parts[-1].shape[1]
