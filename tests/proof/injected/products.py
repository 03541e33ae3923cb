"""Products with weights go wrong: another weight, bias, input or row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from proof.injected.base import (
    DENSE,
    EVERY,
    OWN_PAIRS,
    SAME,
    SCALE,
    bug,
    elsewhere,
    in_other_layer,
    row_before,
    row_late,
    swapping,
    to_halves,
    to_pairs,
)
from proof.strangers.arithmetic import bfloat, eight, eight_with_zero, half
from proof.strangers.engine import Array, Edit, Engine

QKV = ("Qcur_proj", "Kcur_proj", "Vcur_proj")
QK, Q, V = QKV[:2], QKV[:1], QKV[2:]
HEAD = ("result_output",)
EXPERTS = ("ffn_moe_gate", "ffn_moe_up", "ffn_moe_down")
DENSE_FFN = ("ffn_gate", "ffn_up", "ffn_out")
PRODUCTS = (*QKV, "attn_out", "ffn_moe_logits", *EXPERTS, *DENSE_FFN, *HEAD)
QKV_STEMS = ("attn_q", "attn_k", "attn_v")
FFN_STEMS = ("ffn_gate", "ffn_up", "ffn_down")
EXPERT_STEMS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_up_exps")
INTO = (*QKV_STEMS, "attn_qkv", "attn_q_a", "attn_kv_a_mqa", "ssm_in", "shortconv.in_proj")  # into attention, or as it
OUT_OF = ("ffn_down", "attn_output", "ssm_out", "shortconv.out_proj")
INTO_FFN = ("ffn_gate", "ffn_up", "ffn_gate_shexp", "ffn_up_shexp")


def bias_as(stems: Iterable[str], change: Callable[[Array], Array | None]) -> dict[str, Edit]:
    stems = tuple(stems)

    def biased(e: Engine, right: Edit, stem: str) -> Array | None:
        b = right(stem)
        return b if b is None or stem not in stems else change(b)

    return {"bias": biased}


def other_layers(stems: Iterable[str], *ops: str) -> dict[str, Edit]:
    """These tensors of the other layer."""
    stems = tuple(stems)

    def other(e: Engine, right: Edit, stem: str) -> Any:
        return in_other_layer(e, right, stem) if stem in stems else right(stem)

    return dict.fromkeys(ops or ("matrix", "bias", "factor"), other)


def renamed(change: Callable[[str], str], *ops: str) -> dict[str, Edit]:
    """The tensors of another name, where there are such."""

    def other(e: Engine, right: Edit, stem: str) -> Any:
        return right(change(stem) if e.stores(change(stem)) else stem)

    return dict.fromkeys(ops or ("matrix", "bias", "factor"), other)


def transposed(stems: Iterable[str] = ()) -> dict[str, Edit]:
    """Matrices read as if they were stored [in, out]: all, or some."""
    stems = tuple(stems)

    def matrix(e: Engine, right: Edit, stem: str) -> Array:
        w = right(stem)
        return w.reshape(w.shape[::-1]).T if w.ndim == 2 and (stem in stems or not stems) else w

    return {"matrix": matrix}


def split_as(order: str) -> dict[str, Edit]:
    """The fused product taken for parts in another order."""

    def split(e: Engine, right: Edit, y: Array) -> Any:
        sizes = {"q": e.h.heads * e.h.dim, "k": e.kv_heads * e.h.dim, "v": e.kv_heads * e.h.dim}
        edges = np.cumsum([sizes[part] for part in order])[:-1]
        parts = dict(zip(order, np.split(y, edges, axis=-1), strict=True))
        return right(np.concatenate([parts[part] for part in "qkv"], axis=-1))

    return {"split": split}


def head_by_head(e: Engine, right: Edit, y: Array) -> Any:
    """Every KV head's queries, its key and its value side by side."""
    groups = y.reshape(len(y), e.kv_heads, -1, e.h.dim)
    parts = groups[:, :, :-2], groups[:, :, -2], groups[:, :, -1]
    return right(np.concatenate([part.reshape(len(y), -1) for part in parts], axis=-1))


def rows_permuted(stems: Iterable[str], change: Callable[[Array], Array], bias: bool = True) -> dict[str, Edit]:
    """Rows of a matrix permuted within each head, and its bias if that goes with it."""
    stems = tuple(stems)

    def finished(e: Engine, right: Edit, y: Array, stem: str) -> Array:
        if stem not in stems or not e.h.arch.rotates:
            return right(y, stem)
        y = right(y, stem) if bias else y
        y = change(y.reshape(len(y), -1, e.h.dim)).reshape(y.shape)
        return y if bias else right(y, stem)

    return {"finished": finished}


def head_of(rows: Callable[[Engine, Array], Array]) -> dict[str, Edit]:
    return {"head": lambda e, right, y: right(rows(e, y))}


def capped(cap: float) -> Edit:
    return lambda e, x: cap * np.tanh(x / cap)


def rotated_v(e: Engine, v: Array) -> Array:
    return e.rotated(v.reshape(len(v), -1, e.h.dim), "V").reshape(v.shape) if e.h.arch.rotates else v


def product_of(stems: str | Iterable[str], source: Callable[[Engine], Array]) -> dict[str, Edit]:
    """The product with weights, of another tensor of the same width."""
    stems = (stems,) if isinstance(stems, str) else tuple(stems)

    def product(e: Engine, right: Edit, x: Array, stem: str) -> Array:
        other = source(e) if stem in stems else x
        return right(other.reshape(x.shape) if other.size == x.size else x, stem)

    return {"product": product}


def without_product(stem: str) -> dict[str, Edit]:
    return {"product": lambda e, right, x, name: x if name == stem else right(x, name)}


def times(stem: str, factor: float) -> dict[str, Edit]:
    """What is made with one weight, times a factor."""

    def finished(e: Engine, right: Edit, y: Array, name: str) -> Array:
        y = right(y, name)
        return y * y.dtype.type(factor) if name == stem and e.stores(stem) else y

    return {"finished": finished}


def biases_as(change: Callable[[Array], Array | None]) -> dict[str, Edit]:
    """Those of all products but experts'."""

    def biased(e: Engine, right: Edit, stem: str) -> Array | None:
        b = right(stem)
        return b if b is None or not of_product(stem) else change(b)

    return {"bias": biased}


def biases_of_other_layer(e: Engine, right: Edit, stem: str) -> Array | None:
    here = not of_product(stem) or right(stem) is None
    return right(stem) if here else in_other_layer(e, right, stem)


def of_product(stem: str) -> bool:
    """Whether a bias is that of a product, and not of experts."""
    return "norm" not in stem and not stem.endswith(("_exps", "exp_probs_b", "ssm_conv1d", "ssm_dt"))


def rounding(rounded: Callable[[Array], Array]) -> dict[str, Edit]:
    """Products of activations in fewer bits; experts' are as they should be."""
    return {"multiplied": lambda e, right, x, w: right(rounded(x), w)}


INJECTIONS = (
    bug("bias: none on Q, K, V", "bias-missing", QKV, bias_as(QKV_STEMS, lambda b: None),
        models=("qwen2", "llama-biased")),
    bug("bias: none on V", "bias-missing", V, bias_as(["attn_v"], lambda b: None), models=("qwen2",), others=SAME),
    bug("bias: none after attention", "bias-missing", ("attn_out",), bias_as(["attn_output"], lambda b: None),
        models=("llama-biased",), others=SAME),
    bug("bias: none in the FFN", "bias-missing", DENSE_FFN, bias_as(FFN_STEMS, lambda b: None),
        models=("llama-biased",), others=SAME),
    bug("bias: none on the head", "bias-missing", HEAD, bias_as(["output"], lambda b: None),
        models=("qwen2-head-biased",)),
    bug("bias: twice", "bias-wrong", QKV, bias_as(QKV_STEMS, lambda b: 2 * b), models=("qwen2",)),
    bug("bias: subtracted", "bias-wrong", QKV, bias_as(QKV_STEMS, lambda b: -b), models=("qwen2",)),
    bug("bias: twice in the FFN", "bias-wrong", DENSE_FFN, bias_as(FFN_STEMS, lambda b: 2 * b),
        models=("llama-biased",)),
    bug("bias: K's and V's swapped", "bias-wrong", QKV[1:], renamed(swapping("attn_k", "attn_v"), "bias"),
        models=("qwen2", "llama-biased")),
    bug("bias: other layer's", "bias-wrong", QKV, other_layers(QKV_STEMS, "bias"), models=("qwen2",)),
    bug("scale: ignored in attention", "weight-scale-ignored", ("attn_out",),
        {"factor": lambda e, right, stem: None if "attn" in stem else right(stem)}, models=("llama-scaled",)),
    bug("scale: ignored in the FFN", "weight-scale-ignored", DENSE_FFN,
        {"factor": lambda e, right, stem: None if "ffn" in stem else right(stem)}, models=("llama-scaled",)),
    bug("transposed: all", "weight-transposed", PRODUCTS, transposed(), models=DENSE, others=SAME),
    bug("transposed: after attention", "weight-transposed", ("attn_out",), transposed(["attn_output"]), models=DENSE,
        others=SAME),
    bug("transposed: down", "weight-transposed", ("ffn_out",), transposed(["ffn_down"]), others=SAME),
    bug("transposed: router", "weight-transposed", ("ffn_moe_logits",), transposed(["ffn_gate_inp"]), models=("moe",),
        others=SAME),
    bug("transposed: head", "weight-transposed", HEAD, transposed(["output"])),
    bug("other layer: Q, K, V", "weight-of-other-layer", QKV, other_layers(QKV_STEMS), models=DENSE),
    bug("other layer: Q, K, V but for biases", "weight-of-other-layer", QKV, other_layers(QKV_STEMS, "matrix"),
        models=("qwen2",)),
    bug("other layer: FFN", "weight-of-other-layer", DENSE_FFN,
        other_layers((*FFN_STEMS, "ffn_gate_shexp", "ffn_up_shexp")), models=("llama", "stablelm"), others=SAME),
    bug("other layer: after attention", "weight-of-other-layer", ("attn_out",), other_layers(["attn_output"])),
    bug("other layer: experts", "weight-of-other-layer", EXPERTS, other_layers(EXPERT_STEMS), models=("moe",),
        others=SAME),
    bug("other layer: router", "weight-of-other-layer", ("ffn_moe_logits",), other_layers(["ffn_gate_inp"]),
        models=("moe",), others=SAME),
    bug("gate and up swapped", "gate-up-swapped", DENSE_FFN[:2], renamed(swapping("ffn_gate", "ffn_up")), models=DENSE,
        others=SAME),
    bug("gate and up swapped: experts", "gate-up-swapped", EXPERTS[:2],
        renamed(swapping("ffn_gate_exps", "ffn_up_exps")), models=("moe", "qwen3moe"), others=SAME),
    bug("K and V swapped", "weight-of-other-tensor", QKV[1:], renamed(swapping("attn_k", "attn_v")), models=DENSE,
        others=SAME),
    bug("Q and K swapped", "weight-of-other-tensor", QK, renamed(swapping("attn_q", "attn_k")), models=("qwen2",)),
    bug("Q and K swapped but for biases", "weight-of-other-tensor", QK, renamed(swapping("attn_q", "attn_k"), "matrix"),
        models=("qwen2",)),
    bug("Q for the output projection", "weight-of-other-tensor", ("attn_out",),
        renamed(lambda stem: "attn_q" if stem == "attn_output" else stem, "matrix"), models=("qwen3",), others=SAME),
    bug("gate for up", "gate-up-swapped", ("ffn_up",), renamed(lambda stem: "ffn_gate" if stem == "ffn_up" else stem)),
    bug("head tied", "head-tied", HEAD, renamed(lambda stem: "token_embd" if stem == "output" else stem, "matrix"),
        models=EVERY, others=SAME),
    bug("fused: K, Q, V", "qkv-split", QKV[:2], split_as("kqv"), models=("llama-fused", "llama-fused-bias"),
        others=SAME),
    bug("fused: V, K, Q", "qkv-split", QKV, split_as("vkq"), models=("llama-fused", "llama-fused-bias"), others=SAME),
    bug("fused: Q, V, K", "qkv-split", QKV[1:], split_as("qvk"), models=("llama-fused", "llama-fused-bias"),
        others=SAME),
    bug("fused: head by head", "qkv-split", QKV, {"split": head_by_head},
        models=("llama-fused", "llama-fused-bias", "qwen2-fused"), others=SAME),
    bug("Q, K to halves", "qk-permuted", QK, rows_permuted(QKV_STEMS[:2], to_halves), models=DENSE, needs=(OWN_PAIRS,),
        others=SAME),
    bug("Q, K to pairs", "qk-permuted", QK, rows_permuted(QKV_STEMS[:2], to_pairs), models=DENSE, needs=(OWN_PAIRS,),
        others=SAME),
    bug("Q to halves", "qk-permuted", Q, rows_permuted(QKV_STEMS[:1], to_halves), models=("llama",),
        needs=(OWN_PAIRS,)),
    bug("Q, K to pairs but for biases", "qk-permuted", QK, rows_permuted(QKV_STEMS[:2], to_pairs, bias=False),
        models=("qwen2",), needs=(OWN_PAIRS,)),
    bug("Q, K, V of the residual", "input-elsewhere", QKV, {"qkv": lambda e, right, x: right(e.layer_input())},
        models=EVERY),
    bug("FFN of the residual", "input-elsewhere", DENSE_FFN[:2],
        {"gate_up": lambda e, right, x: right(e.here("ffn_inp"))}),
    bug("FFN of attention's input", "input-elsewhere", DENSE_FFN[:2],
        {"gate_up": lambda e, right, x: right(e.here("attn_norm"))}, models=DENSE),
    bug("router of the residual", "input-elsewhere", ("ffn_moe_logits",),
        product_of("ffn_gate_inp", lambda e: e.between), models=("moe",), others=SAME),
    bug("output projection of Q", "input-elsewhere", ("attn_out",),
        product_of("attn_output", lambda e: e.here("Qcur_rope"))),
    bug("output projection of attention's input", "input-elsewhere", ("attn_out",),
        product_of("attn_output", lambda e: e.attended), others=SAME),
    bug("down of gate", "input-elsewhere", ("ffn_out",), product_of("ffn_down", lambda e: e.here("ffn_gate"))),
    bug("down of up", "input-elsewhere", ("ffn_out",), product_of("ffn_down", lambda e: e.here("ffn_up"))),
    bug("logits of the residual", "input-elsewhere", HEAD, head_of(lambda e, y: e.residual), models=DENSE, others=SAME),
    bug("no output projection", "product-missing", ("attn_out",), without_product("attn_output"), models=EVERY,
        others=SAME),
    bug("no down projection", "product-missing", ("ffn_out",), without_product("ffn_down"), models=("llama-narrow",)),
    bug("RoPE on V", "rope-on-v", V, models=(*DENSE, "stablelm"), others=SAME, Vcur_proj=rotated_v),
    bug("logits of the first token", "logits-of-other-row", HEAD,
        head_of(lambda e, y: np.repeat(y[:1], len(y), axis=0)), models=DENSE, others=SAME),
    bug("logits of the token before", "logits-of-other-row", HEAD, head_of(lambda e, y: row_before(y)), models=DENSE,
        others=SAME),
    bug("logits a row late", "logits-of-other-row", HEAD, head_of(lambda e, y: row_late(y))),
    bug("logits capped at 30", "logits-capped", HEAD, models=DENSE, others=SAME, result_output=capped(30.0)),
    bug("logits capped at 50", "logits-capped", HEAD, result_output=capped(50.0)),
    bug("logits capped at 8", "logits-capped", HEAD, others=SAME, result_output=capped(8.0)),
    bug("logits divided by 8", "product-multiplied", HEAD, models=EVERY, result_output=lambda e, x: x / 8),
    bug("Q scaled already", "product-multiplied", Q, times("attn_q", 1 / 8), models=DENSE, needs=(SCALE,), others=SAME),
    bug("output projection halved", "product-multiplied", ("attn_out",), others=SAME, attn_out=lambda e, x: x * 0.5),
    bug("down projection by 0.22", "product-multiplied", ("ffn_out",), times("ffn_down", 0.22), others=SAME),
    bug("experts doubled", "product-multiplied", ("ffn_moe_down",), models=("moe",), ffn_moe_down=lambda e, x: x * 2),
    bug("router negated", "product-multiplied", ("ffn_moe_logits",), models=("moe",), others=SAME,
        ffn_moe_logits=lambda e, x: -x),
    bug("activations: 8 bits a row", "activations-rounded", PRODUCTS, rounding(lambda x: eight(x, 0)), models=EVERY,
        says="8 bits, one scale a row"),
    bug("activations: 8 bits a block, float32 scale", "activations-rounded", PRODUCTS, rounding(lambda x: eight(x, 32)),
        kinds=("Q8_0",), says="Q8_0"),
    bug("activations: 8 bits for 256", "activations-rounded", PRODUCTS, rounding(lambda x: eight(x, 256)),
        kinds=("Q8_0",), says="8 bits, one float32 scale for 256"),
    bug("activations: 8 bits for 64", "activations-rounded", PRODUCTS, rounding(lambda x: eight(x, 64)),
        kinds=("Q8_0",), says="8 bits, one float32 scale for 64"),
    bug("activations: 8 bits, cut off", "activations-rounded", PRODUCTS, rounding(lambda x: eight(x, 32, np.trunc)),
        kinds=("Q8_0",), says="8 bits by truncation, one float32 scale for 32"),
    bug("activations: 8 bits and a zero point", "activations-rounded", PRODUCTS, rounding(eight_with_zero),
        kinds=("Q8_0",), says="8 bits, one scale and minimum a row"),
    bug("activations: 8 bits and a zero point for Q alone", "activations-rounded", Q,
        {"product": lambda e, right, x, stem: right(eight_with_zero(x) if stem == "attn_q" else x, stem)},
        says="rounds activations to 8 bits, one scale and minimum a row"),
    bug("weights in float16", "weights-rounded", PRODUCTS, {"loaded": lambda e, right, stem: half(right(stem))},
        models=DENSE, kinds=("Q8_0",), says="keeps its weights in F16"),
    bug("weights in bfloat16", "weights-rounded", PRODUCTS, {"loaded": lambda e, right, stem: bfloat(right(stem))},
        models=DENSE, says="keeps its weights in BF16"),
    elsewhere("bias: none in products", "bias-missing", biases_as(lambda b: None)),
    elsewhere("bias: none in the router", "bias-missing", bias_as(["ffn_gate_inp"], lambda b: None)),
    elsewhere("bias: none of experts", "bias-missing", bias_as(EXPERT_STEMS, lambda b: None)),
    elsewhere("bias: twice in every product", "bias-wrong", biases_as(lambda b: 2 * b)),
    elsewhere("bias: subtracted in every product", "bias-wrong", biases_as(lambda b: -b)),
    elsewhere("bias: other layer's in every product", "bias-wrong", {"bias": biases_of_other_layer}),
    elsewhere("bias: the next expert's", "bias-wrong", bias_as(EXPERT_STEMS, lambda b: np.roll(b, -1, axis=0))),
    elsewhere("transposed: state space", "weight-transposed", transposed(["ssm_out"])),
    elsewhere("transposed: latent", "weight-transposed", transposed(["attn_q_b"])),
    elsewhere("other layer: into attention", "weight-of-other-layer", other_layers(INTO, "matrix")),
    elsewhere("other layer: out of it", "weight-of-other-layer", other_layers(OUT_OF, "matrix")),
    elsewhere("gate and up swapped: shared expert", "gate-up-swapped weight-of-other-tensor",
              renamed(swapping("ffn_gate_shexp", "ffn_up_shexp"))),
    elsewhere("fused: K, V, Q", "qkv-split", split_as("kvq")),
    elsewhere("fused: V, Q, K", "qkv-split", split_as("vqk")),
    elsewhere("attention of the residual", "input-elsewhere", product_of(INTO, lambda e: e.residual)),
    elsewhere("FFN's products of the residual", "input-elsewhere",
              product_of(INTO_FFN, lambda e: e.residual if e.h.arch.parallel else e.between)),
    elsewhere("FFN's products of attention's input", "input-elsewhere", product_of(INTO_FFN, lambda e: e.attended)),
    elsewhere("state space's output halved", "product-multiplied", times("ssm_out", 0.5)),
    elsewhere("convolution's output halved", "product-multiplied", times("shortconv.out_proj", 0.5)),
)  # fmt: skip
