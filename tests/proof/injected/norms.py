"""Norms go wrong: epsilon, weight, mean, root, place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from faulty import with_maths
from llamaref import Engine, ops

from proof.injected.base import Build, Injection, altered, rms

NORMS = ("attn_norm", "ffn_norm", "result_norm", "Qcur_normed", "Kcur_normed")
QK = ("Qcur_normed", "Kcur_normed")
BOTH = ("llama", "qwen3", "stablelm")  # RMSNorm, that of heads, LayerNorm
WITH_QK = ("qwen3", "qwen3moe")


def _square(x: Any) -> Any:
    return np.mean(x * x, axis=-1, keepdims=True)


def _norms(fault: Callable[[Any, Any, float], Any]) -> Build:
    """Both kinds of norm by fault(x or x - mean, weight, epsilon); LayerNorm's bias is added after it."""

    def layer(x: Any, weight: Any, bias: Any, eps: float) -> Any:
        wide = x.astype(np.float64)
        y = fault(wide - wide.mean(axis=-1, keepdims=True), weight, eps)
        return np.asarray(y if bias is None else y + bias, x.dtype)

    return with_maths(
        rms_norm=lambda x, weight, eps: np.asarray(fault(x.astype(np.float64), weight, eps), x.dtype), layer_norm=layer
    )


def _epsilon(change: Callable[[float], float]) -> Build:
    return _norms(lambda x, w, eps: x / np.sqrt(_square(x) + change(eps)) * w)


def _weight(change: Callable[[Any], Any]) -> Build:
    return _norms(lambda x, w, eps: x / np.sqrt(_square(x) + eps) * change(w))


def _renamed(change: Callable[[str], str]) -> Build:
    """Norms by the weight (and bias) of another name."""

    class Renamed(Engine):
        def norm(self, x: Any, name: str) -> Any:
            return super().norm(x, change(name))

        def layer_norm(self, x: Any, name: str) -> Any:
            return super().layer_norm(x, change(name))

    return Renamed


def _swapped(one: str, other: str) -> Build:
    def change(name: str) -> str:
        head, _, stem = name.rpartition(".")
        return ".".join(part for part in (head, {one: other, other: one}.get(stem, stem)) if part)

    return _renamed(change)


def _next_layer(name: str) -> str:
    return name.replace(".0.", ".?.").replace(".1.", ".0.").replace(".?.", ".1.")


def _without(*ends: str) -> Build:
    """An engine that leaves out the norms whose names end so."""

    class Without(Engine):
        def norm(self, x: Any, name: str) -> Any:
            return x if name.endswith(ends) else super().norm(x, name)

        def layer_norm(self, x: Any, name: str) -> Any:
            return x if name.endswith(ends) else super().layer_norm(x, name)

    return Without


def _by_attentions_weight(x: Any, run: Any) -> Any:
    bias = run.engine.w.vector(f"blk.{run.layer}.ffn_norm.bias")
    return ops.layer_norm(run["ffn_inp"], run.weight("attn_norm"), bias, run.engine.config.norm_eps)


def _mean_subtracted(x: Any, weight: Any, eps: float) -> Any:
    return ops.layer_norm(x, weight, None, eps)


def _mean_kept(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    y = ops.rms_norm(x, weight, eps)
    return y if bias is None else y + bias


def _no_bias(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    return ops.layer_norm(x, weight, None, eps)


def _half_sum(x: Any, weight: Any, eps: float) -> Any:
    """The sum of squares has its place in a float16."""
    with np.errstate(over="ignore"):
        total = np.sum(x * x, axis=-1, keepdims=True).astype(np.float16).astype(np.float64)
    return x / np.sqrt(total / x.shape[-1] + eps) * weight


def _whole_row(x: Any, weight: Any, eps: float) -> Any:
    """Heads [..., head, dim] share one mean square."""
    if x.ndim < 4:
        return ops.rms_norm(x, weight, eps)
    merged = x.reshape(*x.shape[:-2], -1)
    return np.asarray(rms(merged, eps).reshape(x.shape) * weight, x.dtype)


class _RopeFirst(Engine):
    """Q and K are rotated, and then normalised: attention takes the norm's result."""

    def forward(self, tokens: Any, positions: Any = None, cache: Any = None, tap: Any = None) -> Any:
        cos, sin = self.ops.rope_angles(self.config.rope, np.asarray(positions))
        rotated: dict[str, Any] = {}

        def normed(side: str) -> Any:
            def fault(x: Any, run: Any) -> Any:
                projected = run[f"{side}cur_proj"].reshape(x.shape)
                rotated[side] = ops.rope_halves(projected, cos, sin)
                stem = f"attn_{side.lower()}_norm"
                return ops.rms_norm(rotated[side], run.weight(stem), self.config.rms_eps)

            return fault

        engine = altered(
            Qcur_normed=normed("Q"), Kcur_normed=normed("K"),
            Qcur_rope=lambda x, run: rotated["Q"], Kcur_rope=lambda x, run: rotated["K"],
            kq=lambda x, run: ops.attention_scores(run["Qcur_normed"], run["Kcur_normed"]),
        )(self.w)  # fmt: skip
        return engine.forward(tokens, positions, cache, tap)


INJECTIONS = (
    Injection("norm: epsilon times 10", "norm-epsilon", NORMS, _epsilon(lambda eps: eps * 10), BOTH),
    Injection("norm: epsilon 1e-6 for 1e-5", "norm-epsilon", NORMS, _epsilon(lambda eps: 1e-6), BOTH),
    Injection("norm: epsilon 1e-8 for 1e-6", "norm-epsilon", NORMS, _epsilon(lambda eps: 1e-8), ("llama-faint",)),
    Injection("norm: epsilon outside the root", "norm-epsilon-outside", NORMS,
              _norms(lambda x, w, eps: x / (np.sqrt(_square(x)) + eps) * w), BOTH),
    Injection("norm: no epsilon", "norm-epsilon-missing", NORMS, _epsilon(lambda eps: 0.0), BOTH),
    Injection("norm: no weight", "norm-weight-missing", NORMS, _weight(lambda w: 1.0), (*BOTH, "moe")),
    Injection("norm: weight twice", "norm-weight-twice", NORMS, _weight(lambda w: w * w), BOTH),
    Injection("norm: weight plus one", "norm-weight-plus-one", NORMS, _weight(lambda w: w + 1.0), BOTH),
    Injection("norm: weight minus one", "norm-weight-minus-one", NORMS, _weight(lambda w: w - 1.0), BOTH),
    Injection("norm: attention's and FFN's weights swapped", "norm-other-weight", ("attn_norm", "ffn_norm"),
              _swapped("attn_norm", "ffn_norm"), BOTH),
    Injection("norm: attention's weight for the FFN's, with its bias right", "norm-other-weight", ("ffn_norm",),
              altered(ffn_norm=_by_attentions_weight), ("stablelm",)),
    Injection("norm: next layer's weight", "norm-other-weight", NORMS[:2] + QK, _renamed(_next_layer), BOTH),
    Injection("norm: last layer's weight for the final norm", "norm-other-weight", ("result_norm",),
              _renamed(lambda name: "blk.1.ffn_norm" if name == "output_norm" else name), BOTH),
    Injection("norm: Q's and K's weights swapped", "norm-other-weight", QK,
              _swapped("attn_q_norm", "attn_k_norm"), WITH_QK),
    Injection("norm: LayerNorm for RMSNorm", "norm-mean-subtracted", NORMS,
              with_maths(rms_norm=_mean_subtracted), ("llama", "qwen3")),
    Injection("norm: RMSNorm for LayerNorm", "norm-mean-kept", NORMS,
              with_maths(layer_norm=_mean_kept), ("stablelm",)),
    Injection("norm: LayerNorm without bias", "norm-bias-missing", NORMS,
              with_maths(layer_norm=_no_bias), ("stablelm",)),
    Injection("norm: sum for mean", "norm-sum-for-mean", NORMS,
              _norms(lambda x, w, eps: x / np.sqrt(_square(x) * x.shape[-1] + eps) * w), BOTH),
    Injection("norm: no root", "norm-no-root", NORMS, _norms(lambda x, w, eps: x / (_square(x) + eps) * w), BOTH),
    Injection("norm: none at all", "norm-missing", NORMS, _without("norm"), BOTH),
    Injection("norm: none before the FFN", "norm-missing", ("ffn_norm",), _without("ffn_norm"), BOTH),
    Injection("norm: none at the end", "norm-missing", ("result_norm",), _without("output_norm"), BOTH),
    Injection("norm: none of Q and K", "norm-missing", QK, _without("q_norm", "k_norm"), WITH_QK),
    Injection("norm: sum overflows", "norm-overflow", NORMS, _norms(_half_sum), ("llama-large",)),
    Injection("norm: sum overflows in some rows", "norm-overflow", NORMS, _norms(_half_sum), ("llama-uneven",)),
    Injection("norm: epsilon in float16", "norm-epsilon-in-half", NORMS,
              _epsilon(lambda eps: float(np.float16(eps))), ("llama-faint",)),
    Injection("norm: epsilon lost in float16", "norm-epsilon-in-half", NORMS,
              _epsilon(lambda eps: float(np.float16(eps))), ("llama-faintest",)),
    Injection("QK-norm after RoPE", "qk-norm-after-rope", (*QK, "Qcur_rope", "Kcur_rope", "kq"),
              _RopeFirst, WITH_QK),
    Injection("QK-norm of all heads at once", "qk-norm-whole-row", QK, with_maths(rms_norm=_whole_row), WITH_QK),
)  # fmt: skip
