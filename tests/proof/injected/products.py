"""Products with weights go wrong: another weight, bias, input or row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from llamaref import Engine, ops

from proof.injected.base import (
    DENSE,
    EVERY,
    Build,
    Injection,
    altered,
    bias,
    product,
    round_bf16,
    round_f16,
    to_halves,
    to_pairs,
    with_linear,
)

QKV = ("Qcur_proj", "Kcur_proj", "Vcur_proj")
QK, Q, V = QKV[:2], QKV[:1], QKV[2:]
HEAD = ("result_output",)
EXPERTS = ("ffn_moe_gate", "ffn_moe_up", "ffn_moe_down")
DENSE_FFN = ("ffn_gate", "ffn_up", "ffn_out")
PRODUCTS = (*QKV, "attn_out", "ffn_moe_logits", *EXPERTS, *DENSE_FFN, *HEAD)
QKV_STEMS = ("attn_q", "attn_k", "attn_v")
FFN_STEMS = ("ffn_gate", "ffn_up", "ffn_down")
STEMS = (*QKV_STEMS, "attn_output", *FFN_STEMS, "ffn_gate_inp", "output")


def _renamed(change: Callable[[str, str], str], biases: bool = True) -> Build:
    """Products with the weight that change(prefix, stem) names, and with its bias or with the right one."""

    def fault(name: str) -> str:
        prefix, _, stem = name.rpartition(".")
        return change(prefix, stem) if prefix else name

    class Renamed(Engine):
        def linear(self, x: Any, name: str, tap: Any) -> Any:
            other = fault(name)
            return super().linear(x, other, tap) if biases else product(self, x, other) + bias(self, name)

        def experts(self, x: Any, name: str, chosen: Any, tap: Any) -> Any:
            return super().experts(x, fault(name), chosen, tap)

    return Renamed


def _swapped(one: str, other: str, biases: bool = True) -> Build:
    swap = {one: other, other: one}
    return _renamed(lambda prefix, stem: f"{prefix}.{swap.get(stem, stem)}", biases)


def _next_layer(*stems: str, biases: bool = True) -> Build:
    other = {"blk.0": "blk.1", "blk.1": "blk.0"}
    return _renamed(lambda prefix, stem: f"{other[prefix] if stem in stems else prefix}.{stem}", biases)


def _transposed(engine: Engine, x: Any, name: str) -> Any:
    n_out, n_in = engine.w.shape(f"{name}.weight")
    return x @ engine.w.whole(f"{name}.weight").reshape(n_in, n_out) + bias(engine, name)


def _bias(stems: Iterable[str], change: Callable[[Engine, str], Any]) -> Build:
    """Products with change(engine, name) for a bias."""
    return with_linear(stems, lambda m, x, name: product(m, x, name) + change(m, name))


def _other_layers_bias(engine: Engine, name: str) -> Any:
    return bias(engine, name.translate(str.maketrans("01", "10")))


def _bias_of(swap: dict[str, str]) -> Callable[[Engine, str], Any]:
    def change(engine: Engine, name: str) -> Any:
        prefix, _, stem = name.rpartition(".")
        return bias(engine, f"{prefix}.{swap[stem]}")

    return change


def _split(part: Callable[[Any, Any], tuple[Any, Any, Any]]) -> Build:
    """An engine that splits the fused product [b, t, (q, k, v)] into part(fused, config)."""

    class Split(Engine):
        def projections(self, x: Any, i: int, tap: Any) -> list[Any]:
            parts = part(self.linear(x, f"blk.{i}.attn_qkv", tap), self.config)
            return [y + bias(self, f"blk.{i}.{stem}") for y, stem in zip(parts, QKV_STEMS, strict=True)]

    return Split


def _in_order(order: str) -> Build:
    """Parts of the right sizes, taken from the fused product in another order."""

    def part(fused: Any, c: Any) -> tuple[Any, Any, Any]:
        sizes = {"q": c.n_head * c.head_k, "k": c.n_head_kv * c.head_k, "v": c.n_head_kv * c.head_v}
        parts = np.split(fused, np.cumsum([sizes[letter] for letter in order])[:-1], axis=-1)
        found = dict(zip(order, parts, strict=True))
        return found["q"], found["k"], found["v"]

    return _split(part)


def _head_by_head(fused: Any, c: Any) -> tuple[Any, Any, Any]:
    """Every KV head has its query heads, its key and its value side by side."""
    b, t, _ = fused.shape
    groups = fused.reshape(b, t, c.n_head_kv, -1, c.head_k)
    q, k, v = groups[..., :-2, :], groups[..., -2:-1, :], groups[..., -1:, :]
    return q.reshape(b, t, -1), k.reshape(b, t, -1), v.reshape(b, t, -1)


def _permuted(change: Callable[[Any], Any], stems: Iterable[str], with_bias: bool = True) -> Build:
    """Rows of W (and of the bias) permuted within each head."""

    def fault(engine: Engine, x: Any, name: str) -> Any:
        y, b = product(engine, x, name), bias(engine, name)
        heads = (*y.shape[:-1], -1, engine.config.head_k)
        y = y + b if with_bias else y
        y = change(y.reshape(heads)).reshape(y.shape)
        return y if with_bias else y + b

    return with_linear(stems, fault)


class _QkvOfResidual(Engine):
    """Q, K and V are made of what goes into the norm."""

    def norm(self, x: Any, name: str) -> Any:
        if name.endswith("attn_norm"):
            self.residual = x
        return super().norm(x, name)

    def layer_norm(self, x: Any, name: str) -> Any:
        if name.endswith("attn_norm"):
            self.residual = x
        return super().layer_norm(x, name)

    def qkv(self, x: Any, i: int, tap: Any) -> tuple[Any, Any, Any]:
        return super().qkv(self.residual, i, tap)


def _product_of(stem: str, word: str) -> Callable[[Any, Any], Any]:
    """The product with a weight of the layer, of another tap."""

    def fault(x: Any, run: Any) -> Any:
        name, source = f"blk.{run.layer}.{stem}", run.layer_input if word == "input" else run[word]
        source = source.reshape(*x.shape[:2], -1)
        return product(run.engine, source, name) + bias(run.engine, name)

    return fault


def _logits_of(row: Callable[[Any, Any], Any]) -> Build:
    """Logits of row(normalised rows [b, t, embd], run)."""
    return altered(result_output=lambda x, run: product(run.engine, row(run["result_norm"], run), "output"))


def _rope_on_v(x: Any, run: Any) -> Any:
    c = run.engine.config
    rotate = ops.rope_pairs if run.engine.config.traits.rope_pairs else ops.rope_halves
    cos, sin = ops.rope_angles(c.rope, np.arange(x.shape[1]))
    return rotate(x.reshape(*x.shape[:2], -1, c.head_v), cos, sin).reshape(x.shape)


def _capped(cap: float) -> Build:
    return altered(result_output=lambda x, run: cap * np.tanh(x / cap))


def _eight_bits(x: Any, block: int, to_whole: Callable[[Any], Any] = np.rint) -> Any:
    """Whole numbers up to 127 and a float32 scale for every ``block`` values (0: for a row)."""
    blocks = x.reshape(*x.shape[:-1], -1, block or x.shape[-1])
    scale = np.maximum(np.abs(blocks).max(axis=-1, keepdims=True), 1e-30) / 127
    return np.asarray(to_whole(blocks / scale) * scale, np.float32).reshape(x.shape)


def _with_zero_point(x: Any) -> Any:
    """256 steps from a row's least value to its greatest."""
    least, greatest = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    step = np.maximum((greatest - least) / 255, 1e-30)
    return np.asarray(np.rint((x - least) / step) * step + least, np.float32)


def _scales(ignored: str) -> Build:
    class Unscaled(Engine):
        def scale(self, name: str) -> Any:
            return None if ignored in name else super().scale(name)

    return Unscaled


def _activations(rounded: Callable[[Any], Any]) -> Build:
    return with_linear(STEMS, lambda m, x, name: product(m, rounded(x), name) + bias(m, name))


def _weights(rounded: Callable[[Any], Any]) -> Build:
    def fault(engine: Engine, x: Any, name: str) -> Any:
        w = f"{name}.weight"
        return engine.w.product(w, x, decode=lambda rows: rounded(engine.w.decode_rows(w, rows))) + bias(engine, name)

    return with_linear(STEMS, fault)


def _times(word: str, factor: float) -> Build:
    return altered(**{word: lambda x, run: x * np.float32(factor)})


INJECTIONS = (
    Injection("bias: none on Q, K, V", "bias-missing", QKV,
              _bias(QKV_STEMS, lambda m, n: 0), ("qwen2", "llama-biased")),
    Injection("scale: ignored in attention", "weight-scale-ignored", ("attn_out",), _scales(".attn_"),
              ("llama-scaled",)),
    Injection("scale: ignored in the FFN", "weight-scale-ignored", DENSE_FFN, _scales(".ffn_"), ("llama-scaled",)),
    Injection("bias: none on V", "bias-missing", V, _bias(["attn_v"], lambda m, n: 0), ("qwen2",)),
    Injection("bias: none after attention", "bias-missing", ("attn_out",),
              _bias(["attn_output"], lambda m, n: 0), ("llama-biased",)),
    Injection("bias: none in the FFN", "bias-missing", DENSE_FFN, _bias(FFN_STEMS, lambda m, n: 0), ("llama-biased",)),
    Injection("bias: none on the head", "bias-missing", HEAD, _bias(["output"], lambda m, n: 0),
              ("qwen2-head-biased",)),
    Injection("bias: twice", "bias-wrong", QKV, _bias(QKV_STEMS, lambda m, n: 2 * bias(m, n)), ("qwen2",)),
    Injection("bias: subtracted", "bias-wrong", QKV, _bias(QKV_STEMS, lambda m, n: -bias(m, n)), ("qwen2",)),
    Injection("bias: K's and V's swapped", "bias-wrong", QKV[1:],
              _bias(QKV_STEMS[1:], _bias_of({"attn_k": "attn_v", "attn_v": "attn_k"})), ("qwen2", "llama-biased")),
    Injection("bias: other layer's", "bias-wrong", QKV, _bias(QKV_STEMS, _other_layers_bias), ("qwen2",)),
    Injection("bias: twice in the FFN", "bias-wrong", DENSE_FFN,
              _bias(FFN_STEMS, lambda m, n: 2 * bias(m, n)), ("llama-biased",)),
    Injection("transposed: all", "weight-transposed", PRODUCTS, with_linear(STEMS, _transposed), DENSE),
    Injection("transposed: after attention", "weight-transposed", ("attn_out",),
              with_linear(["attn_output"], _transposed), DENSE),
    Injection("transposed: down", "weight-transposed", ("ffn_out",), with_linear(["ffn_down"], _transposed)),
    Injection("transposed: router", "weight-transposed", ("ffn_moe_logits",),
              with_linear(["ffn_gate_inp"], _transposed), ("moe",)),
    Injection("transposed: head", "weight-transposed", HEAD, with_linear(["output"], _transposed)),
    Injection("other layer: Q, K, V", "weight-of-other-layer", QKV, _next_layer(*QKV_STEMS), DENSE),
    Injection("other layer: Q, K, V but for biases", "weight-of-other-layer", QKV,
              _next_layer(*QKV_STEMS, biases=False), ("qwen2",)),
    Injection("other layer: FFN", "weight-of-other-layer", DENSE_FFN, _next_layer(*FFN_STEMS), ("llama", "stablelm")),
    Injection("other layer: after attention", "weight-of-other-layer", ("attn_out",), _next_layer("attn_output")),
    Injection("other layer: experts", "weight-of-other-layer", EXPERTS,
              _next_layer("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), ("moe",)),
    Injection("other layer: router", "weight-of-other-layer", ("ffn_moe_logits",),
              _next_layer("ffn_gate_inp"), ("moe",)),
    Injection("gate and up swapped", "gate-up-swapped", DENSE_FFN[:2], _swapped("ffn_gate", "ffn_up"), DENSE),
    Injection("gate and up swapped: experts", "gate-up-swapped", EXPERTS[:2],
              _swapped("ffn_gate_exps", "ffn_up_exps"), ("moe", "qwen3moe")),
    Injection("K and V swapped", "weight-of-other-tensor", QKV[1:], _swapped("attn_k", "attn_v"), DENSE),
    Injection("Q and K swapped", "weight-of-other-tensor", QK, _swapped("attn_q", "attn_k"), ("qwen2",)),
    Injection("Q and K swapped but for biases", "weight-of-other-tensor", QK,
              _swapped("attn_q", "attn_k", biases=False), ("qwen2",)),
    Injection("Q for the output projection", "weight-of-other-tensor", ("attn_out",),
              _renamed(lambda prefix, stem: f"{prefix}.{'attn_q' if stem == 'attn_output' else stem}"), ("qwen3",)),
    Injection("gate for up", "gate-up-swapped", ("ffn_up",),
              _renamed(lambda prefix, stem: f"{prefix}.{'ffn_gate' if stem == 'ffn_up' else stem}")),
    Injection("head tied", "head-tied", HEAD,
              with_linear(["output"], lambda m, x, name: product(m, x, "token_embd")), EVERY),
    Injection("fused: K, Q, V", "qkv-split", QKV[:2], _in_order("kqv"), ("llama-fused", "llama-fused-bias")),
    Injection("fused: V, K, Q", "qkv-split", QKV, _in_order("vkq"), ("llama-fused", "llama-fused-bias")),
    Injection("fused: Q, V, K", "qkv-split", QKV[1:], _in_order("qvk"), ("llama-fused", "llama-fused-bias")),
    Injection("fused: head by head", "qkv-split", QKV, _split(_head_by_head),
              ("llama-fused", "llama-fused-bias", "qwen2-fused")),
    Injection("Q, K to halves", "qk-permuted", QK, _permuted(to_halves, QKV_STEMS[:2]), DENSE),
    Injection("Q, K to pairs", "qk-permuted", QK, _permuted(to_pairs, QKV_STEMS[:2]), DENSE),
    Injection("Q to halves", "qk-permuted", Q, _permuted(to_halves, QKV_STEMS[:1]), ("llama",)),
    Injection("Q, K to pairs but for biases", "qk-permuted", QK,
              _permuted(to_pairs, QKV_STEMS[:2], with_bias=False), ("qwen2",)),
    Injection("Q, K, V of the residual", "input-elsewhere", QKV, _QkvOfResidual, EVERY),
    Injection("FFN of the residual", "input-elsewhere", DENSE_FFN[:2],
              altered(ffn_gate=_product_of("ffn_gate", "ffn_inp"), ffn_up=_product_of("ffn_up", "ffn_inp"))),
    Injection("FFN of attention's input", "input-elsewhere", DENSE_FFN[:2],
              altered(ffn_gate=_product_of("ffn_gate", "attn_norm"), ffn_up=_product_of("ffn_up", "attn_norm")), DENSE),
    Injection("router of the residual", "input-elsewhere", ("ffn_moe_logits",),
              altered(ffn_moe_logits=_product_of("ffn_gate_inp", "ffn_inp")), ("moe",)),
    Injection("output projection of Q", "input-elsewhere", ("attn_out",),
              altered(attn_out=_product_of("attn_output", "Qcur_rope"))),
    Injection("output projection of attention's input", "input-elsewhere", ("attn_out",),
              altered(attn_out=_product_of("attn_output", "attn_norm"))),
    Injection("down of gate", "input-elsewhere", ("ffn_out",), altered(ffn_out=_product_of("ffn_down", "ffn_gate"))),
    Injection("down of up", "input-elsewhere", ("ffn_out",), altered(ffn_out=_product_of("ffn_down", "ffn_up"))),
    Injection("logits of the residual", "input-elsewhere", HEAD, _logits_of(lambda x, run: run.seen["l_out-1"]), DENSE),
    Injection("no output projection", "product-missing", ("attn_out",),
              altered(attn_out=lambda x, run: run["kqv_out"]), EVERY),
    Injection("no down projection", "product-missing", ("ffn_out",),
              altered(ffn_out=lambda x, run: run["ffn_swiglu"]), ("llama-narrow",)),
    Injection("RoPE on V", "rope-on-v", V, altered(Vcur_proj=_rope_on_v), (*DENSE, "stablelm")),
    Injection("logits of the first token", "logits-of-other-row", HEAD,
              _logits_of(lambda x, run: np.repeat(x[:, :1], x.shape[1], axis=1)), DENSE),
    Injection("logits of the token before", "logits-of-other-row", HEAD,
              _logits_of(lambda x, run: x[:, np.maximum(np.arange(x.shape[1]) - 1, 0)]), DENSE),
    Injection("logits a row late", "logits-of-other-row", HEAD,
              _logits_of(lambda x, run: np.concatenate([np.zeros_like(x[:, :1]), x[:, :-1]], axis=1))),
    Injection("logits capped at 30", "logits-capped", HEAD, _capped(30.0), DENSE),
    Injection("logits capped at 50", "logits-capped", HEAD, _capped(50.0)),
    Injection("logits capped at 8", "logits-capped", HEAD, _capped(8.0)),
    Injection("logits divided by 8", "product-multiplied", HEAD, _times("result_output", 1 / 8), EVERY),
    Injection("Q scaled already", "product-multiplied", Q, _times("Qcur_proj", 1 / 8), DENSE),
    Injection("output projection halved", "product-multiplied", ("attn_out",), _times("attn_out", 0.5)),
    Injection("down projection by 0.22", "product-multiplied", ("ffn_out",), _times("ffn_out", 0.22)),
    Injection("experts doubled", "product-multiplied", ("ffn_moe_down",), _times("ffn_moe_down", 2.0), ("moe",)),
    Injection("router negated", "product-multiplied", ("ffn_moe_logits",), _times("ffn_moe_logits", -1.0), ("moe",)),
    Injection("activations: 8 bits a row", "activations-rounded", PRODUCTS,
              _activations(lambda x: _eight_bits(x, 0)), EVERY, says="8 bits, one scale a row"),
    Injection("activations: 8 bits a block, float32 scale", "activations-rounded", PRODUCTS,
              _activations(lambda x: _eight_bits(x, 32)), kinds=("Q8_0",), says="Q8_0"),
    Injection("activations: 8 bits for 256", "activations-rounded", PRODUCTS,
              _activations(lambda x: _eight_bits(x, 256)), kinds=("Q8_0",), says="8 bits, one float32 scale for 256"),
    Injection("activations: 8 bits for 64", "activations-rounded", PRODUCTS,
              _activations(lambda x: _eight_bits(x, 64)), kinds=("Q8_0",), says="8 bits, one float32 scale for 64"),
    Injection("activations: 8 bits, cut off", "activations-rounded", PRODUCTS,
              _activations(lambda x: _eight_bits(x, 32, np.trunc)), kinds=("Q8_0",),
              says="8 bits by truncation, one float32 scale for 32"),
    Injection("activations: 8 bits and a zero point", "activations-rounded", PRODUCTS,
              _activations(_with_zero_point), kinds=("Q8_0",), says="8 bits, one scale and minimum a row"),
    Injection("activations: 8 bits and a zero point for Q alone", "activations-rounded", Q,
              with_linear(("attn_q",), lambda m, x, name: product(m, _with_zero_point(x), name) + bias(m, name)),
              says="rounds activations to 8 bits, one scale and minimum a row"),
    Injection("weights in float16", "weights-rounded", PRODUCTS, _weights(round_f16), DENSE, ("Q8_0",),
              says="keeps its weights in F16"),
    Injection("weights in bfloat16", "weights-rounded", PRODUCTS, _weights(round_bf16), DENSE,
              says="keeps its weights in BF16"),
)  # fmt: skip
