"""Norms go wrong: epsilon, weight, mean, root, place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from proof.injected.base import NORM_WEIGHTS, SAME, SCALE, bug, elsewhere, in_other_layer, read_as, swapping
from proof.strangers.arithmetic import half
from proof.strangers.engine import Array, Edit, Engine

NORMS = ("attn_norm", "ffn_norm", "result_norm", "Qcur_normed", "Kcur_normed")
QK = ("Qcur_normed", "Kcur_normed")
QK_NORMS = ("attn_q_norm", "attn_k_norm")
BOTH = ("llama", "qwen3", "stablelm")  # RMSNorm, that of heads, LayerNorm
WITH_QK = ("qwen3", "qwen3moe")


def mean_square(x: Array) -> Array:
    return np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True)


def root(formula: Callable[[Array, float, int], Array]) -> dict[str, Edit]:
    """Norms that divide by formula(mean square, epsilon, channels)."""
    return {"root": lambda e, right, x: formula(mean_square(x), e.epsilon(), x.shape[-1])}


def half_sum(square: Array, eps: float, n: int) -> Array:
    return np.sqrt(half(square * n) / n + eps)


def weight_as(change: Callable[[Array], Array]) -> dict[str, Edit]:
    return {"weighed": lambda e, right, y, weight, bias: right(y, change(weight), bias)}


def norms_renamed(change: Callable[[str], str], *ops: str) -> dict[str, Edit]:
    """Norms by the weight, and the bias, of another one."""

    def renamed(e: Engine, right: Edit, stem: str) -> Any:
        other = change(stem) if "norm" in stem else stem
        return right(other if e.stores(other) else stem)

    return dict.fromkeys(ops or ("norm_weight", "bias"), renamed)


def norms_of_other_layer(e: Engine, right: Edit, stem: str) -> Any:
    other = "norm" in stem and stem not in ("output_norm", "token_embd_norm")
    return in_other_layer(e, right, stem) if other else right(stem)


def left_out(*stems: str) -> dict[str, Edit]:
    return {"norm": lambda e, right, x, stem: x if stem in stems else right(x, stem)}


def swapped_in_layer(e: Engine, right: Edit, stem: str) -> Any:
    """Attention's weight for the FFN's, and the other way round."""
    other = swapping(*e.h.arch.norms)(stem)
    return right(other if e.stores(other) else stem)


def plain_heads(e: Engine, side: str) -> Array:
    return e.here(f"{side}cur_proj").reshape(len(e.positions), -1, e.h.dim)


def norm_after_rope(e: Engine, right: Edit, x: Array, stem: str) -> Array:
    sides = {"attn_q_norm": "Q", "attn_k_norm": "K"}
    return right(e.rotated(x, sides[stem]), stem) if stem in sides else right(x, stem)


def over_all_heads(e: Engine, right: Edit, x: Array) -> Array:
    if x.ndim < 3:
        return right(x)
    return np.sqrt(mean_square(x).mean(axis=1, keepdims=True) + e.epsilon())


def if_normed(change: Callable[[Engine], Array]) -> Edit:
    """Where the model has norms of heads."""
    return lambda e, right, x: right(change(e) if e.stores("attn_q_norm") else x)


ROPE_FIRST: dict[str, Edit] = {
    "norm": norm_after_rope,
    "rotated_both": lambda e, right, q, k: (
        right(plain_heads(e, "Q"), plain_heads(e, "K")) if e.stores("attn_q_norm") else right(q, k)
    ),
    "query": if_normed(lambda e: e.here("Qcur_normed")),
    **read_as(lambda e: e.here("Kcur_normed") if e.stores("attn_q_norm") else None),
}
INJECTIONS = (
    bug("norm: epsilon times 10", "norm-epsilon", NORMS, {"epsilon": lambda e, right: right() * 10}, models=BOTH),
    bug("norm: epsilon 1e-6 for 1e-5", "norm-epsilon", NORMS, {"epsilon": lambda e, right: 1e-6}, models=BOTH),
    bug("norm: epsilon 1e-8 for 1e-6", "norm-epsilon", NORMS, {"epsilon": lambda e, right: 1e-8},
        models=("llama-faint",)),
    bug("norm: epsilon outside the root", "norm-epsilon-outside", NORMS,
        root(lambda square, eps, n: np.sqrt(square) + eps), models=BOTH, others=SAME),
    bug("norm: no epsilon", "norm-epsilon-missing", NORMS, {"epsilon": lambda e, right: 0.0}, models=BOTH, others=SAME),
    bug("norm: no weight", "norm-weight-missing", NORMS, weight_as(np.ones_like), models=(*BOTH, "moe"),
        needs=(NORM_WEIGHTS,), others=SAME),
    bug("norm: weight twice", "norm-weight-twice", NORMS, weight_as(lambda w: w * w), models=BOTH,
        needs=(NORM_WEIGHTS,), others=SAME),
    bug("norm: weight plus one", "norm-weight-plus-one", NORMS, weight_as(lambda w: w + 1), models=BOTH,
        needs=(NORM_WEIGHTS,), others=SAME),
    bug("norm: weight minus one", "norm-weight-minus-one", NORMS, weight_as(lambda w: w - 1), models=BOTH,
        needs=(NORM_WEIGHTS,), others=SAME),
    bug("norm: attention's and FFN's weights swapped", "norm-other-weight", ("attn_norm", "ffn_norm"),
        dict.fromkeys(("norm_weight", "bias"), swapped_in_layer), models=BOTH, needs=(NORM_WEIGHTS,), others=SAME),
    bug("norm: attention's weight for the FFN's, with its bias right", "norm-other-weight", ("ffn_norm",),
        norms_renamed(lambda stem: "attn_norm" if stem == "ffn_norm" else stem, "norm_weight"), models=("stablelm",),
        needs=(NORM_WEIGHTS,)),
    bug("norm: next layer's weight", "norm-other-weight", NORMS[:2] + QK,
        dict.fromkeys(("norm_weight", "bias"), norms_of_other_layer), models=BOTH, needs=(NORM_WEIGHTS,), others=SAME),
    bug("norm: last layer's weight for the final norm", "norm-other-weight", ("result_norm",),
        norms_renamed(lambda stem: "ffn_norm" if stem == "output_norm" else stem), models=BOTH, needs=(NORM_WEIGHTS,)),
    bug("norm: Q's and K's weights swapped", "norm-other-weight", QK, norms_renamed(swapping(*QK_NORMS)),
        models=WITH_QK, others=SAME),
    bug("norm: LayerNorm for RMSNorm", "norm-mean-subtracted", NORMS,
        {"centred": lambda e, right, x: x - x.mean(axis=-1, keepdims=True)}, models=("llama", "qwen3"), others=SAME),
    bug("norm: RMSNorm for LayerNorm", "norm-mean-kept", NORMS, {"centred": lambda e, right, x: x},
        models=("stablelm",), others=SAME),
    bug("norm: LayerNorm without bias", "norm-bias-missing", NORMS,
        {"weighed": lambda e, right, y, weight, bias: right(y, weight, None)}, models=("stablelm",), others=SAME),
    bug("norm: sum for mean", "norm-sum-for-mean", NORMS, root(lambda square, eps, n: np.sqrt(square * n + eps)),
        models=BOTH, others=SAME),
    bug("norm: no root", "norm-no-root", NORMS, root(lambda square, eps, n: square + eps), models=BOTH, others=SAME),
    bug("norm: none at all", "norm-missing", NORMS, {"norm": lambda e, right, x, stem: x}, models=BOTH, others=SAME),
    bug("norm: none before the FFN", "norm-missing", ("ffn_norm",), left_out("ffn_norm"), models=BOTH, others=SAME,
        unlike=("gpt-oss",)),
    bug("norm: none at the end", "norm-missing", ("result_norm",), left_out("output_norm"), models=BOTH, others=SAME),
    bug("norm: none of Q and K", "norm-missing", QK, left_out(*QK_NORMS), models=WITH_QK, others=SAME),
    bug("norm: sum overflows", "norm-overflow", NORMS, root(half_sum), models=("llama-large",)),
    bug("norm: sum overflows in some rows", "norm-overflow", NORMS, root(half_sum), models=("llama-uneven",)),
    bug("norm: epsilon in float16", "norm-epsilon-in-half", NORMS,
        {"epsilon": lambda e, right: float(np.float16(right()))}, models=("llama-faint",)),
    bug("norm: epsilon lost in float16", "norm-epsilon-in-half", NORMS,
        {"epsilon": lambda e, right: float(np.float16(right()))}, models=("llama-faintest",)),
    bug("QK-norm after RoPE", "qk-norm-after-rope", (*QK, "Qcur_rope", "Kcur_rope", "kq"), ROPE_FIRST, models=WITH_QK,
        needs=(SCALE,), others=SAME),
    bug("QK-norm of all heads at once", "qk-norm-whole-row", QK, {"root": over_all_heads}, models=WITH_QK, others=SAME),
    elsewhere("norm: epsilon times 100", "norm-epsilon", {"epsilon": lambda e, right: right() * 100}),
    elsewhere("norm: epsilon 0.001", "norm-epsilon", {"epsilon": lambda e, right: 1e-3}),
    elsewhere("norm: weight alone", "norm-missing", {"normalised": lambda e, right, x: x}),
    elsewhere("norm: none behind attention", "norm-missing", left_out("post_attention_norm")),
    elsewhere("norm: none behind the FFN", "norm-missing", left_out("post_ffw_norm")),
    elsewhere("norm: none of latent rows", "norm-missing", left_out("attn_kv_a_norm")),
    elsewhere("norm: none of the state's output", "norm-missing", left_out("ssm_norm")),
    elsewhere("norm: those before and behind swapped", "norm-other-weight", norms_renamed(lambda stem: swapping(
        "attn_norm", "post_attention_norm")(swapping("ffn_norm", "post_ffw_norm")(stem)))),
)  # fmt: skip
