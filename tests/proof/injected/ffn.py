"""Activations, residuals, the router and experts go wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from proof.injected.base import DENSE, EVERY, SAME, at, bug, elsewhere, row_before, wide
from proof.strangers.arithmetic import sigmoid, silu
from proof.strangers.engine import Array, Edit, Engine

SWIGLU = ("ffn_swiglu", "ffn_moe_swiglu")
SUMS = ("ffn_inp", "l_out")
EXPERTS = ("ffn_moe_gate", "ffn_moe_up", "ffn_moe_down")
MOE = ("moe", "qwen3moe")
NORM_OF = {"ffn_inp": "attn_norm", "l_out": "ffn_norm"}
BRANCH_OF = {"ffn_inp": "attn_out", "l_out": "ffn_out"}
erf = np.vectorize(math.erf, otypes=[float])


def gated_by(activation: Callable[[Array], Array]) -> dict[str, Edit]:
    return {
        "gated": lambda e, right, gate, up: wide(lambda g, u: activation(g) * u, gate, up),
        "activated": lambda e, right, x: wide(activation, x),
    }


def gelu_tanh(x: Array) -> Array:
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def sums_as(formula: Callable[[Array, Array], Array]) -> dict[str, Edit]:
    """Residual connections formula(branch, residual)."""
    return {"add": lambda e, right, branch, residual: np.asarray(formula(branch, residual), branch.dtype)}


def residual_of(source: Callable[[Engine, str], Array], words: Iterable[str] = SUMS) -> dict[str, Edit]:
    """Residual connections with another residual."""

    def fault(word: str) -> Edit:
        return lambda e, x: e.here(BRANCH_OF[word]) + source(e, word)

    return {word: fault(word) for word in words}


def sum_normed(word: str) -> Edit:
    """The sum through the norm that belongs to its branch."""
    return lambda e, x: e.normalised(x) * e.file[e.name(NORM_OF[word])].astype(x.dtype)


def choosing(change: Callable[[Array, int], Array]) -> dict[str, Edit]:
    return {"choice": lambda e, right, probs, count: np.broadcast_to(change(probs, count), (len(probs), count))}


def weighing(change: Callable[[Engine, Array, Array], Array]) -> dict[str, Edit]:
    """Weights change(engine, probabilities, choice) of chosen experts."""
    return {"router_weights": lambda e, right, p, chosen: np.asarray(change(e, p, chosen), p.dtype)}


def mixing(weights: Callable[[Engine, Array], Array]) -> dict[str, Edit]:
    """The mixture with other weights."""
    return {"weighted": lambda e, right, down, w: right(down, np.asarray(weights(e, w), w.dtype))}


def experts_as(change: Callable[[Array, int], Array]) -> dict[str, Edit]:
    """Other experts' matrices: change(choice, how many there are)."""

    def experts(e: Engine, right: Edit, x: Array, stem: str, chosen: Array) -> Array:
        return right(x, stem, np.broadcast_to(change(chosen, len(e.matrix(stem))), chosen.shape))

    return {"experts": experts}


def residual_as(source: Callable[[Engine, Array], Array]) -> dict[str, Edit]:
    """Residual connections with source(engine, right residual)."""
    return {"add": lambda e, right, branch, residual: right(branch, source(e, residual))}


def normed_residual(e: Engine, residual: Array) -> Array:
    """Through the norm that its branch begins with: attention's, or the FFN's."""
    stem = e.h.arch.norms[residual is not e.residual]
    return e.norm(residual, stem) if e.stores(stem) else residual


def clamped_by(limit: float, alpha: float, one: float) -> dict[str, Edit]:
    """The clamped SwiGLU with other constants."""
    return {"clamped": lambda e, right, gate, up: right(gate, up, limit, alpha, one)}


def beside(fault: Callable[[Array, Array, Array], Array]) -> dict[str, Edit]:
    """Attention, FFN and residual of a layer that has both side by side."""
    return {"beside": lambda e, right, attended, x: fault(attended, e.fed_forward(e.side_norm(x)), x)}


def one_norm(e: Engine, right: Edit, x: Array, stem: str) -> Array:
    """Attention's norm serves the FFN too."""
    return right(x, e.h.arch.norms[0] if e.h.arch.parallel and stem == e.h.arch.norms[1] else stem)


def of_the_best(e: Engine, right: Edit, logits: Array) -> Array:
    """A softmax of the chosen experts' scores, none for others."""
    least = np.sort(logits, axis=-1)[:, -e.h.used][:, None]
    return e.softmax(np.where(logits < least, logits.dtype.type(-np.inf), logits))


def share_of_all(e: Engine, right: Edit, logits: Array) -> Array:
    """The chosen experts' shares of a softmax over all."""
    total = np.exp(e.here("ffn_moe_logits").astype(np.float64)).sum(axis=-1, keepdims=True)
    return (np.exp(logits) / total).astype(logits.dtype)


def biased_weights(e: Engine, right: Edit, probs: Array, chosen: Array) -> Array:
    """The bias that only the choice should have is in the weights."""
    return right(probs + e.choice_bias() if e.stores("exp_probs_b", "bias") else probs, chosen)


def shared_as(formula: Callable[[Array, Array], Array]) -> dict[str, Edit]:
    return {"with_shared": lambda e, right, routed, shared: formula(routed, shared)}


NOT_NORMALISED = "router-other-gate router-not-normalised"


def groups_by_their_best(e: Engine, right: Edit, scores: Array) -> Array:
    count, used = e.file.get("expert_group_count"), e.file.get("expert_group_used_count")
    groups = scores.reshape(len(scores), count, -1)
    shut = np.argsort(-groups.max(axis=-1), axis=-1, kind="stable")[:, used:]
    hidden = np.array(groups)
    np.put_along_axis(hidden, shut[..., None], -np.inf, axis=1)
    return e.tap("ffn_moe_probs_masked", hidden.reshape(scores.shape))


INJECTIONS = (
    bug("GELU", "activation-other", SWIGLU, gated_by(lambda x: x / 2 * (1 + erf(x / math.sqrt(2)))), models=EVERY,
        others=SAME),
    bug("GELU by tanh", "activation-other", SWIGLU, gated_by(gelu_tanh), models=DENSE, others=SAME),
    bug("quick GELU", "activation-other", SWIGLU, gated_by(lambda x: x * sigmoid(1.702 * x)), models=DENSE,
        others=SAME),
    bug("ReLU", "activation-other", SWIGLU, gated_by(lambda x: np.maximum(x, 0)), models=("llama", "moe"), others=SAME),
    bug("sigmoid", "activation-other", SWIGLU, gated_by(sigmoid), models=("llama", "moe"), others=SAME),
    bug("tanh", "activation-other", SWIGLU, gated_by(np.tanh), others=SAME),
    bug("no activation", "activation-missing", SWIGLU, gated_by(lambda x: x), models=EVERY, others=SAME),
    bug("activation of up", "activation-of-up", SWIGLU, {"gated": lambda e, right, gate, up: right(up, gate)},
        models=EVERY, others="activation-of-up gate-up-swapped"),
    bug("activation of the product", "activation-of-up", SWIGLU,
        {"gated": lambda e, right, gate, up: e.activated(gate * up)}, models=DENSE, others=SAME, unlike=("gpt-oss",)),
    bug("no up", "up-missing", SWIGLU, {"gated": lambda e, right, gate, up: e.activated(gate)}, models=EVERY,
        others=SAME, unlike=("gpt-oss",)),
    bug("no gate", "up-missing", SWIGLU, {"gated": lambda e, right, gate, up: up}, models=DENSE, others=SAME),
    bug("gate plus up", "up-missing", SWIGLU, {"gated": lambda e, right, gate, up: e.activated(gate) + up},
        models=DENSE, others=SAME, unlike=("gpt-oss",)),
    bug("no residual", "residual-missing", SUMS, sums_as(lambda b, r: b), models=EVERY, others=SAME),
    bug("no residual after the FFN", "residual-missing", SUMS[1:], l_out=lambda e, x: e.here("ffn_out")),
    bug("no branch", "branch-missing", SUMS, sums_as(lambda b, r: r), models=EVERY, others=SAME),
    bug("no attention", "branch-missing", SUMS[:1], ffn_inp=lambda e, x: e.layer_input()),
    bug("residual twice", "residual-doubled", SUMS, sums_as(lambda b, r: b + 2 * r), models=DENSE, others=SAME),
    bug("branch twice", "residual-doubled", SUMS, sums_as(lambda b, r: 2 * b + r), models=DENSE,
        others="residual-doubled multiplier-other"),
    bug("branch subtracted", "residual-doubled", SUMS, sums_as(lambda b, r: r - b), models=DENSE, others=SAME),
    bug("residual subtracted", "residual-doubled", SUMS, sums_as(lambda b, r: b - r), models=DENSE),
    bug("residual normed", "residual-normed", SUMS, residual_as(normed_residual), models=EVERY, others=SAME),
    bug("residual normed in place before the FFN", "residual-normed", SUMS[1:],
        **residual_of(lambda e, word: e.here("ffn_norm"), SUMS[1:])),
    bug("residual from before attention", "residual-elsewhere", SUMS[1:], residual_as(lambda e, r: e.residual),
        models=DENSE, others=SAME),
    bug("residual from the layer before", "residual-elsewhere", SUMS[:1], models=DENSE, layer=1,
        **residual_of(lambda e, word: e.layer_input(e.layer - 1), SUMS[:1])),
    bug("residual from the embedding", "residual-elsewhere", SUMS[1:], models=DENSE,
        **residual_of(lambda e, word: e.here("embd"), SUMS[1:])),
    bug("residuals from the embedding", "residual-elsewhere", SUMS[::-1], residual_as(lambda e, r: e.here("embd")),
        others=SAME),
    bug("sum normed", "branch-normed", SUMS, models=DENSE, ffn_inp=sum_normed("ffn_inp"), l_out=sum_normed("l_out")),
    bug("sum normed without weight", "branch-normed", SUMS, others=SAME, unlike=("gpt2", "bloom", "falcon"),
        **at(SUMS, lambda e, x: e.normalised(x))),
    bug("branch by 0.22", "residual-multiplied", SUMS, sums_as(lambda b, r: b * b.dtype.type(0.22) + r), models=DENSE,
        others="residual-multiplied multiplier-other multiplier-missing"),
    bug("residual by 0.5", "residual-multiplied", SUMS, sums_as(lambda b, r: b + r * b.dtype.type(0.5)), models=DENSE,
        others=SAME),
    bug("router: sigmoid", "router-other-gate", ("ffn_moe_probs",), {"router_probs": lambda e, right, x: sigmoid(x)},
        models=MOE, others=SAME),
    bug("router: nothing", "router-other-gate", ("ffn_moe_probs",), {"router_probs": lambda e, right, x: x}, models=MOE,
        others=SAME, unlike=("deepseek2",)),
    bug("router: worst experts", "router-other-choice", ("ffn_moe_topk",),
        choosing(lambda p, n: np.argsort(p, axis=-1)[:, :n]), models=MOE, others=SAME),
    bug("router: first experts", "router-other-choice", ("ffn_moe_topk",), choosing(lambda p, n: np.arange(n)),
        models=MOE, others=SAME),
    bug("router: last experts", "router-other-choice", ("ffn_moe_topk",),
        choosing(lambda p, n: np.arange(p.shape[-1])[-n:]), models=("moe",)),
    bug("router: weights of the first", "router-weights-wrong", ("ffn_moe_weights",),
        weighing(lambda e, p, chosen: p[:, : chosen.shape[1]]), models=MOE, others=SAME),
    bug("router: scores for weights", "router-weights-wrong", ("ffn_moe_weights",),
        weighing(lambda e, p, chosen: np.take_along_axis(e.here("ffn_moe_logits"), chosen, -1)), models=MOE),
    bug("router: equal weights", "router-weights-wrong", ("ffn_moe_weights",),
        weighing(lambda e, p, chosen: np.full(chosen.shape, 1 / chosen.shape[1])), models=MOE, others=SAME),
    bug("router: weights in the other order", "router-weights-wrong", ("ffn_moe_weights",),
        weighing(lambda e, p, chosen: np.take_along_axis(p, chosen, -1)[:, ::-1]), models=MOE, others=SAME),
    bug("router: weights not normalised", "router-not-normalised", ("ffn_moe_weights_norm",),
        {"summing_to_one": lambda e, right, w: w}, models=MOE, others=SAME),
    bug("router: weights through a softmax", "router-not-normalised", ("ffn_moe_weights_norm",),
        {"summing_to_one": lambda e, right, w: e.softmax(w)}, models=MOE, others=SAME),
    bug("mixture: sum", "mixture-wrong", ("ffn_out",), mixing(lambda e, w: np.ones_like(w)), models=MOE, others=SAME),
    bug("mixture: mean", "mixture-wrong", ("ffn_out",), mixing(lambda e, w: np.full_like(w, 1 / w.shape[-1])),
        models=("moe",), others=SAME),
    bug("mixture: weights not normalised", "mixture-wrong", ("ffn_out",),
        mixing(lambda e, w: e.here("ffn_moe_weights")), models=MOE),
    bug("mixture: weights in the other order", "mixture-wrong", ("ffn_out",), mixing(lambda e, w: w[:, ::-1]),
        models=("moe",), others=SAME),
    bug("experts: next one's matrices", "experts-mixed-up", EXPERTS, experts_as(lambda chosen, n: (chosen + 1) % n),
        models=MOE, others=SAME),
    bug("experts: one before's", "experts-mixed-up", EXPERTS, experts_as(lambda chosen, n: (chosen - 1) % n),
        models=MOE, others=SAME),
    bug("experts: second's for the first", "experts-mixed-up", EXPERTS, experts_as(lambda chosen, n: chosen[:, ::-1]),
        models=MOE, others=SAME),
    bug("experts: by place", "experts-mixed-up", EXPERTS, experts_as(lambda chosen, n: np.arange(chosen.shape[1])),
        models=MOE, others=SAME),
    bug("experts: first token's", "experts-mixed-up", EXPERTS, experts_as(lambda chosen, n: chosen[:1]), models=MOE,
        others=SAME),
    bug("experts: token before's", "experts-mixed-up", EXPERTS, experts_as(lambda chosen, n: row_before(chosen)),
        models=("moe",)),
    bug("router: order of numbers", "router-other-order", ("ffn_moe_topk",),
        {"choice": lambda e, right, probs, count: np.sort(right(probs, count), axis=-1)}, models=MOE,
        says="chooses the right experts, in the order of their numbers"),
    bug("router: best last", "router-other-order", ("ffn_moe_topk",),
        {"choice": lambda e, right, probs, count: right(probs, count)[:, ::-1]}, models=MOE,
        says="chooses the right experts, worst first"),
    elsewhere("SiLU", "activation-other", gated_by(silu)),
    elsewhere("ReLU's square", "activation-other", gated_by(lambda x: np.maximum(x, 0) ** 2)),
    elsewhere("halves of gate and up swapped", "activation-of-up gate-up-swapped",
              {"halves": lambda e, right, both: right(both)[::-1]}),
    elsewhere("halves of gate and up interleaved", "activation-of-up gate-up-swapped qkv-split",
              {"halves": lambda e, right, both: (both[:, 0::2], both[:, 1::2])}),
    elsewhere("clamped SwiGLU: not clamped", "activation-other clamp-missing", clamped_by(1e30, 1.702, 1.0)),
    elsewhere("clamped SwiGLU: alpha 1", "activation-other", clamped_by(7.0, 1.0, 1.0)),
    elsewhere("clamped SwiGLU: one not added", "activation-other", clamped_by(7.0, 1.702, 0.0)),
    elsewhere("branches' factor left out", "multiplier-missing", {"residual_scale": lambda e, right: 1.0}),
    elsewhere("side by side: no residual", "residual-missing", beside(lambda a, f, x: a + f)),
    elsewhere("side by side: no attention", "branch-missing", beside(lambda a, f, x: f + x)),
    elsewhere("side by side: no FFN", "branch-missing residual-missing", beside(lambda a, f, x: a + x)),
    elsewhere("side by side: residual twice", "residual-doubled", beside(lambda a, f, x: a + f + 2 * x)),
    elsewhere("side by side: one norm", "norm-other-weight", {"norm": one_norm}),
    elsewhere("router: softmax", "router-other-gate", {"router_probs": lambda e, right, x: e.softmax(x)}),
    elsewhere("router: softmax of the chosen", "router-other-gate", {"router_probs": of_the_best},
              unlike=("deepseek2",)),
    elsewhere("router: softmax of all for that of the chosen", NOT_NORMALISED, {"of_chosen": share_of_all}),
    elsewhere("router: sigmoid of the chosen", NOT_NORMALISED, {"of_chosen": lambda e, right, x: sigmoid(x)}),
    elsewhere("router: scores of the chosen for weights", NOT_NORMALISED, {"of_chosen": lambda e, right, x: x}),
    elsewhere("router: first token's experts", "router-other-choice",
              choosing(lambda p, n: np.argsort(-p, axis=-1)[:1, :n])),
    elsewhere("router: groups by their best expert", "expert-groups-wrong", {"in_groups": groups_by_their_best}),
    elsewhere("router: groups ignored", "router-other-choice expert-groups-wrong",
              {"in_groups": lambda e, right, scores: e.tap("ffn_moe_probs_masked", scores)}),
    elsewhere("router: bias of the choice left out", "bias-missing", {"choice_bias": lambda e, right: 0 * right()}),
    elsewhere("router: bias of the choice in the weights", "router-weights-wrong",
              {"router_weights": biased_weights}),
    elsewhere("router: weights' factor left out", "multiplier-missing", {"weights_scale": lambda e, right: 1.0}),
    elsewhere("router: weights' factor twice", "multiplier-missing",
              {"weights_scale": lambda e, right: right() ** 2}),
    elsewhere("mixture: best alone", "mixture-wrong", mixing(lambda e, w: w * (np.arange(w.shape[-1]) < 1))),
    elsewhere("experts: halves of gate and up swapped", "gate-up-swapped",
              {"expert_halves": lambda e, right, both: right(both)[::-1]}),
    elsewhere("shared expert left out", "shared-expert-missing", shared_as(lambda routed, shared: routed)),
    elsewhere("shared expert alone", "branch-missing residual-missing", shared_as(lambda routed, shared: shared)),
    elsewhere("shared expert twice", "residual-doubled", shared_as(lambda routed, shared: routed + 2 * shared)),
)  # fmt: skip
