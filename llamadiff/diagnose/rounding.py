"""What any op may suffer from the numbers it is computed in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff import arithmetic, taps
from llamadiff.diagnose.case import Case
from llamadiff.diagnose.known import Change, Recipe, bug
from llamadiff.diagnose.products import DENSE, PRODUCTS, Product

Array = NDArray[Any]
EVERY = tuple(kind.word for kind in taps.BY_WORD.values() if kind.op != "ARGSORT")
LARGEST = 65504.0  # of float16


@dataclass(frozen=True)
class Through:
    """Another recipe's result, kept in a type for a moment."""

    recipe: Recipe
    kind: str

    def compute(self, case: Case) -> Array:
        return arithmetic.ROUNDINGS[self.kind](self.recipe.compute(case))


@bug(*EVERY, fix="keep this tensor in float32 or bfloat16: float16 ends at 65504", source="sglang#27540")
def overflow_in_half(r: Recipe, case: Case) -> Iterator[Change]:
    """Values overflow float16: they are Inf from 65504 on."""
    if case.recorded is None or np.nanmax(np.abs(case.recorded), initial=0.0) < LARGEST:
        return
    yield Change(Through(r, "F16"), f"overflows float16: values beyond {LARGEST:.0f} are Inf", "inf")
    yield Change(Clipped(r), f"is clipped to float16's largest value, {LARGEST:.0f}", "clipped")


@dataclass(frozen=True)
class Clipped:
    """Another recipe's result, clipped to float16's range."""

    recipe: Recipe

    def compute(self, case: Case) -> Array:
        return np.clip(self.recipe.compute(case), -LARGEST, LARGEST)


@bug(*EVERY, harmless=True, fix="nothing: 16 bits round this much")
def result_rounded(r: Recipe, case: Case) -> Iterator[Change]:
    """The op's result was rounded to 16 bits on its way."""
    for kind in ("F16", "BF16"):
        yield Change(Through(r, kind), f"rounds its result to {kind}", kind)


@dataclass(frozen=True)
class OfRounded:
    """A product of activations rounded beforehand."""

    product: Product
    rounding: Callable[[Array], Array]

    def compute(self, case: Case) -> Array:
        return replace(self.product, x=self.rounding(self.product.x)).compute(case)


def round_blocks(x: Array, size: int, whole: Callable[[Array], Array] = np.rint) -> Array:
    """Blocks of ``size`` through 8-bit whole numbers, one float32 scale a block."""
    blocks = x.reshape(*x.shape[:-1], -1, size)
    scale = np.abs(blocks).max(axis=-1, keepdims=True) / x.dtype.type(127)
    quants = whole(np.divide(blocks, scale, where=scale > 0, out=np.zeros_like(blocks)))
    return np.asarray(quants * scale, x.dtype).reshape(x.shape)


def round_between(x: Array, whole_zero: bool = True) -> Array:
    """Each row through 255 steps between its smallest and its largest value; zero is one of them if it is whole."""
    low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    step = np.maximum(high - low, np.finfo(x.dtype).tiny) / x.dtype.type(255)
    if not whole_zero:
        return np.asarray(np.rint((x - low) / step) * step + low, x.dtype)
    zero = np.rint(-low / step)
    return np.asarray((np.clip(np.rint(x / step) + zero, 0, 255) - zero) * step, x.dtype)


@bug(*PRODUCTS, harmless=True, fix="nothing: activations in 8 bits round this much", source="aprender#3356, ferrox#108")
def activations_rounded(r: Product, case: Case) -> Iterator[Change]:
    """Activations are rounded to 8 bits in another way than llama.cpp's before they are multiplied."""
    n = r.x.shape[-1]
    ways: dict[str, Callable[[Array], Array]] = {
        "8 bits, one scale a row": lambda x: round_blocks(x, n),
        "8 bits, one scale and zero a row": round_between,
        "8 bits, one scale and minimum a row": lambda x: round_between(x, whole_zero=False),
    }
    for size in (32, 64, 128):
        if n % size == 0:
            ways[f"8 bits, one float32 scale for {size}"] = lambda x, size=size: round_blocks(x, size)  # type: ignore[misc]
    if n % 32 == 0:
        ways["Q8_0"] = arithmetic.round_q8_0
        ways["8 bits by truncation, one float32 scale for 32"] = lambda x: round_blocks(x, 32, np.trunc)
    if n % 256 == 0:
        ways["Q8_K"] = arithmetic.round_q8_k
    for name, rounding in ways.items():
        yield Change(OfRounded(r, rounding), f"rounds activations to {name}", name)


@bug(*PRODUCTS, harmless=True, fix="nothing: weights kept in 16 bits round this much")
def weights_rounded(r: Product, case: Case) -> Iterator[Change]:
    """Weights are kept in 16 bits once they are dequantized."""
    if r.decode is None:
        for kind in ("F16", "BF16"):
            yield Change(replace(r, decode=_rounding_decode(case, r.name, kind)), f"keeps its weights in {kind}", kind)


@dataclass(frozen=True)
class RoundedBeforeBias:
    """A product that is rounded before its bias is added."""

    product: Product
    kind: str

    def compute(self, case: Case) -> Array:
        y = arithmetic.ROUNDINGS[self.kind](replace(self.product, bias=None).compute(case))
        bias = self.product.bias
        assert bias is not None
        return np.asarray(y + (bias if case.channels is None else bias[case.channels]))


@bug(*DENSE, harmless=True, fix="nothing: 16 bits round this much")
def product_rounded(r: Product, case: Case) -> Iterator[Change]:
    """Products are rounded to 16 bits before the bias is added."""
    if r.bias is not None:
        for kind in ("F16", "BF16"):
            yield Change(RoundedBeforeBias(r, kind), f"rounds to {kind} before the bias is added", kind)


def _rounding_decode(case: Case, name: str, kind: str) -> Callable[[Array], Array]:
    w, to = case.engine.w, arithmetic.ROUNDINGS[kind]
    return lambda rows: to(w.decoded(name, rows))
