"""Overflow and rounding, which any op may suffer from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.diagnose.bugs.matmul import DENSE, PRODUCTS, Product
from llamadiff.diagnose.case import Case
from llamadiff.diagnose.registry import Change, Recipe, bug
from llamadiff.numerics import arithmetic
from llamadiff.trace import taps

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


@bug(*PRODUCTS, harmless=True, fix="nothing: activations in 8 bits round this much", source="aprender#3356, ferrox#108")
def activations_rounded(r: Product, case: Case) -> Iterator[Change]:
    """Activations are rounded to 8 bits in another way than llama.cpp's before they are multiplied."""
    ways = arithmetic.EIGHT_BITS | {kind: arithmetic.ROUNDINGS[kind] for kind in ("Q8_0", "Q8_K") if _fits(kind, r.x)}
    for name, rounding in ways.items():
        yield Change(OfRounded(r, rounding), f"rounds activations to {name}", name)


def _fits(kind: str, x: Array) -> bool:
    """Whether rows are whole blocks of a type."""
    return bool(x.shape[-1] % {"Q8_0": 32, "Q8_K": 256}[kind] == 0)


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
