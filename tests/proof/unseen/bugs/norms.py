"""Norms go wrong: epsilon, weight, mean, root, place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from proof.unseen.bugs.bug import bug
from proof.unseen.engine import Engine


def _epsilon(change: Callable[[float], float]) -> Callable[..., Any]:
    return lambda e, x, eps: Engine.normalised(e, x, change(eps))


def _sized(size: Callable[[Any, float], Any]) -> Callable[..., Any]:
    """x over a size of the mean square, of centred values where the model has LayerNorm."""

    def normalised(e: Engine, x: Any, eps: float) -> Any:
        wide = x.astype(np.float64)
        wide = wide - wide.mean(axis=-1, keepdims=True) if e.arch.layer_norm else wide
        return wide / size((wide * wide).mean(axis=-1, keepdims=True), eps)

    return normalised


def _weight(change: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda e, stem: change(Engine.norm_weight(e, stem))


def _centred(centred: bool) -> Callable[..., Any]:
    """LayerNorm, or RMSNorm, whatever the model has."""

    def normalised(e: Engine, x: Any, eps: float) -> Any:
        wide = x.astype(np.float64)
        wide = wide - wide.mean(axis=-1, keepdims=True) if centred else wide
        return wide / np.sqrt((wide * wide).mean(axis=-1, keepdims=True) + eps)

    return normalised


def _sum_for_mean(e: Engine, x: Any, eps: float) -> Any:
    wide = x.astype(np.float64)
    wide = wide - wide.mean(axis=-1, keepdims=True) if e.arch.layer_norm else wide
    return wide / np.sqrt((wide * wide).sum(axis=-1, keepdims=True) + eps)


def _whole_row(e: Engine, x: Any, stem: str) -> Any:
    """Heads [token, head, dim] share one mean square."""
    if x.ndim < 3:
        return Engine.norm(e, x, stem)
    wide = x.astype(np.float64)
    size = np.sqrt((wide * wide).mean(axis=(-1, -2), keepdims=True) + e.eps)
    return (wide / size * e.norm_weight(stem)).astype(np.float32)


def _named(change: Callable[[str], str]) -> Callable[..., Any]:
    """Norms by the weight and bias of another one of the layer, where there is such."""

    def norm(e: Engine, x: Any, stem: str) -> Any:
        other = change(stem)
        same = e.has(other) and e.weight(other).shape == e.weight(stem).shape
        return Engine.norm(e, x, other if same else stem)

    return norm


def _swapped(*pairs: tuple[str, str]) -> Callable[[str], str]:
    table = {one: other for pair in pairs for one, other in (pair, pair[::-1])}
    return lambda stem: table.get(stem, stem)


def _next_layer(end: str, own: Callable[[Engine, str], Any]) -> Callable[..., Any]:
    """A norm's tensor of the layer after; of the last layer, or of none, its own."""

    def tensor(e: Engine, stem: str) -> Any:
        name = f"blk.{e.layer + 1}.{stem}.{end}"
        return e.file[name] if name in e.file and e.name(stem) != stem else own(e, stem)

    return tensor


def _rope_first(e: Engine, x: Any, side: str) -> Any:
    stem = f"attn_{side.lower()}_norm"
    if not e.has(stem):
        return Engine.placed(e, x, side)
    return e.tap(f"{side}cur_normed", e.norm(e.tap(f"{side}cur_rope", e.rotated(x, side)), stem))


def _left_out(*stems: str) -> Callable[..., Any]:
    return lambda e, x, stem: x if stem in stems or not stems else Engine.norm(e, x, stem)


BUGS = (
    bug("norm: epsilon times 100", "norm-epsilon", normalised=_epsilon(lambda eps: eps * 100)),
    bug("norm: epsilon 0.001", "norm-epsilon", normalised=_epsilon(lambda eps: 1e-3)),
    bug("norm: epsilon outside the root", "norm-epsilon-outside", normalised=_sized(lambda s, eps: np.sqrt(s) + eps)),
    bug("norm: no epsilon", "norm-epsilon-missing", normalised=_epsilon(lambda eps: 0.0)),
    bug("norm: no weight", "norm-weight-missing", norm_weight=_weight(np.ones_like)),
    bug("norm: weight twice", "norm-weight-twice", norm_weight=_weight(lambda w: w * w)),
    bug("norm: weight plus one", "norm-weight-plus-one", norm_weight=_weight(lambda w: w + 1)),
    bug("norm: weight minus one", "norm-weight-minus-one", norm_weight=_weight(lambda w: w - 1)),
    bug("norm: no bias", "norm-bias-missing", norm_bias=lambda e, stem: np.float32(0)),
    bug("norm: LayerNorm for RMSNorm", "norm-mean-subtracted", normalised=_centred(True)),
    bug("norm: RMSNorm for LayerNorm", "norm-mean-kept", normalised=_centred(False)),
    bug("norm: sum for mean", "norm-sum-for-mean", normalised=_sum_for_mean),
    bug("norm: no root", "norm-no-root", normalised=_sized(lambda s, eps: s + eps)),
    bug("norm: weight alone", "norm-missing", normalised=lambda e, x, eps: x),
    bug("norm: none at all", "norm-missing", norm=_left_out()),
    bug("norm: none before the FFN", "norm-missing", norm=_left_out("ffn_norm"), unlike=("gpt-oss",)),
    bug("norm: none behind attention", "norm-missing", norm=_left_out("post_attention_norm")),
    bug("norm: none behind the FFN", "norm-missing", norm=_left_out("post_ffw_norm")),
    bug("norm: none at the end", "norm-missing", norm=_left_out("output_norm")),
    bug("norm: none of Q and K", "norm-missing", norm=_left_out("attn_q_norm", "attn_k_norm")),
    bug("norm: none of latent rows", "norm-missing", norm=_left_out("attn_kv_a_norm")),
    bug("norm: none of the state's output", "norm-missing", norm=_left_out("ssm_norm")),
    bug("norm: attention's and FFN's swapped", "norm-other-weight",
        norm=_named(_swapped(("attn_norm", "ffn_norm"), ("attn_norm_2", "attn_norm")))),
    bug("norm: those before and behind swapped", "norm-other-weight",
        norm=_named(_swapped(("attn_norm", "post_attention_norm"), ("ffn_norm", "post_ffw_norm")))),
    bug("norm: Q's and K's swapped", "norm-other-weight", norm=_named(_swapped(("attn_q_norm", "attn_k_norm")))),
    bug("norm: next layer's weight", "norm-other-weight", norm_weight=_next_layer("weight", Engine.norm_weight),
        norm_bias=_next_layer("bias", Engine.norm_bias)),
    bug("norm: whole rows", "qk-norm-whole-row", norm=_whole_row),
    bug("norm: Q and K after RoPE", "qk-norm-after-rope", placed=_rope_first),
)  # fmt: skip
