"""Products with weights, and how people get them wrong: another matrix, another reading of it, another input."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from llamaref import ops
from numpy.typing import NDArray

from llamadiff.diagnose.bugs.norms import Same, Through
from llamadiff.diagnose.case import Case, NotRecordedError
from llamadiff.diagnose.registry import Change, bug, recipe
from llamadiff.diagnose.solve import solve
from llamadiff.diagnose.sought import FACTOR, LOGIT_CAP

Array = NDArray[Any]
QKV = ("Qcur_proj", "Kcur_proj", "Vcur_proj")
DENSE = (*QKV, "attn_out", "ffn_moe_logits", "ffn_gate", "ffn_up", "ffn_out", "result_output")
EXPERTS = ("ffn_moe_gate", "ffn_moe_up", "ffn_moe_down")
PRODUCTS = (*DENSE, *EXPERTS)


@dataclass(frozen=True)
class Product:
    """``x`` [b, token, in] by the rows of a weight matrix, as they are decoded, plus a bias.

    ``rows`` of the matrix make the result's channels; ``decode`` reads them otherwise than their type says; ``chosen``
    [b, token, used] numbers the experts of each token. ``transposed``: the matrix was taken for [in, out].
    """

    x: Array
    name: str
    rows: Array | None = None
    bias: Array | None = None
    scale: Array | None = None
    decode: Callable[[Array], Array] | None = None
    chosen: Array | None = None
    transposed: bool = False
    factor: float = 1.0

    def compute(self, case: Case) -> Array:
        w = case.engine.w
        kind = w.type(self.name)
        if self.chosen is not None:
            return self._experts(case, self.chosen, kind)
        x, *sums = case.carrier.operands(kind, self.x)
        rows = self._rows(case)
        if self.transposed:
            n_out, n_in = w.shape(self.name)
            y = x @ w.whole(self.name).reshape(n_in, n_out)[:, rows]
        else:
            y = w.product(self.name, x, *sums, rows=rows, decode=self.decode)
        return self._finished(case, y)

    def _rows(self, case: Case) -> Any:
        """Which rows of the matrix are multiplied: this op's, and of them those that are looked at."""
        if self.rows is None:
            return slice(None) if case.channels is None else case.channels
        return self.rows if case.channels is None else self.rows[case.channels]

    def _finished(self, case: Case, y: Array) -> Array:
        """Scale before the bias in attention, after it in the FFN (llama.cpp, llama-graph.cpp)."""
        bias = self.bias if self.bias is None or case.channels is None else self.bias[case.channels]
        late = ".ffn_" in self.name
        y = y + bias if bias is not None and late else y
        y = y * self.scale if self.scale is not None else y
        y = y + bias if bias is not None and not late else y
        return y * y.dtype.type(self.factor) if self.factor != 1.0 else y

    def _experts(self, case: Case, chosen: Array, kind: str) -> Array:
        ways = len(case.carrier.ways)
        chosen = np.broadcast_to(chosen, (ways, *chosen.shape[1:]))
        x = np.broadcast_to(self.x, (ways, *chosen.shape[1:], self.x.shape[-1]))
        x, *sums = case.carrier.operands(kind, x)
        out = case.engine.w.experts(self.name, x, chosen, *sums, rows=self._rows(case), decode=self.decode)
        out = out if self.scale is None else out * self.scale[chosen][..., None]
        return out * out.dtype.type(self.factor) if self.factor != 1.0 else out


@recipe(*DENSE)
def dense(case: Case) -> Any:
    """The product of a tap."""
    if case.tap.kind.word == "ffn_out" and case.weight is not None and case.weight.endswith("_exps.weight"):
        return mixture(case)
    assert case.weight is not None
    stem = case.weight.removesuffix(".weight")
    rows, bias = _fused(case) if stem.endswith("attn_qkv") else (None, case.vector(f"{stem}.bias"))
    return Product(case.tap_input(), case.weight, rows, bias, case.engine.scale(stem))


@recipe(*EXPERTS)
def experts(case: Case) -> Product:
    """The chosen experts' products."""
    assert case.weight is not None
    x = case["ffn_moe_swiglu"] if case.tap.kind.word == "ffn_moe_down" else case["ffn_norm"][..., None, :]
    scale = case.engine.scale(case.weight.removesuffix(".weight"))
    return Product(x, case.weight, scale=scale, chosen=case["ffn_moe_topk"])


def _segments(case: Case) -> dict[str, int]:
    c = case.config
    return {"Q": c.n_head * c.head_k, "K": c.n_head_kv * c.head_k, "V": c.n_head_kv * c.head_v}


def _fused(case: Case) -> tuple[Array, Array | None]:
    """Rows of the fused matrix that are this tap's, and its part of the bias."""
    part, start = case.tap.kind.word[0], 0
    for name, size in _segments(case).items():
        if name == part:
            rows = np.arange(start, start + size)
        start += size
    whole = case.vector(f"blk.{case.layer}.attn_qkv.bias")
    own = case.vector(f"blk.{case.layer}.attn_{part.lower()}.bias")
    return rows, whole[rows] if whole is not None else own


@bug(*DENSE, fix="add the bias", source="ANEForge#253, candle-vllm#167")
def bias_missing(r: Product, case: Case) -> Iterator[Change]:
    """The bias is left out."""
    if r.bias is not None:
        yield Change(replace(r, bias=None), "leaves out the bias")


@bug(*PRODUCTS, fix="multiply by the tensor's .scale where the file has one")
def weight_scale_ignored(r: Product, case: Case) -> Iterator[Change]:
    """The weight's own scale (a tensor of its name with .scale) is ignored."""
    if r.scale is not None:
        yield Change(replace(r, scale=None), f"ignores {r.name.replace('.weight', '.scale')}")


@bug(*DENSE, fix="add the bias once, this product's own")
def bias_wrong(r: Product, case: Case) -> Iterator[Change]:
    """The bias is added twice, subtracted, or another one."""
    if r.bias is None:
        return
    yield Change(replace(r, bias=2 * r.bias), "adds the bias twice", "twice")
    yield Change(replace(r, bias=-r.bias), "subtracts the bias", "minus")
    w = case.engine.w
    for name in case.run.model.tensors:
        if name.endswith(".bias") and w.shape(name) == r.bias.shape:
            yield Change(replace(r, bias=case.vector(name)), f"adds {name}", _relative(name, case))


@bug(*DENSE, fix="weights are [out, in], in neighbours: multiply by the transpose", source="aprender#155, aprender#188")
def weight_transposed(r: Product, case: Case) -> Iterator[Change]:
    """The weight is read as if it were stored [in, out]."""
    yield Change(replace(r, transposed=True), f"reads {r.name} transposed, as [in, out]")


@bug(*PRODUCTS, fix="take this layer's own weight")
def weight_of_other_layer(r: Product, case: Case) -> Iterator[Change]:
    """Another layer's weight is used."""
    if case.tap.layer is None:
        return
    stem = r.name.split(".", 2)[2]
    for layer in range(case.run.model.n_layer):
        name = f"blk.{layer}.{stem}"
        if layer != case.layer and name in case.engine.w and _same_shape(case, name, r.name):
            changed, says = replace(r, name=name), f"multiplies by {name}"
            bias = _bias_of(case, name, r) if r.bias is not None else None
            yield Change(replace(changed, bias=bias if bias is not None else r.bias), says, f"{layer - case.layer:+d}")
            if r.bias is not None:
                yield Change(changed, f"{says}, but adds its own bias", f"{layer - case.layer:+d} own bias")


def _bias_of(case: Case, name: str, r: Product) -> Array | None:
    """The bias that goes with another weight of the same shape; of a fused one this op's part."""
    bias = case.vector(name.replace(".weight", ".bias"))
    return bias if bias is None or r.rows is None else bias[r.rows]


def _same_shape(case: Case, a: str, b: str) -> bool:
    return case.engine.w.shape(a) == case.engine.w.shape(b)


@bug(
    "ffn_gate",
    "ffn_up",
    "ffn_moe_gate",
    "ffn_moe_up",
    fix="ffn_gate goes through the activation, ffn_up multiplies it",
    source="nntrainer#4194, mlx-lm#767",
)
def gate_up_swapped(r: Product, case: Case) -> Iterator[Change]:
    """Gate and up are swapped, or taken by turns from a matrix that has one after the other."""
    other = r.name.replace("ffn_gate", "ffn_up") if "ffn_gate" in r.name else r.name.replace("ffn_up", "ffn_gate")
    if other in case.engine.w and _same_shape(case, other, r.name):
        bias = case.vector(other.replace(".weight", ".bias"))
        yield Change(replace(r, name=other, bias=bias), f"multiplies by {other}: gate and up are swapped")


@bug(*DENSE, fix="multiply by the tensor of this name")
def weight_of_other_tensor(r: Product, case: Case) -> Iterator[Change]:
    """Another tensor of the same layer and shape is used."""
    swapped = {"ffn_gate": "ffn_up", "ffn_up": "ffn_gate"}.get(case.tap.kind.weight or "")
    prefix = "" if case.tap.layer is None else f"blk.{case.layer}."
    for name in case.run.model.tensors:
        same = name.startswith(prefix) and name != r.name and name.endswith(".weight")
        if same and (prefix or not name.startswith("blk.")) and _same_shape(case, name, r.name):
            if name.split(".")[-2] == swapped or name == "token_embd.weight":
                continue
            bias = _bias_of(case, name, r)
            if bias is not None or r.bias is None:
                yield Change(replace(r, name=name, bias=bias), f"multiplies by {name}", _relative(name, case))
            yield Change(replace(r, name=name), f"multiplies by {name}", _relative(name, case) + " own bias")


def _relative(name: str, case: Case) -> str:
    return name.replace(f"blk.{case.tap.layer}.", "")


@bug("result_output", fix="multiply by output.weight where the file has it", source="1bit-MONSTER#319")
def head_tied(r: Product, case: Case) -> Iterator[Change]:
    """The head is taken from the embedding although the file has one of its own."""
    if r.name == "output.weight" and _same_shape(case, "token_embd.weight", r.name):
        yield Change(
            replace(r, name="token_embd.weight"), "multiplies by token_embd.weight; the file has output.weight"
        )


@bug(*QKV, fix="split the fused matrix into Q, K, V in this order", source="mlxcel#928, transformers#31844")
def qkv_split(r: Product, case: Case) -> Iterator[Change]:
    """The fused QKV matrix is split in the wrong order, or head by head."""
    if r.rows is None:
        return
    sizes, part = _segments(case), case.tap.kind.word[0]
    for order in itertools.permutations(sizes):
        start = sum(sizes[name] for name in order[: order.index(part)])
        rows = np.arange(start, start + sizes[part])
        if not np.array_equal(rows, r.rows):
            yield Change(
                _with_rows(r, rows, case), f"is split from the fused matrix as {', '.join(order)}", "".join(order)
            )
    c = case.config
    group, d = c.n_head // c.n_head_kv, c.head_k
    blocks = np.arange(sum(sizes.values())).reshape(c.n_head_kv, group + 2, d)
    mine = {"Q": blocks[:, :group], "K": blocks[:, group : group + 1], "V": blocks[:, group + 1 :]}[part]
    says = "is split from the fused matrix head by head ([head, qkv, dim])"
    yield Change(_with_rows(r, mine.reshape(-1), case), says, "interleaved")


def _with_rows(r: Product, rows: Array, case: Case) -> Product:
    whole = case.vector(f"blk.{case.layer}.attn_qkv.bias")
    return replace(r, rows=rows, bias=whole[rows] if whole is not None else r.bias)


@bug(
    "Qcur_proj",
    "Kcur_proj",
    fix="leave Q's and K's rows as they are; permute them only if RoPE then rotates halves",
    source="TinyLlama#24, llama.cpp#22611",
)
def qk_permuted(r: Product, case: Case) -> Iterator[Change]:
    """The rows of Q or K are permuted within each head: between GGUF's order (pairs) and Hugging Face's (halves)."""
    from llamadiff.diagnose.bugs.rope import reordered

    n, d = case.run.shapes[case.tap.name][-1], case.config.head_k
    for to_halves in (True, False):
        order = reordered(np.arange(n).reshape(-1, d), to_halves).reshape(-1)
        rows = order if r.rows is None else r.rows[order]
        bias = None if r.bias is None else r.bias[order]
        way = "Hugging Face's order (halves)" if to_halves else "GGUF's order (pairs)"
        says = f"has the rows of each head permuted into {way}; right only if RoPE rotates that layout"
        yield Change(replace(r, rows=rows, bias=bias), says, str(to_halves))
        if r.bias is not None:
            yield Change(replace(r, rows=rows), f"{says}; the bias is not permuted", f"{to_halves} bias")


_INPUTS = {
    "Qcur_proj": ("prev",), "Kcur_proj": ("prev",), "Vcur_proj": ("prev",),
    "ffn_gate": ("ffn_inp", "attn_norm", "attn_out"), "ffn_up": ("ffn_inp", "attn_norm", "attn_out"),
    "ffn_moe_logits": ("ffn_inp", "attn_norm"),
    "ffn_out": ("ffn_gate", "ffn_up"), "attn_out": ("attn_norm", "Qcur_proj", "Qcur_rope"), "result_output": ("prev",),
}  # fmt: skip


@bug(*DENSE, fix="multiply the op's own input: what comes out of the norm before it")
def input_elsewhere(r: Product, case: Case) -> Iterator[Change]:
    """The product is taken of another tensor: of the residual instead of its norm, for one."""
    for word in _INPUTS.get(case.tap.kind.word, ()):
        try:
            x = case.before() if word == "prev" else case[word]
            x = x.reshape(*x.shape[:2], -1)
        except NotRecordedError:
            continue
        if x.shape[-1] == r.x.shape[-1]:
            name = "what comes in before the norm" if word in ("prev", "ffn_inp") else f"{word}-{case.tap.layer}"
            yield Change(replace(r, x=x), f"multiplies {name}", word)


@bug("attn_out", "ffn_out", fix="multiply by the weight")
def product_missing(r: Product, case: Case) -> Iterator[Change]:
    """The product is left out: its input goes on."""
    if r.x.shape[-1] == case.run.shapes[case.tap.name][-1]:
        yield Change(Same(r.x), "is left out: its input comes out")


@bug("Vcur_proj", fix="rotate Q and K alone")
def rope_on_v(r: Product, case: Case) -> Iterator[Change]:
    """RoPE is applied to V as well."""
    yield Change(RotatedValues(r), "is rotated by RoPE, as only Q and K should be")


@dataclass(frozen=True)
class RotatedValues:
    """V after RoPE."""

    product: Product

    def compute(self, case: Case) -> Array:
        from llamadiff.diagnose.bugs.rope import rope_on

        whole = self.product.compute(replace(case, channels=None))
        heads = whole.reshape(*whole.shape[:2], -1, case.config.head_v)
        rotated = rope_on(case, heads).compute(case).reshape(whole.shape)
        return rotated if case.channels is None else rotated[..., case.channels]


@bug("result_output", fix="take the logits of the last token's row", source="llama.cpp#2700")
def logits_of_other_row(r: Product, case: Case) -> Iterator[Change]:
    """Logits are another token's: the first's, or the one's before."""
    n = len(case.run.tokens)
    if n > 1:
        for whose, order in other_rows(n).items():
            yield Change(Through(r, partial(np.take, indices=order, axis=1)), f"gives the logits of {whose}", whose)
        yield Change(Through(r, _late), "gives the logits of the token before, and none for the first", "late")


def other_rows(n: int) -> dict[str, Array]:
    """Whose logits people give instead of each of n tokens' -> those tokens."""
    return {
        "the token before": np.maximum(np.arange(n) - 1, 0), "the token after": np.minimum(np.arange(n) + 1, n - 1),
        "the first token": np.zeros(n, int), "the last token but one": np.append(np.arange(n - 1), n - 2),
    }  # fmt: skip


def _late(x: Array) -> Array:
    """Rows [b, token, ...] of the token before; none for the first."""
    return np.concatenate([np.zeros_like(x[:, :1]), x[:, :-1]], axis=1)


def _capped(r: Product, cap: float) -> Through:
    """A product, softly capped."""
    return Through(r, lambda x: np.asarray(cap * np.tanh(x / cap), x.dtype))


@bug("result_output", general=True, fix="leave the logits as they are: this model has no softcap", source="vllm#30427")
def logits_capped(r: Product, case: Case) -> Iterator[Change]:
    """Logits are softly capped in a model without a softcap."""
    for value in solve(case, partial(_capped, r), LOGIT_CAP):
        yield Change(_capped(r, value), LOGIT_CAP.says(value, 0.0), value=value)


@bug(*PRODUCTS, general=True, fix="leave out the multiplier: the file asks for none")
def product_multiplied(r: Product, case: Case) -> Iterator[Change]:
    """The result is multiplied by a constant."""
    if case.recorded is None:
        return
    right = r.compute(case)[0].astype(np.float64)
    found = case.recorded.reshape(case.run.shapes[case.tap.name]).astype(np.float64)
    found = found if case.channels is None else found[..., case.channels]
    good = np.isfinite(found)
    factor = float(right[good] @ found[good]) / max(float(right[good] @ right[good]), 1e-300)
    yield Change(replace(r, factor=factor), FACTOR.says(factor, 1.0), value=factor)


@dataclass(frozen=True)
class Mixture:
    """The experts' weighted sum: [b, token, used, embd], [b, token, used]."""

    experts: Array
    weights: Array

    def compute(self, case: Case) -> Array:
        return ops.weighted_sum(self.experts, self.weights)


def mixture(case: Case) -> Mixture:
    """The FFN's output."""
    return Mixture(case["ffn_moe_down"], case["ffn_moe_weights_norm"])
