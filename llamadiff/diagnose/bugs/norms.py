"""Norms, and how people get them wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from llamaref import ops
from numpy.typing import NDArray

from llamadiff.diagnose.case import Case
from llamadiff.diagnose.registry import Change, Recipe, bug, recipe
from llamadiff.diagnose.solve import solve
from llamadiff.diagnose.sought import EPSILON
from llamadiff.numerics.arithmetic import ROUNDINGS
from llamadiff.numerics.types import HALVES

Array = NDArray[Any]
QK = ("Qcur_normed", "Kcur_normed")
NORMS = ("attn_norm", "ffn_norm", "result_norm", *QK)
OVERFLOW = 65504.0  # float16's largest


@dataclass(frozen=True)
class Same:
    """An op that was left out: its input, or any other values, in its place."""

    x: Array

    def compute(self, case: Case) -> Array:
        return self.x


@dataclass(frozen=True)
class Through:
    """Another recipe's result, and a function that it goes through."""

    recipe: Recipe
    function: Callable[[Array], Array]

    def compute(self, case: Case) -> Array:
        return self.function(self.recipe.compute(case))


@dataclass(frozen=True)
class Norm:
    """RMSNorm or (``centred``) LayerNorm over the last axis of ``x`` [b, token, ...].

    ``outside``: epsilon is added to the root instead of inside it; ``root``: whether there is one; ``half``: the sum of
    squares is rounded to float16.
    """

    x: Array
    weight: Array
    bias: Array | None
    eps: float
    centred: bool
    outside: bool = False
    root: bool = True
    half: bool = False

    def compute(self, case: Case) -> Array:
        if self.outside or self.half or not self.root:
            return self._unusual()
        if self.centred:
            return ops.layer_norm(self.x, self.weight, self.bias, self.eps)
        y = ops.rms_norm(self.x, self.weight, self.eps)
        return y if self.bias is None else y + self.bias

    def _unusual(self) -> Array:
        wide = self.x.astype(np.float64)
        wide = wide - wide.mean(axis=-1, keepdims=True) if self.centred else wide
        square = np.mean(wide * wide, axis=-1, keepdims=True)
        square = np.float16(square * wide.shape[-1]) / np.float64(wide.shape[-1]) if self.half else square
        if self.outside:
            size = np.sqrt(square) + self.eps
        else:
            size = np.sqrt(square + self.eps) if self.root else square + self.eps
        return np.asarray(wide / size * self.weight + (0.0 if self.bias is None else self.bias), self.x.dtype)


@recipe(*NORMS)
def norm(case: Case) -> Norm:
    """The norm of a tap, as the model has it."""
    assert case.weight is not None
    weight = case.vector(case.weight)
    assert weight is not None
    x = _input(case)
    centred = case.tap.kind.op == "NORM"
    bias = case.vector(case.weight.replace(".weight", ".bias")) if centred else None
    eps = case.config.norm_eps if centred else case.config.rms_eps
    return Norm(x, weight if weight.size == x.shape[-1] else weight.reshape(x.shape[-2:]), bias, eps, centred)


def _input(case: Case) -> Array:
    word = case.tap.kind.word
    if word in QK:
        x = case[word.replace("_normed", "_proj")]
        return x.reshape(*x.shape[:2], -1, case.config.head_k)
    return case["ffn_inp"] if word == "ffn_norm" else case.before()


@bug(
    *NORMS, general=True, fix="read attention.layer_norm_rms_epsilon from the file", source="llama.cpp#2373, candle#271"
)
def norm_epsilon(r: Norm, case: Case) -> Iterator[Change]:
    """The norm's epsilon is not the file's."""
    for value in solve(case, lambda eps: replace(r, eps=eps), EPSILON):
        yield Change(replace(r, eps=value), EPSILON.says(value, r.eps), value=value)


@bug(*NORMS, fix="add epsilon to the mean square, before the root is taken")
def norm_epsilon_outside(r: Norm, case: Case) -> Iterator[Change]:
    """Epsilon is added outside the square root."""
    yield Change(replace(r, outside=True), f"adds epsilon ({r.eps:.3g}) outside the square root")


@bug(*NORMS, fix="give the norm the file's epsilon")
def norm_epsilon_missing(r: Norm, case: Case) -> Iterator[Change]:
    """The norm has no epsilon."""
    yield Change(replace(r, eps=0.0), f"adds no epsilon; the file says {r.eps:.3g}")


@bug(*NORMS, fix="multiply by the norm's weight", source="rustorch")
def norm_weight_missing(r: Norm, case: Case) -> Iterator[Change]:
    """The norm's weight is not applied."""
    yield Change(replace(r, weight=np.ones_like(r.weight)), f"is not multiplied by {case.weight}")


@bug(*NORMS, fix="multiply by the norm's weight once", source="rustorch")
def norm_weight_twice(r: Norm, case: Case) -> Iterator[Change]:
    """The norm's weight is applied twice."""
    yield Change(replace(r, weight=r.weight * r.weight), f"is multiplied by {case.weight} twice")


@bug(
    *NORMS,
    fix="leave out the + 1: GGUF files of Gemma have it in the weight already",
    source="mold#1078, vllm#31464, transformers#35708",
)
def norm_weight_plus_one(r: Norm, case: Case) -> Iterator[Change]:
    """One is added to the norm's weight, as Gemma's Hugging Face checkpoints need and GGUF files do not."""
    yield Change(
        replace(r, weight=r.weight + 1), f"multiplies by 1 + {case.weight}; the file's weight is used as it is"
    )


@bug(*NORMS, fix="use the norm's weight as it is in the file", source="mold#1078, vllm#31464, transformers#35708")
def norm_weight_minus_one(r: Norm, case: Case) -> Iterator[Change]:
    """One is taken off the norm's weight."""
    yield Change(
        replace(r, weight=r.weight - 1), f"multiplies by {case.weight} - 1; the file's weight is used as it is"
    )


@bug(*NORMS, fix="take this layer's own norm weight")
def norm_other_weight(r: Norm, case: Case) -> Iterator[Change]:
    """Another norm's weight is applied."""
    w = case.engine.w
    for name in case.run.model.tensors:
        if name.endswith("norm.weight") and name != case.weight and w.shape(name) == w.shape(case.weight or ""):
            weight = case.vector(name)
            assert weight is not None
            variant, says = _relative(name, case.tap.layer), f"uses {name} for {case.weight}"
            changed = replace(r, weight=weight.reshape(r.weight.shape))
            yield Change(changed, says, variant)
            if r.bias is not None:
                bias = case.vector(name.replace(".weight", ".bias"))
                yield Change(replace(changed, bias=bias), f"{says}, and its bias", f"{variant} bias")


def _relative(name: str, layer: int | None) -> str:
    """A tensor's name with its layer counted from this one."""
    parts = name.split(".")
    if parts[0] != "blk" or layer is None:
        return name
    return f"blk.{int(parts[1]) - layer:+d}.{'.'.join(parts[2:])}"


@bug(*NORMS, fix="compute RMSNorm: x / sqrt(mean(x^2) + eps) * weight", source="llama.cpp#173")
def norm_mean_subtracted(r: Norm, case: Case) -> Iterator[Change]:
    """LayerNorm where the model has RMSNorm: the mean is subtracted."""
    if not r.centred:
        yield Change(replace(r, centred=True), "subtracts the mean, as LayerNorm does; this model has RMSNorm")


@bug(*NORMS, fix="subtract the mean before the variance is taken")
def norm_mean_kept(r: Norm, case: Case) -> Iterator[Change]:
    """RMSNorm where the model has LayerNorm: the mean is not subtracted."""
    if r.centred:
        yield Change(replace(r, centred=False), "does not subtract the mean; this model has LayerNorm")


@bug(*NORMS, fix="add the norm's bias")
def norm_bias_missing(r: Norm, case: Case) -> Iterator[Change]:
    """LayerNorm's bias is not added."""
    if r.bias is not None:
        yield Change(replace(r, bias=None), "leaves out the norm's bias")


@bug(*NORMS, fix="divide the sum of squares by the row's length")
def norm_sum_for_mean(r: Norm, case: Case) -> Iterator[Change]:
    """The sum of squares is taken for their mean."""
    n = r.x.shape[-1]
    yield Change(
        replace(r, weight=r.weight / np.sqrt(n), eps=r.eps / n), f"takes the sum of {n} squares for their mean"
    )


@bug(*NORMS, fix="take the root of the mean square")
def norm_no_root(r: Norm, case: Case) -> Iterator[Change]:
    """The square root is missing: the row is divided by its mean square."""
    yield Change(replace(r, root=False), "divides by the mean square; its square root is missing")


@bug(*NORMS, fix="apply the norm")
def norm_missing(r: Norm, case: Case) -> Iterator[Change]:
    """The norm is left out: what comes in goes out."""
    yield Change(Same(r.x), "is left out: its input comes out as it is")


@bug(*NORMS, fix="sum squares in float32", source="sglang#27540")
def norm_overflow(r: Norm, case: Case) -> Iterator[Change]:
    """The squares are summed in float16, where they overflow: whole rows become zero."""
    with np.errstate(over="ignore"):
        total = np.sum(r.x.astype(np.float64) ** 2, axis=-1, keepdims=True)
    hot = total > OVERFLOW
    if hot.any():
        x, says = np.where(hot, r.x.dtype.type(0), r.x), "sums squares in float16, where they overflow to Inf"
        yield Change(replace(r, x=x), f"{says}: those rows come out as zero", "zero")
        yield Change(replace(r, half=True), says, "half")


@bug(*NORMS, fix="sum squares in float32", source="sglang#27540")
def norm_epsilon_in_half(r: Norm, case: Case) -> Iterator[Change]:
    """Epsilon is rounded to float16, where small ones are lost."""
    rounded = float(np.float16(r.eps))
    if rounded != r.eps:
        says = f"rounds epsilon to float16 ({rounded:.3g}); the file says {r.eps:.3g}"
        yield Change(replace(r, eps=rounded), says)


@dataclass(frozen=True)
class WholeRow:
    """A norm of each head, taken over all heads of a row at once."""

    norm: Norm

    def compute(self, case: Case) -> Array:
        x, heads = self.norm.x, self.norm.x.shape[-2]
        row = x.reshape(*x.shape[:2], -1)
        weight = np.broadcast_to(self.norm.weight, (heads, x.shape[-1])).reshape(-1)
        return replace(self.norm, x=row, weight=weight).compute(case).reshape(x.shape)


@bug(*QK, fix="normalise every head by itself", source="quant.cpp#82, SharpMind#39")
def qk_norm_whole_row(r: Norm, case: Case) -> Iterator[Change]:
    """Q or K is normalised over all heads at once; the model does it head by head."""
    yield Change(WholeRow(r), f"normalises whole rows; this model normalises each head of {r.x.shape[-1]} by itself")


@dataclass(frozen=True)
class RoundedInside:
    """A norm whose rows are rounded before they are multiplied by the weight."""

    norm: Norm
    kind: str

    def compute(self, case: Case) -> Array:
        r = self.norm
        rows = replace(r, weight=np.ones_like(r.weight), bias=None).compute(case)
        y = ROUNDINGS[self.kind](rows) * r.weight
        return np.asarray(y if r.bias is None else y + r.bias, r.x.dtype)


@bug(*NORMS, harmless=True, fix="nothing: 16 bits round this much")
def norm_rounded(r: Norm, case: Case) -> Iterator[Change]:
    """Normalised rows are rounded to 16 bits before the weight multiplies them, as transformers does."""
    for kind in HALVES:
        yield Change(RoundedInside(r, kind), f"rounds its rows to {kind} before the weight multiplies them", kind)
