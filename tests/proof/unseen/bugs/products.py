"""Products with weights go wrong: which weight, which input, bias, how a fused one is split."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import numpy as np

from proof.unseen.bugs.bug import bug
from proof.unseen.engine import Engine


def _bias(change: Callable[[Engine, str, Any], Any], *stems: str) -> Callable[..., Any]:
    """Products with another bias: of all weights that have one, or of some."""

    def linear(e: Engine, x: Any, stem: str) -> Any:
        wanted = e.has(stem, "bias") and (not stems or stem in stems)
        return e.product(x, stem) + (change(e, stem, e.bias(stem)) if wanted else e.bias(stem))

    return linear


def _experts_bias(change: Callable[[Any], Any]) -> Callable[..., Any]:
    def each(e: Engine, x: Any, stem: str, chosen: Any) -> Any:
        y = Engine.each(e, x, stem, chosen)
        b = e.bias(stem)
        return y - b[chosen] + change(b)[chosen] if np.ndim(b) else y

    return each


def _other_layers(e: Engine, stem: str, own: Any) -> Any:
    return e.file.tensors.get(f"blk.{1 - e.layer}.{stem}.bias", own)


def _weight(*stems: str, change: Callable[[Engine, str], Any]) -> Callable[..., Any]:
    """Another matrix: for all products, or for some."""

    def product(e: Engine, x: Any, stem: str) -> Any:
        w = change(e, stem) if not stems or stem in stems else e.weight(stem)
        return x @ (w if w.shape == e.weight(stem).shape else e.weight(stem)).T

    return product


def _stored_otherwise(e: Engine, stem: str) -> Any:
    """The transpose of a square matrix; another one taken for [in, out]."""
    w = e.weight(stem)
    return w.T if w.shape[0] == w.shape[1] else w.reshape(w.shape[::-1]).T


def _of_layer(step: int) -> Callable[[Engine, str], Any]:
    def weight(e: Engine, stem: str) -> Any:
        name = f"blk.{e.layer + step}.{stem}.weight"
        return e.file[name] if name in e.file and e.name(stem) != stem else e.weight(stem)

    return weight


def _swapped(one: str, other: str) -> Callable[..., Any]:
    """Both tensors of each other's name, with their biases."""
    table = {one: other, other: one}
    return lambda e, x, stem: Engine.linear(e, x, table[stem] if e.has(table.get(stem, "?")) else stem)


def _named_for(stem: str, other: str) -> Callable[..., Any]:
    """One matrix for another of the same shape."""
    return _weight(stem, change=lambda e, _: e.weight(other) if e.has(other) else e.weight(stem))


def _input(stems: tuple[str, ...], given: Callable[[Engine], Any]) -> Callable[..., Any]:
    """Products of another input of the same width."""

    def product(e: Engine, x: Any, stem: str) -> Any:
        other = given(e) if stem in stems else None
        return Engine.product(e, x if other is None or other.shape != x.shape else other, stem)

    return product


def _parts(order: str) -> Callable[..., Any]:
    """Q, K and V taken from a fused product in another order."""

    def split(e: Engine, rows: Any, sizes: list[int]) -> Any:
        wide = dict(zip("qkv", sizes, strict=True))
        parts = dict(zip(order, np.split(rows, np.cumsum([wide[side] for side in order])[:-1], axis=-1), strict=True))
        return [parts[side] for side in "qkv"]

    return split


def _head_by_head(e: Engine, rows: Any, sizes: list[int]) -> Any:
    """The queries of a KV head, its key and its value lie side by side."""
    groups = e.kv_heads
    grouped = rows.reshape(len(rows), groups, -1)
    parts = np.split(grouped, np.cumsum([size // groups for size in sizes])[:-1], axis=-1)
    return [part.reshape(len(rows), -1) for part in parts]


def _times(stem: str, factor: float) -> Callable[..., Any]:
    return lambda e, x, of: Engine.linear(e, x, of) * np.float32(factor if of == stem else 1)


QKV = ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_q_a", "attn_kv_a_mqa", "ssm_in", "shortconv.in_proj")
FFN = ("ffn_gate", "ffn_up", "ffn_gate_shexp", "ffn_up_shexp")
DOWN = ("ffn_down", "attn_output", "ssm_out", "shortconv.out_proj")
BUGS = (
    bug("bias: none in products", "bias-missing", linear=_bias(lambda e, s, b: 0 * b)),
    bug("bias: none after attention", "bias-missing", linear=_bias(lambda e, s, b: 0 * b, "attn_output")),
    bug("bias: none in the FFN", "bias-missing", linear=_bias(lambda e, s, b: 0 * b, "ffn_up", "ffn_down")),
    bug("bias: none in the router", "bias-missing", linear=_bias(lambda e, s, b: 0 * b, "ffn_gate_inp")),
    bug("bias: none on V", "bias-missing", linear=_bias(lambda e, s, b: 0 * b, "attn_v")),
    bug("bias: none of experts", "bias-missing", each=_experts_bias(lambda b: 0 * b)),
    bug("bias: twice", "bias-wrong", linear=_bias(lambda e, s, b: 2 * b)),
    bug("bias: subtracted", "bias-wrong", linear=_bias(lambda e, s, b: -b)),
    bug("bias: other layer's", "bias-wrong", linear=_bias(_other_layers)),
    bug("bias: the next expert's", "bias-wrong", each=_experts_bias(lambda b: np.roll(b, -1, axis=0))),
    bug("transposed: all", "weight-transposed", product=_weight(change=_stored_otherwise)),
    bug("transposed: after attention", "weight-transposed", product=_weight("attn_output", change=_stored_otherwise)),
    bug("transposed: down", "weight-transposed", product=_weight("ffn_down", change=_stored_otherwise)),
    bug("transposed: router", "weight-transposed", product=_weight("ffn_gate_inp", change=_stored_otherwise)),
    bug("transposed: state space", "weight-transposed", product=_weight("ssm_out", change=_stored_otherwise)),
    bug("transposed: latent", "weight-transposed", product=_weight("attn_q_b", change=_stored_otherwise)),
    bug("other layer: into attention", "weight-of-other-layer", product=_weight(*QKV, change=_of_layer(1))),
    bug("other layer: out of it", "weight-of-other-layer", product=_weight(*DOWN, change=_of_layer(1))),
    bug("other layer: FFN", "weight-of-other-layer", product=_weight(*FFN, change=_of_layer(1))),
    bug("other layer: router", "weight-of-other-layer", product=_weight("ffn_gate_inp", change=_of_layer(1))),
    bug("gate and up swapped", "gate-up-swapped", linear=_swapped("ffn_gate", "ffn_up")),
    bug("gate and up swapped: shared expert", "gate-up-swapped weight-of-other-tensor",
        linear=_swapped("ffn_gate_shexp", "ffn_up_shexp")),
    bug("K and V swapped", "weight-of-other-tensor", linear=_swapped("attn_k", "attn_v")),
    bug("Q for the output projection", "weight-of-other-tensor", product=_named_for("attn_output", "attn_q")),
    *(bug(f"fused: {', '.join(order).upper()}", "qkv-split", split=_parts("".join(order)))
      for order in permutations("qkv") if order != ("q", "k", "v")),
    bug("fused: head by head", "qkv-split", split=_head_by_head),
    bug("attention of the residual", "input-elsewhere", product=_input(QKV, lambda e: e.residual)),
    bug("FFN of the residual", "input-elsewhere", product=_input(FFN, lambda e:
        e.residual if e.arch.parallel else e.between)),
    bug("FFN of attention's input", "input-elsewhere", product=_input(FFN, lambda e: e.attended)),
    bug("router of the residual", "input-elsewhere", product=_input(("ffn_gate_inp",), lambda e: e.between)),
    bug("output projection of attention's input", "input-elsewhere",
        product=_input(("attn_output",), lambda e: e.attended)),
    bug("no output projection", "product-missing", product=lambda e, x, stem:
        x if stem == "attn_output" else Engine.product(e, x, stem)),
    bug("Q scaled already", "product-multiplied", linear=_times("attn_q", 1 / 8)),
    bug("output projection halved", "product-multiplied", projected=lambda e, h: Engine.projected(e, h) / 2),
    bug("down projection by 0.22", "product-multiplied", linear=_times("ffn_down", 0.22)),
    bug("router negated", "product-multiplied", linear=_times("ffn_gate_inp", -1.0)),
    bug("state space's output halved", "product-multiplied", linear=_times("ssm_out", 0.5)),
    bug("convolution's output halved", "product-multiplied", linear=_times("shortconv.out_proj", 0.5)),
)  # fmt: skip
