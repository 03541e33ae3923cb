"""Mixtures of experts, and how people get the router wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from llamaref import ops
from numpy.typing import NDArray

from llamadiff.diagnose.bugs.activations import sigmoid
from llamadiff.diagnose.bugs.matmul import Mixture, Product
from llamadiff.diagnose.bugs.norms import Same
from llamadiff.diagnose.case import Case
from llamadiff.diagnose.registry import Change, bug, recipe

Array = NDArray[Any]


@dataclass(frozen=True)
class TopK:
    """The ``count`` largest of each row, best first."""

    x: Array
    count: int

    def compute(self, case: Case) -> Array:
        return ops.top_k(self.x, self.count)


@recipe("ffn_moe_probs")
def probabilities(case: Case) -> Same:
    """Softmax over all experts."""
    return Same(ops.softmax(case["ffn_moe_logits"]))


@recipe("ffn_moe_topk")
def chosen(case: Case) -> TopK:
    """The chosen experts."""
    return TopK(case["ffn_moe_probs"], case.config.n_expert_used)


@recipe("ffn_moe_weights")
def weights(case: Case) -> Same:
    """The chosen experts' probabilities."""
    return Same(np.take_along_axis(case["ffn_moe_probs"], case["ffn_moe_topk"], axis=-1))


@recipe("ffn_moe_weights_norm")
def normalized(case: Case) -> Same:
    """The same, made to sum to one."""
    return Same(ops.normalized(case["ffn_moe_weights"]))


@bug("ffn_moe_probs", fix="take the softmax over all experts, then choose", source="transformers#41151")
def router_other_gate(r: Same, case: Case) -> Iterator[Change]:
    """Router scores go through a sigmoid, or through nothing, instead of a softmax over all experts."""
    logits = case["ffn_moe_logits"]
    yield Change(Same(sigmoid(logits)), "is a sigmoid; this model has a softmax over all experts", "sigmoid")
    yield Change(Same(logits), "is left out: raw scores come out", "none")
    best = np.take_along_axis(logits, ops.top_k(logits, case.config.n_expert_used), axis=-1)[..., -1:]
    alone = ops.softmax(np.where(logits < best, -np.inf, logits))
    yield Change(Same(alone), "is a softmax over the chosen experts alone", "chosen")


@bug("ffn_moe_topk", fix="choose the experts of the largest probabilities, best first", source="transformers#41151")
def router_other_choice(r: TopK, case: Case) -> Iterator[Change]:
    """The wrong experts are chosen: the worst, or by number."""
    yield Change(replace(r, x=-r.x), "chooses the smallest probabilities", "worst")
    first = np.broadcast_to(np.arange(r.count, dtype=np.int32), (*r.x.shape[:-1], r.count))
    last = first + np.int32(r.x.shape[-1] - r.count)
    yield Change(Same(last), "chooses the last experts for every token", "last")
    yield Change(Same(last[..., ::-1]), "chooses the last experts for every token", "last reversed")
    yield Change(Same(first), "chooses the first experts for every token", "first")
    yield Change(
        Same(np.broadcast_to(ops.top_k(r.x[:, :1], r.count), first.shape)),
        "chooses the first token's experts for all",
        "token",
    )


@bug("ffn_moe_topk", harmless=True, fix="nothing, if weights follow the same order")
def router_other_order(r: TopK, case: Case) -> Iterator[Change]:
    """The right experts are chosen, in another order."""
    best = ops.top_k(r.x, r.count)
    yield Change(Same(np.sort(best, axis=-1)), "chooses the right experts, in the order of their numbers", "sorted")
    yield Change(Same(best[..., ::-1]), "chooses the right experts, worst first", "reversed")


@bug("ffn_moe_weights", fix="weigh each expert by its own probability", source="transformers#41151")
def router_weights_wrong(r: Same, case: Case) -> Iterator[Change]:
    """The chosen experts' weights are not their probabilities."""
    used = r.x.shape[-1]
    yield Change(Same(np.ones_like(r.x)), "weighs every expert by one", "ones")
    yield Change(Same(np.full_like(r.x, 1 / used)), "weighs all experts alike", "mean")
    yield Change(Same(r.x[..., ::-1]), "weighs the experts in reverse order", "reversed")
    yield Change(Same(case["ffn_moe_probs"][..., :used]), "takes the first experts' probabilities", "first")
    scores = np.take_along_axis(case["ffn_moe_logits"], case["ffn_moe_topk"], axis=-1)
    yield Change(Same(scores), "takes raw scores for probabilities", "scores")


@bug("ffn_moe_weights_norm", fix="divide the chosen experts' weights by their sum", source="transformers#41151")
def router_not_normalised(r: Same, case: Case) -> Iterator[Change]:
    """The chosen experts' weights are not made to sum to one, or by another softmax."""
    w = case["ffn_moe_weights"]
    yield Change(Same(w), "does not make the weights sum to one", "none")
    yield Change(Same(ops.softmax(w)), "takes a second softmax over the chosen experts' probabilities", "softmax")


@bug("ffn_out", fix="sum the experts' outputs, each times its normalised weight", source="transformers#41151")
def mixture_wrong(r: Mixture, case: Case) -> Iterator[Change]:
    """The experts' outputs are not weighed, or with weights that were not normalised."""
    yield Change(replace(r, weights=np.ones_like(r.weights)), "sums the experts without their weights", "ones")
    yield Change(replace(r, weights=case["ffn_moe_weights"]), "weighs experts by weights that do not sum to one", "raw")
    yield Change(replace(r, weights=r.weights[..., ::-1]), "weighs the experts in reverse order", "reversed")
    mean = np.full_like(r.weights, 1 / r.weights.shape[-1])
    yield Change(replace(r, weights=mean), "takes the experts' plain mean", "mean")
    alone = np.zeros_like(r.weights)
    alone[..., 0] = r.weights[..., 0]
    yield Change(replace(r, weights=alone), "takes the best expert alone", "best")


@bug(
    "ffn_moe_gate",
    "ffn_moe_up",
    "ffn_moe_down",
    fix="multiply by the chosen experts' own matrices",
    source="transformers#41151",
)
def experts_mixed_up(r: Product, case: Case) -> Iterator[Change]:
    """Tokens are multiplied by other experts' matrices."""
    if r.chosen is None:
        return
    n = case.config.n_expert
    for shift in (1, -1):
        says = f"multiplies by the matrix of expert {shift:+d}"
        yield Change(replace(r, chosen=(r.chosen + shift) % n), says, f"{shift:+d}")
    yield Change(
        replace(r, chosen=r.chosen[..., ::-1]), "multiplies by the chosen experts in reverse order", "reversed"
    )
    yield Change(replace(r, chosen=n - 1 - r.chosen), "counts experts from the last", "last")
    places = np.broadcast_to(np.arange(r.chosen.shape[-1], dtype=r.chosen.dtype), r.chosen.shape)
    yield Change(replace(r, chosen=places), "multiplies by the first experts, whatever was chosen", "places")
    first = np.broadcast_to(r.chosen[:, :1], r.chosen.shape)
    yield Change(replace(r, chosen=first), "multiplies by the first token's experts", "first token")
    before = np.concatenate([r.chosen[:, :1], r.chosen[:, :-1]], axis=1)
    yield Change(replace(r, chosen=before), "multiplies by the experts of the token before", "before")
