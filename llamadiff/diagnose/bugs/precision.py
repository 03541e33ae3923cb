"""Overflow and rounding, which any op may suffer from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.diagnose.bugs.matmul import DENSE, PRODUCTS, Product
from llamadiff.diagnose.bugs.norms import Through
from llamadiff.diagnose.case import Case
from llamadiff.diagnose.registry import Change, Recipe, bug
from llamadiff.numerics import arithmetic
from llamadiff.numerics.types import HALVES
from llamadiff.trace import taps

Array = NDArray[Any]
EVERY = tuple(kind.word for kind in taps.BY_WORD.values() if kind.op != "ARGSORT")
LARGEST = 65504.0  # of float16


@bug(*EVERY, fix="keep this tensor in float32 or bfloat16: float16 ends at 65504", source="sglang#27540")
def overflow_in_half(r: Recipe, case: Case) -> Iterator[Change]:
    """Values overflow float16: they are Inf from 65504 on."""
    if case.recorded is None or np.nanmax(np.abs(case.recorded), initial=0.0) < LARGEST:
        return
    yield Change(Through(r, arithmetic.round_f16), f"overflows float16: values beyond {LARGEST:.0f} are Inf", "inf")
    yield Change(Through(r, clipped), f"is clipped to float16's largest value, {LARGEST:.0f}", "clipped")


def clipped(x: Array) -> Array:
    """Values in float16's range."""
    return np.clip(x, -LARGEST, LARGEST)


@bug(*EVERY, harmless=True, fix="nothing: 16 bits round this much")
def result_rounded(r: Recipe, case: Case) -> Iterator[Change]:
    """The op's result was rounded to 16 bits on its way."""
    for kind in HALVES:
        yield Change(Through(r, arithmetic.ROUNDINGS[kind]), f"rounds its result to {kind}", kind)


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
    for name, rounding in arithmetic.eight_bit_ways(r.x.shape[-1]).items():
        yield Change(OfRounded(r, rounding), f"rounds activations to {name}", name)


@bug(*PRODUCTS, harmless=True, fix="nothing: weights kept in 16 bits round this much")
def weights_rounded(r: Product, case: Case) -> Iterator[Change]:
    """Weights are kept in 16 bits once they are dequantized."""
    if r.decode is None:
        for kind in HALVES:
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
        for kind in HALVES:
            yield Change(RoundedBeforeBias(r, kind), f"rounds to {kind} before the bias is added", kind)


def _rounding_decode(case: Case, name: str, kind: str) -> Callable[[Array], Array]:
    w, to = case.engine.w, arithmetic.ROUNDINGS[kind]
    return lambda rows: to(w.decoded(name, rows))
