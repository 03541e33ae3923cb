"""The FFN's activation, and how people get it wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from llamaref import ops
from numpy.typing import NDArray

from llamadiff.diagnose.bugs.norms import Same
from llamadiff.diagnose.case import Case
from llamadiff.diagnose.registry import Change, bug, recipe
from llamadiff.numerics.arithmetic import ROUNDINGS
from llamadiff.numerics.types import HALVES

Array = NDArray[Any]
ACTIVATIONS = ("ffn_swiglu", "ffn_moe_swiglu")
_ERF = np.vectorize(math.erf, otypes=[np.float64])


def gelu(x: Array) -> Array:
    """x * Phi(x), exact (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""
    wide = x.astype(np.float64)
    return np.asarray(0.5 * wide * (1 + _ERF(wide / math.sqrt(2))), x.dtype)


def gelu_tanh(x: Array) -> Array:
    """GELU's tanh approximation, section 2 of the same paper."""
    wide = x.astype(np.float64)
    return np.asarray(0.5 * wide * (1 + np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))), x.dtype)


def gelu_quick(x: Array) -> Array:
    """x * sigmoid(1.702 x), the same paper's other approximation."""
    return np.asarray(ops.silu(x * x.dtype.type(1.702)) / x.dtype.type(1.702))


def relu(x: Array) -> Array:
    """max(x, 0)."""
    return np.asarray(np.maximum(x, x.dtype.type(0)))


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x))."""
    return np.asarray(1 / (1 + np.exp(-x.astype(np.float64))), x.dtype)


@dataclass(frozen=True)
class Gated:
    """activation(gate) combined with up: both [b, token, ff] (experts: [b, token, used, ff])."""

    gate: Array
    up: Array
    activation: Callable[[Array], Array] = ops.silu
    combine: Callable[[Array, Array], Array] = np.multiply

    def compute(self, case: Case) -> Array:
        return self.combine(self.activation(self.gate), self.up)


@recipe(*ACTIVATIONS)
def swiglu(case: Case) -> Gated:
    """silu(gate) * up."""
    moe = "moe_" if case.tap.kind.word == "ffn_moe_swiglu" else ""
    return Gated(case[f"ffn_{moe}gate"], case[f"ffn_{moe}up"])


_OTHERS: dict[str, Callable[[Array], Array]] = {
    "exact GELU": gelu, "GELU's tanh approximation": gelu_tanh, "quick GELU": gelu_quick, "ReLU": relu,
    "sigmoid": sigmoid, "tanh": np.tanh,
}  # fmt: skip


@bug(*ACTIVATIONS, fix="use SiLU: x * sigmoid(x)", source="aprender#2096")
def activation_other(r: Gated, case: Case) -> Iterator[Change]:
    """Another activation: GELU (exact, tanh, quick), ReLU, sigmoid or tanh for SiLU."""
    for name, function in _OTHERS.items():
        yield Change(replace(r, activation=function), f"uses {name}; this model has SiLU", name)


@bug(*ACTIVATIONS, fix="apply SiLU to gate")
def activation_missing(r: Gated, case: Case) -> Iterator[Change]:
    """There is no activation: gate * up."""
    yield Change(replace(r, activation=np.positive), "multiplies gate and up without an activation")


@bug(*ACTIVATIONS, fix="apply SiLU to gate, and multiply by up")
def activation_of_up(r: Gated, case: Case) -> Iterator[Change]:
    """The activation is applied to up instead of gate, or to their product."""
    yield Change(replace(r, gate=r.up, up=r.gate), "applies SiLU to up instead of gate", "up")
    yield Change(Same(ops.silu(r.gate * r.up)), "applies SiLU to the product of gate and up", "product")


@bug(*ACTIVATIONS, fix="multiply silu(gate) by up")
def up_missing(r: Gated, case: Case) -> Iterator[Change]:
    """One of the two factors is missing, or they are added."""
    yield Change(Same(ops.silu(r.gate)), "is not multiplied by up", "up")
    yield Change(Same(r.up), "is up alone: silu(gate) is missing", "gate")
    yield Change(replace(r, combine=np.add), "adds up instead of multiplying by it", "add")


@bug(*ACTIVATIONS, harmless=True, fix="nothing: 16 bits round this much")
def activation_rounded(r: Gated, case: Case) -> Iterator[Change]:
    """The activation is rounded to 16 bits before up multiplies it."""
    for kind in HALVES:
        rounded = Same(ROUNDINGS[kind](r.activation(r.gate)) * r.up)
        yield Change(rounded, f"rounds its activation to {kind} before up multiplies it", kind)
