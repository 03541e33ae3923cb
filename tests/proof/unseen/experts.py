"""Experts: a router chooses some for every token, and weighs what they make of it; some share one more."""

from __future__ import annotations

from typing import Any

import numpy as np

from proof.unseen.model import Array


class Experts:
    """The part of an engine that has many FFNs."""

    file: Any
    arch: Any
    tap: Any
    has: Any
    name: Any
    weight: Any
    bias: Any
    linear: Any
    gated: Any

    @property
    def used(self) -> int:
        return int(self.file.get("expert_used_count"))

    def of_experts(self, y: Array) -> Array:
        logits = self.tap("ffn_moe_logits", self.linear(y, "ffn_gate_inp"))
        scores = logits if self.arch.router == "chosen" else self.tap("ffn_moe_probs", self.router(logits))
        chosen = self.tap("ffn_moe_topk", self.choice(self.preferred(scores)).astype(np.int32))
        weights = self.balanced(self.tap("ffn_moe_weights", self.weights_of(scores, chosen)[..., None])[..., 0])
        gate, up = self.gate_and_up(y, chosen)
        inner = self.tap("ffn_moe_swiglu", self.gated(gate, up))
        down = self.tap("ffn_moe_down", self.each(inner, "ffn_down_exps", self.matrices(chosen)))
        out = self.summed(self.tap("ffn_moe_weighted", self.weighed_experts(down, weights)))
        if not self.has("ffn_gate_shexp"):
            return out
        return self.with_shared(self.tap("ffn_moe_out", out), self.shared(y))

    def router(self, logits: Array) -> Array:
        return sigmoid(logits) if self.arch.router == "sigmoid" else over_last(logits)

    def preferred(self, scores: Array) -> Array:
        """What the choice goes by: scores with a bias, those of groups of experts that are not chosen hidden."""
        if not self.has("exp_probs_b", "bias"):
            return scores
        biased = self.tap("ffn_moe_probs_biased", scores + self.choice_bias())
        return self.in_groups(biased)

    def choice_bias(self) -> Array:
        return self.bias("exp_probs_b")

    def in_groups(self, scores: Array) -> Array:
        """The groups whose two best experts have the most are open."""
        count, used = self.file.get("expert_group_count"), self.file.get("expert_group_used_count")
        groups = scores.reshape(len(scores), count, -1)
        sums = np.sort(groups, axis=-1)[..., -2:].sum(axis=-1)
        open_ = np.argsort(np.argsort(-sums, axis=-1), axis=-1) < used
        return self.tap("ffn_moe_probs_masked", np.where(open_[..., None], groups, -np.inf).reshape(scores.shape))

    def choice(self, scores: Array) -> Array:
        return np.argsort(-scores, axis=-1, kind="stable")[:, : self.used]

    def weights_of(self, scores: Array, chosen: Array) -> Array:
        return np.take_along_axis(scores, chosen, axis=-1)

    def balanced(self, weights: Array) -> Array:
        """Weights of the chosen experts, which sum to one, times a factor."""
        if self.arch.router == "chosen":
            return self.tap("ffn_moe_weights_softmax", over_last(weights)[..., None])[..., 0]
        weights = self.tap("ffn_moe_weights_norm", self.summing_to_one(weights))
        if not self.file.get("expert_weights_scale"):
            return weights
        return self.tap("ffn_moe_weights_scaled", weights[..., None] * np.float32(self.weights_scale()))[..., 0]

    def summing_to_one(self, weights: Array) -> Array:
        least = np.float32(2.0**-14)  # llama.cpp's, where scores went wrong
        return weights / np.maximum(weights.sum(axis=-1, keepdims=True), least)

    def weights_scale(self) -> float:
        return float(self.file.get("expert_weights_scale"))

    def matrices(self, chosen: Array) -> Array:
        """Which experts' matrices multiply."""
        return chosen

    def each(self, x: Array, stem: str, chosen: Array) -> Array:
        """Tokens [token, used, in] through their experts' matrices."""
        w, b = self.weight(stem), self.bias(stem)
        out = np.stack([[x[t, n] @ w[e].T for n, e in enumerate(row)] for t, row in enumerate(chosen)])
        return out + (b[chosen] if np.ndim(b) else b)

    def gate_and_up(self, y: Array, chosen: Array) -> tuple[Array, Array]:
        x, experts = np.repeat(y[:, None], self.used, axis=1), self.matrices(chosen)
        if self.has("ffn_gate_up_exps"):
            gate, up = self.expert_halves(self.tap("ffn_moe_gate_up", self.each(x, "ffn_gate_up_exps", experts)))
        else:
            gate, up = self.each(x, "ffn_gate_exps", experts), self.each(x, "ffn_up_exps", experts)
        return self.tap("ffn_moe_gate", gate), self.tap("ffn_moe_up", up)

    def expert_halves(self, both: Array) -> Any:
        return np.split(both, 2, axis=-1)

    def weighed_experts(self, down: Array, weights: Array) -> Array:
        return down * weights[..., None]

    def summed(self, weighted: Array) -> Array:
        return weighted.sum(axis=1)

    def shared(self, y: Array) -> Array:
        gate = self.tap("ffn_gate_shexp", self.linear(y, "ffn_gate_shexp"))
        up = self.tap("ffn_up_shexp", self.linear(y, "ffn_up_shexp"))
        inner = self.tap("ffn_swiglu", self.gated(gate, up))
        return self.tap("ffn_shexp", self.linear(inner, "ffn_down_shexp"))

    def with_shared(self, routed: Array, shared: Array) -> Array:
        return routed + shared


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def over_last(x: Array) -> Array:
    """A softmax."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)
