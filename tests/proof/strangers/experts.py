"""Experts: a router chooses some for every token, and weighs what they make of it; some share one more."""

from __future__ import annotations

from typing import Any

import numpy as np

from proof.strangers.arithmetic import sigmoid

Array = np.ndarray


class Experts:
    """The part of an engine that has many FFNs."""

    file: Any
    a: Any
    h: Any
    tap: Any
    stores: Any
    loaded: Any
    bias: Any
    linear: Any
    gated: Any
    softmax: Any

    def mixture(self, y: Array) -> Array:
        logits = self.tap("ffn_moe_logits", self.linear(y, "ffn_gate_inp"))
        chosen_first = self.h.arch.router == "chosen"
        probs = logits if chosen_first else self.tap("ffn_moe_probs", self.router_probs(logits))
        chosen = self.tap("ffn_moe_topk", self.choice(self.preferred(probs), self.h.used).astype(np.int32))
        weights = self.balanced(self.tap("ffn_moe_weights", self.router_weights(probs, chosen)))
        gate, up = self.expert_gate_up(np.repeat(y[:, None], self.h.used, axis=1), chosen)
        inner = self.tap("ffn_moe_swiglu", self.gated(self.tap("ffn_moe_gate", gate), self.tap("ffn_moe_up", up)))
        down = self.tap("ffn_moe_down", self.experts(inner, "ffn_down_exps", chosen))
        out = self.weighted(down, weights)
        if not self.stores("ffn_gate_shexp"):
            return out
        return self.with_shared(self.tap("ffn_moe_out", out), self.shared(y))

    # -- the router ------------------------------------------------------------------------------------------------

    def router_probs(self, logits: Array) -> Array:
        return sigmoid(logits) if self.h.arch.router == "sigmoid" else self.softmax(logits)

    def preferred(self, probs: Array) -> Array:
        """What the choice goes by: scores with a bias, those of groups of experts that are not chosen hidden."""
        if not self.stores("exp_probs_b", "bias"):
            return probs
        return self.in_groups(self.tap("ffn_moe_probs_biased", probs + self.choice_bias()))

    def choice_bias(self) -> Array:
        return self.bias("exp_probs_b")

    def in_groups(self, scores: Array) -> Array:
        """The groups whose two best experts have the most are open."""
        count, used = self.file.get("expert_group_count"), self.file.get("expert_group_used_count")
        groups = scores.reshape(len(scores), count, -1)
        sums = np.sort(groups, axis=-1)[..., -2:].sum(axis=-1)
        open_ = np.argsort(np.argsort(-sums, axis=-1), axis=-1) < used
        hidden = np.where(open_[..., None], groups, scores.dtype.type(-np.inf))
        return self.tap("ffn_moe_probs_masked", hidden.reshape(scores.shape))

    def choice(self, probs: Array, count: int) -> Array:
        return np.argsort(-probs, axis=-1, kind="stable")[:, :count]

    def router_weights(self, probs: Array, chosen: Array) -> Array:
        return np.take_along_axis(probs, chosen, axis=-1)

    def balanced(self, weights: Array) -> Array:
        """Weights of the chosen experts, which sum to one, times a factor."""
        if self.h.arch.router == "chosen":
            return self.tap("ffn_moe_weights_softmax", self.of_chosen(weights))
        weights = self.tap("ffn_moe_weights_norm", self.summing_to_one(weights))
        if not self.file.get("expert_weights_scale"):
            return weights
        return self.tap("ffn_moe_weights_scaled", weights * weights.dtype.type(self.weights_scale()))

    def of_chosen(self, logits: Array) -> Array:
        """Weights of the chosen experts' scores, where these were chosen before any softmax."""
        return self.softmax(logits)

    def summing_to_one(self, weights: Array) -> Array:
        least = weights.dtype.type(2.0**-14)  # as llama.cpp, where scores went wrong
        return weights / np.maximum(weights.sum(axis=-1, keepdims=True), least)

    def weights_scale(self) -> float:
        return float(self.file.get("expert_weights_scale"))

    # -- the experts -----------------------------------------------------------------------------------------------

    def experts(self, x: Array, stem: str, chosen: Array) -> Array:
        """Every token's product with its experts' matrices: [token, used, in] -> [token, used, out]."""
        w, b, x = self.loaded(stem), self.bias(stem), self.a.activations(x)
        out = np.zeros((*x.shape[:2], w.shape[1]), x.dtype)
        for expert in np.unique(chosen):
            mine = chosen == expert
            out[mine] = self.a.multiply(x[mine], w[expert])
        out = self.a.products(out)
        return out if b is None else out + b[chosen]

    def expert_gate_up(self, x: Array, chosen: Array) -> tuple[Array, Array]:
        if not self.stores("ffn_gate_up_exps"):
            return self.experts(x, "ffn_gate_exps", chosen), self.experts(x, "ffn_up_exps", chosen)
        gate, up = self.expert_halves(self.tap("ffn_moe_gate_up", self.experts(x, "ffn_gate_up_exps", chosen)))
        return gate, up

    def expert_halves(self, both: Array) -> Any:
        return np.split(both, 2, axis=-1)

    def weighted(self, down: Array, weights: Array) -> Array:
        return self.tap("ffn_moe_weighted", down * weights[..., None]).sum(axis=1)

    def shared(self, y: Array) -> Array:
        gate = self.tap("ffn_gate_shexp", self.linear(y, "ffn_gate_shexp"))
        up = self.tap("ffn_up_shexp", self.linear(y, "ffn_up_shexp"))
        inner = self.tap("ffn_swiglu", self.gated(gate, up))
        return self.tap("ffn_shexp", self.linear(inner, "ffn_down_shexp"))

    def with_shared(self, routed: Array, shared: Array) -> Array:
        return routed + shared
