"""Routers and experts go wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from proof.unseen.bugs.bug import bug
from proof.unseen.engine import Engine
from proof.unseen.experts import over_last, sigmoid


def _router(function: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda e, logits: function(logits)


def _chosen_alone(e: Engine, logits: Any) -> Any:
    """A softmax of the chosen experts' scores, none for others."""
    least = np.sort(logits, axis=-1)[:, -e.used][:, None]
    return over_last(np.where(logits < least, -np.inf, logits))


def _choice(fault: Callable[[Any, int], Any]) -> Callable[..., Any]:
    return lambda e, scores: fault(scores, e.used)


def _after(fault: Callable[[Engine, Any], Any]) -> Callable[..., Any]:
    """Where scores are chosen before a softmax, what is taken instead of it."""

    def balanced(e: Engine, weights: Any) -> Any:
        if e.arch.router != "chosen":
            return Engine.balanced(e, weights)
        return e.tap("ffn_moe_weights_softmax", fault(e, weights)[..., None])[..., 0]

    return balanced


def _over_all(e: Engine, weights: Any) -> Any:
    """The chosen experts' shares of a softmax over all."""
    logits = e.rows[f"ffn_moe_logits-{e.layer}"][-1].astype(np.float64)
    return (np.exp(weights) / np.exp(logits).sum(axis=-1, keepdims=True)).astype(np.float32)


def _weighed(change: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda e, down, weights: down * change(weights)[..., None]


def _biased_weights(e: Engine, scores: Any, chosen: Any) -> Any:
    """The bias that only the choice should have is in the weights."""
    bias = e.bias("exp_probs_b") if e.has("exp_probs_b", "bias") else 0
    return np.take_along_axis(scores + bias, chosen, axis=-1)


def _other_layers(e: Engine, x: Any, stem: str, chosen: Any) -> Any:
    """The other layer's matrices and biases, where it has such."""
    if f"blk.{1 - e.layer}.{stem}.weight" not in e.file:
        return Engine.each(e, x, stem, chosen)
    e.layer = 1 - e.layer
    y = Engine.each(e, x, stem, chosen)
    e.layer = 1 - e.layer
    return y


def _swapped(e: Engine, y: Any, chosen: Any) -> Any:
    if not e.has("ffn_gate_exps"):
        return Engine.gate_and_up(e, y, chosen)
    x = np.repeat(y[:, None], e.used, axis=1)
    gate = e.tap("ffn_moe_gate", e.each(x, "ffn_up_exps", chosen))
    return gate, e.tap("ffn_moe_up", e.each(x, "ffn_gate_exps", chosen))


BUGS = (
    bug("router: sigmoid", "router-other-gate", router=_router(sigmoid)),
    bug("router: softmax", "router-other-gate", router=_router(over_last)),
    bug("router: nothing", "router-other-gate", router=_router(lambda x: x), unlike=("deepseek2",)),
    bug("router: softmax of the chosen", "router-other-gate", router=_chosen_alone, unlike=("deepseek2",)),
    bug("router: softmax of all for that of the chosen", "router-other-gate router-not-normalised",
        balanced=_after(_over_all)),
    bug("router: sigmoid of the chosen", "router-other-gate router-not-normalised",
        balanced=_after(lambda e, w: sigmoid(w))),
    bug("router: scores of the chosen for weights", "router-other-gate router-not-normalised",
        balanced=_after(lambda e, w: w)),
    bug("router: worst experts", "router-other-choice", choice=_choice(lambda p, k: np.argsort(p, axis=-1)[:, :k])),
    bug("router: first experts", "router-other-choice",
        choice=_choice(lambda p, k: np.broadcast_to(np.arange(k), (len(p), k)))),
    bug("router: first token's experts", "router-other-choice",
        choice=_choice(lambda p, k: np.argsort(-p, axis=-1)[:1, :k].repeat(len(p), 0))),
    bug("router: groups ignored", "router-other-choice",
        in_groups=lambda e, scores: e.tap("ffn_moe_probs_masked", scores)),
    bug("router: bias of the choice left out", "bias-missing", choice_bias=lambda e: np.float32(0)),
    bug("router: bias of the choice in the weights", "router-weights-wrong", weights_of=_biased_weights),
    bug("router: weights of the first", "router-weights-wrong", weights_of=lambda e, p, c: p[:, : c.shape[-1]]),
    bug("router: equal weights", "router-weights-wrong",
        weights_of=lambda e, p, c: np.full(c.shape, 1 / c.shape[-1], np.float32)),
    bug("router: weights in the other order", "router-weights-wrong",
        weights_of=lambda e, p, c: Engine.weights_of(e, p, c)[:, ::-1]),
    bug("router: weights not normalised", "router-not-normalised", summing_to_one=lambda e, w: w),
    bug("router: weights through a softmax", "router-not-normalised", summing_to_one=lambda e, w: over_last(w)),
    bug("router: weights' factor left out", "multiplier-missing", weights_scale=lambda e: 1.0),
    bug("router: weights' factor twice", "multiplier-missing", weights_scale=lambda e: Engine.weights_scale(e) ** 2),
    bug("mixture: sum", "mixture-wrong", weighed_experts=_weighed(np.ones_like)),
    bug("mixture: mean", "mixture-wrong", weighed_experts=_weighed(lambda w: np.full_like(w, 1 / w.shape[-1]))),
    bug("mixture: best alone", "mixture-wrong", weighed_experts=_weighed(lambda w: w * (np.arange(w.shape[-1]) < 1))),
    bug("mixture: weights in the other order", "mixture-wrong", weighed_experts=_weighed(lambda w: w[:, ::-1])),
    bug("experts: next one's matrices", "experts-mixed-up",
        matrices=lambda e, c: (c + 1) % e.file.get("expert_count")),
    bug("experts: second's for the first", "experts-mixed-up", matrices=lambda e, c: c[:, ::-1]),
    bug("experts: by place", "experts-mixed-up",
        matrices=lambda e, c: np.broadcast_to(np.arange(c.shape[-1]), c.shape)),
    bug("experts: first token's", "experts-mixed-up", matrices=lambda e, c: np.broadcast_to(c[:1], c.shape)),
    bug("experts: other layer's", "weight-of-other-layer", each=_other_layers),
    bug("experts: gate and up swapped", "gate-up-swapped", gate_and_up=_swapped),
    bug("experts: halves of gate and up swapped", "gate-up-swapped",
        expert_halves=lambda e, both: Engine.expert_halves(e, both)[::-1]),
    bug("shared expert left out", "shared-expert-missing", with_shared=lambda e, routed, shared: routed),
    bug("shared expert alone", "branch-missing residual-missing", with_shared=lambda e, routed, shared: shared),
    bug("shared expert twice", "residual-doubled", with_shared=lambda e, routed, shared: routed + 2 * shared),
)  # fmt: skip
