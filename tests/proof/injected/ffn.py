"""Activations, residuals and the router go wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from faulty import with_maths
from llamaref import Engine, ops

from proof.injected.base import DENSE, EVERY, Build, Injection, altered, altered_at, rms

SWIGLU = ("ffn_swiglu", "ffn_moe_swiglu")
SUMS = ("ffn_inp", "l_out")
EXPERTS = ("ffn_moe_gate", "ffn_moe_up", "ffn_moe_down")
MOE = ("moe", "qwen3moe")
NORM_OF = {"ffn_inp": "attn_norm", "l_out": "ffn_norm"}
BRANCH_OF = {"ffn_inp": "attn_out", "l_out": "ffn_out"}
_erf = np.vectorize(math.erf, otypes=[float])


def _gated(activation: Callable[[Any], Any]) -> Build:
    return with_maths(swiglu=lambda gate, up: np.asarray(activation(gate.astype(np.float64)) * up, gate.dtype))


def _swiglu(fault: Callable[[Any, Any], Any]) -> Build:
    return with_maths(swiglu=lambda gate, up: np.asarray(fault(gate, up), gate.dtype))


def _gelu(x: Any) -> Any:
    return x * 0.5 * (1 + _erf(x / math.sqrt(2)))


def _gelu_tanh(x: Any) -> Any:
    return x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def _sum(fault: Callable[[Any, Any], Any]) -> Build:
    """Residual connections as fault(branch, residual)."""
    return with_maths(add=lambda branch, residual: np.asarray(fault(branch, residual), branch.dtype))


def _residual(residual: Callable[[Any, str], Any], words: tuple[str, ...] = SUMS) -> Build:
    """Residual connections with residual(run, word) for one."""

    def fault(word: str) -> Any:
        return lambda x, run: run[BRANCH_OF[word]] + residual(run, word)

    return altered(**{word: fault(word) for word in words})


def _predecessors_input(run: Any, word: str) -> Any:
    """What went into the layer before."""
    return run.seen["embd" if run.layer < 2 else f"l_out-{run.layer - 2}"]


def _sum_normed(word: str) -> Any:
    """The sum through the norm that belongs to its branch."""
    return lambda x, run: rms(x, run.engine.config.rms_eps) * run.weight(NORM_OF[word])


def _sum_normed_plainly(x: Any, run: Any) -> Any:
    return rms(x, run.engine.config.rms_eps)


def _router(fault: Callable[[Any], Any]) -> Build:
    return altered(ffn_moe_probs=lambda x, run: fault(run["ffn_moe_logits"]))


def _chosen(fault: Callable[[Any, int], Any]) -> Build:
    """Choices fault(probabilities, how many)."""
    return with_maths(top_k=lambda probs, k: fault(probs, k).astype(np.int32))


def _weights(fault: Callable[[Any, Any, Any], Any]) -> Build:
    """Weights fault(probabilities, router scores, choices) of chosen experts."""
    return altered(
        ffn_moe_weights=lambda x, run: fault(run["ffn_moe_probs"], run["ffn_moe_logits"], run["ffn_moe_topk"])
    )


def _mixture(weights: Callable[[Any], Any]) -> Build:
    return altered(ffn_out=lambda x, run: (run["ffn_moe_down"] * weights(run)[..., None]).sum(axis=-2))


def _experts(change: Callable[[Any, int], Any]) -> Build:
    """Experts change(chosen [b, t, used], how many there are) in the products."""

    class Experts(Engine):
        def experts(self, x: Any, name: str, chosen: Any, tap: Any) -> Any:
            return super().experts(x, name, change(chosen, self.config.n_expert), tap)

    return Experts


INJECTIONS = (
    Injection("GELU", "activation-other", SWIGLU, _gated(_gelu), EVERY),
    Injection("GELU by tanh", "activation-other", SWIGLU, _gated(_gelu_tanh), DENSE),
    Injection("quick GELU", "activation-other", SWIGLU, _gated(lambda x: x * _sigmoid(1.702 * x)), DENSE),
    Injection("ReLU", "activation-other", SWIGLU, _gated(lambda x: np.maximum(x, 0)), ("llama", "moe")),
    Injection("sigmoid", "activation-other", SWIGLU, _gated(_sigmoid), ("llama", "moe")),
    Injection("tanh", "activation-other", SWIGLU, _gated(np.tanh)),
    Injection("no activation", "activation-missing", SWIGLU, _swiglu(lambda g, u: g * u), EVERY),
    Injection("activation of up", "activation-of-up", SWIGLU, _swiglu(lambda g, u: g * ops.silu(u)), EVERY),
    Injection("activation of the product", "activation-of-up", SWIGLU, _swiglu(lambda g, u: ops.silu(g * u)), DENSE),
    Injection("no up", "up-missing", SWIGLU, _swiglu(lambda g, u: ops.silu(g)), EVERY),
    Injection("no gate", "up-missing", SWIGLU, _swiglu(lambda g, u: u), DENSE),
    Injection("gate plus up", "up-missing", SWIGLU, _swiglu(lambda g, u: ops.silu(g) + u), DENSE),
    Injection("no residual", "residual-missing", SUMS, _sum(lambda b, r: b), EVERY),
    Injection("no residual after the FFN", "residual-missing", SUMS[1:],
              altered(l_out=lambda x, run: run["ffn_out"])),
    Injection("no branch", "branch-missing", SUMS, _sum(lambda b, r: r), EVERY),
    Injection("no attention", "branch-missing", SUMS[:1], altered(ffn_inp=lambda x, run: run.layer_input)),
    Injection("residual twice", "residual-doubled", SUMS, _sum(lambda b, r: b + 2 * r), DENSE),
    Injection("branch twice", "residual-doubled", SUMS, _sum(lambda b, r: 2 * b + r), DENSE),
    Injection("branch subtracted", "residual-doubled", SUMS, _sum(lambda b, r: r - b), DENSE),
    Injection("residual subtracted", "residual-doubled", SUMS, _sum(lambda b, r: b - r), DENSE),
    Injection("residual normed", "residual-normed", SUMS, _residual(lambda run, word: run[NORM_OF[word]]), EVERY),
    Injection("residual normed in place before the FFN", "residual-normed", SUMS[1:],
              _residual(lambda run, word: run["ffn_norm"], SUMS[1:])),
    Injection("residual from before attention", "residual-elsewhere", SUMS[1:],
              _residual(lambda run, word: run.layer_input, SUMS[1:]), DENSE),
    Injection("residual from the layer before", "residual-elsewhere", SUMS[:1],
              _residual(_predecessors_input, SUMS[:1]), DENSE, layer=1),
    Injection("residual from the embedding", "residual-elsewhere", SUMS[1:],
              _residual(lambda run, word: run["embd"], SUMS[1:]), DENSE),
    Injection("residuals from the embedding", "residual-elsewhere", SUMS[::-1],
              _residual(lambda run, word: run["embd"])),
    Injection("sum normed", "branch-normed", SUMS,
              altered(ffn_inp=_sum_normed("ffn_inp"), l_out=_sum_normed("l_out")), DENSE),
    Injection("sum normed without weight", "branch-normed", SUMS, altered_at(SUMS, _sum_normed_plainly)),
    Injection("branch by 0.22", "residual-multiplied", SUMS, _sum(lambda b, r: np.float32(0.22) * b + r), DENSE),
    Injection("residual by 0.5", "residual-multiplied", SUMS, _sum(lambda b, r: b + np.float32(0.5) * r), DENSE),
    Injection("router: sigmoid", "router-other-gate", ("ffn_moe_probs",), _router(_sigmoid), MOE),
    Injection("router: nothing", "router-other-gate", ("ffn_moe_probs",), _router(lambda x: x), MOE),
    Injection("router: worst experts", "router-other-choice", ("ffn_moe_topk",),
              _chosen(lambda p, k: np.argsort(p, axis=-1)[..., :k]), MOE),
    Injection("router: first experts", "router-other-choice", ("ffn_moe_topk",),
              _chosen(lambda p, k: np.broadcast_to(np.arange(k), (*p.shape[:-1], k))), MOE),
    Injection("router: last experts", "router-other-choice", ("ffn_moe_topk",),
              _chosen(lambda p, k: np.broadcast_to(np.arange(p.shape[-1])[-k:], (*p.shape[:-1], k))), ("moe",)),
    Injection("router: order of numbers", "router-other-order", ("ffn_moe_topk",),
              _chosen(lambda p, k: np.sort(ops.top_k(p, k), axis=-1)), MOE,
              says="chooses the right experts, in the order of their numbers"),
    Injection("router: best last", "router-other-order", ("ffn_moe_topk",),
              _chosen(lambda p, k: ops.top_k(p, k)[..., ::-1]), MOE, says="chooses the right experts, worst first"),
    Injection("router: weights of the first", "router-weights-wrong", ("ffn_moe_weights",),
              _weights(lambda p, x, c: p[..., : c.shape[-1]]), MOE),
    Injection("router: scores for weights", "router-weights-wrong", ("ffn_moe_weights",),
              _weights(lambda p, x, c: np.take_along_axis(x, c, -1)), MOE),
    Injection("router: equal weights", "router-weights-wrong", ("ffn_moe_weights",),
              _weights(lambda p, x, c: np.full(c.shape, 1 / c.shape[-1])), MOE),
    Injection("router: weights in the other order", "router-weights-wrong", ("ffn_moe_weights",),
              _weights(lambda p, x, c: np.take_along_axis(p, c, -1)[..., ::-1]), MOE),
    Injection("router: weights not normalised", "router-not-normalised", ("ffn_moe_weights_norm",),
              with_maths(normalize_weights=lambda w: w), MOE),
    Injection("router: weights through a softmax", "router-not-normalised", ("ffn_moe_weights_norm",),
              with_maths(normalize_weights=ops.softmax), MOE),
    Injection("mixture: sum", "mixture-wrong", ("ffn_out",),
              _mixture(lambda run: np.ones_like(run["ffn_moe_weights"])), MOE),
    Injection("mixture: mean", "mixture-wrong", ("ffn_out",),
              _mixture(lambda run: np.full_like(run["ffn_moe_weights"], 0.5)), ("moe",)),
    Injection("mixture: weights not normalised", "mixture-wrong", ("ffn_out",),
              _mixture(lambda run: run["ffn_moe_weights"]), MOE),
    Injection("mixture: weights in the other order", "mixture-wrong", ("ffn_out",),
              _mixture(lambda run: run["ffn_moe_weights_norm"][..., ::-1]), ("moe",)),
    Injection("experts: next one's matrices", "experts-mixed-up", EXPERTS, _experts(lambda c, n: (c + 1) % n), MOE),
    Injection("experts: second's for the first", "experts-mixed-up", EXPERTS, _experts(lambda c, n: c[..., ::-1]), MOE),
    Injection("experts: by place", "experts-mixed-up", EXPERTS,
              _experts(lambda c, n: np.broadcast_to(np.arange(c.shape[-1]), c.shape)), MOE),
    Injection("experts: first token's", "experts-mixed-up", EXPERTS,
              _experts(lambda c, n: np.broadcast_to(c[:, :1], c.shape)), MOE),
    Injection("experts: token before's", "experts-mixed-up", EXPERTS,
              _experts(lambda c, n: c[:, np.maximum(np.arange(c.shape[1]) - 1, 0)]), ("moe",)),
)  # fmt: skip
