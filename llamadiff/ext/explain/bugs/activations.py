"""Activations and gates at nodes of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from llamadiff.ext.explain.alter import renamed, takes, through, with_float
from llamadiff.ext.explain.bugs.attention import cap_around
from llamadiff.ext.explain.registry import Edit, at_nodes
from llamadiff.ext.explain.site import Site
from llamadiff.ext.graph.engine import Alter
from llamadiff.ext.graph.op import Op, Operand, function_of
from llamadiff.ext.graph.ops.unary import halves

UNARY = ("SILU", "GELU", "GELU_ERF", "GELU_QUICK", "RELU", "SIGMOID", "TANH", "SOFTPLUS", "EXP", "SQR")
GLU = ("SWIGLU", "GEGLU", "REGLU", "GEGLU_ERF", "GEGLU_QUICK")
CLAMPED = ("SWIGLU_OAI", "SWIGLU_CLAMP")
ACTIVATION = {
    "SWIGLU": "SILU", "GEGLU": "GELU", "REGLU": "RELU", "GEGLU_ERF": "GELU_ERF", "GEGLU_QUICK": "GELU_QUICK"
}  # fmt: skip
NAMES = {
    "SILU": "SiLU", "GELU": "GELU (tanh)", "GELU_ERF": "GELU (erf)", "GELU_QUICK": "quick GELU", "RELU": "ReLU",
    "SIGMOID": "sigmoid", "TANH": "tanh", "SOFTPLUS": "softplus", "EXP": "exp", "SQR": "a square", "SWIGLU": "SiLU",
    "GEGLU": "GELU (tanh)", "REGLU": "ReLU", "GEGLU_ERF": "GELU (erf)", "GEGLU_QUICK": "quick GELU",
    "SWIGLU_OAI": "the clamped SwiGLU", "SWIGLU_CLAMP": "the clamped SwiGLU",
}  # fmt: skip


def _applied(name: str, *x: Any, params: bytes = b"\0" * 64) -> Any:
    function = function_of(name)
    assert function is not None
    return function(Op(name, x[0].shape[-4:], "f32", params, tuple(map(Operand, x)), exact=True))


@at_nodes(*UNARY, fix="take the activation of the architecture: of most, SiLU", source="aprender#2096")
def activation_other(site: Site) -> Iterator[Edit]:
    """Another activation: GELU (exact, tanh, quick), ReLU, sigmoid or tanh for SiLU."""
    own = site.node.op
    fix = f"take {NAMES[own]}"
    for name in UNARY:
        if own not in (name, "SQR"):
            yield Edit(renamed(name), f"takes {NAMES[name]}; this model takes {NAMES[own]}", name, fix=fix)
    if own == "SQR":
        below = site.source(0)
        if below is not None and below.op == "RELU":
            says = "takes ReLU; this model takes its square"
            yield Edit(through, says, "RELU", fix="square what ReLU gives")
    elif own != "RELU":
        says = f"takes ReLU's square; this model takes {NAMES[own]}"
        yield Edit(takes(lambda n: np.maximum(n.x(), 0) ** 2), says, "2", fix=fix)


@at_nodes(*GLU, *CLAMPED, of="activation-other")
def other_gate(site: Site) -> Iterator[Edit]:
    """Another function of the gate."""
    own = site.node.op
    fix = f"take {NAMES[own]} of the gate"
    for name in GLU:
        if name != own:
            says = f"takes {NAMES[name]} of the gate; this model takes {NAMES[own]}"
            yield Edit(renamed(name), says, name, fix=fix)
    for name in ("SIGMOID", "TANH"):
        says = f"takes {NAMES[name]} of the gate; this model takes {NAMES[own]}"
        yield Edit(_gated_by(name), says, name, fix=fix)
    says = f"takes ReLU's square of the gate; this model takes {NAMES[own]}"
    yield Edit(_gated(lambda x, y: np.maximum(x, 0) ** 2 * y), says, "2", fix=fix)
    if own == "SWIGLU_OAI":
        params, alpha, limit = site.node.params, *(float(value) for value in site.floats[2:4])
        clamp = f"clamp gate to {limit:.4g}, and up to -{limit:.4g} and {limit:.4g}"
        yield Edit(with_float(p3=1e30), "does not clamp gate and up", "unclamped", fix=clamp)
        with_alpha = f"take gate * sigmoid({alpha:.4g} gate)"
        yield Edit(with_float(p2=1.0), "takes SiLU without its factor alpha", "alpha", fix=with_alpha)

        def plain(x: Any, y: Any) -> Any:
            return _applied("SWIGLU_OAI", x, np.zeros_like(y), params=params) * np.clip(y, -limit, limit)

        yield Edit(_gated(plain), "does not add 1 to up", "plus one", fix="multiply the activated gate by up + 1")


def _gated_by(name: str) -> Alter:
    return _gated(lambda x, y: _applied(name, x) * y)


def gated_by(op: str, change: Callable[[Any], Any]) -> Alter:
    """A gated op whose activated gate is changed before up multiplies it."""
    return _gated(lambda x, y: change(_applied(ACTIVATION.get(op, "SILU"), x)) * y)


def _gated(value: Callable[[Any, Any], Any]) -> Alter:
    return takes(lambda n: value(*halves(n)))


@at_nodes(*UNARY, fix="apply the activation")
def activation_missing(site: Site) -> Iterator[Edit]:
    """There is no activation: gate * up."""
    if site.node.op == "TANH" and cap_around(site) is not None:
        return
    yield Edit(through, f"leaves out {NAMES[site.node.op]}", fix=f"take {NAMES[site.node.op]}")


@at_nodes(*GLU, *CLAMPED, of="activation-missing")
def missing_gate(site: Site) -> Iterator[Edit]:
    """gate * up."""
    says, fix = f"leaves out {NAMES[site.node.op]}: gate * up", f"take {NAMES[site.node.op]} of the gate"
    yield Edit(_gated(lambda x, y: x * y), says, fix=fix)


@at_nodes(*GLU, *CLAMPED, fix="apply the activation to gate, and multiply by up")
def activation_of_up(site: Site) -> Iterator[Edit]:
    """The activation is applied to up instead of gate, or to their product."""

    def of_up(n: Op) -> Op:
        x, y = halves(n)
        return replace(n, sources=(Operand(y), Operand(x), *n.sources[2:]))

    yield Edit(of_up, "applies the activation to up, and multiplies by the gate", "up")
    name = ACTIVATION.get(site.node.op, "SILU")
    yield Edit(_gated(lambda x, y: _applied(name, x * y)), "applies the activation to gate * up", "product")


@at_nodes(*GLU, *CLAMPED, of="gate-up-swapped")
def by_turns(site: Site) -> Iterator[Edit]:
    """Gate and up of one matrix are taken by turns, where they lie one after the other."""

    def alter(first: int, n: Op) -> Op:
        x = n.x()
        return replace(n, sources=(Operand(x[..., first::2]), Operand(x[..., 1 - first :: 2]), *n.sources[2:]))

    if site.number(1) is None:
        for first, order in enumerate(("gate, up, gate, up", "up, gate, up, gate")):
            says = f"takes its row for {order}, ...; this model has gate and up one after the other"
            yield Edit(partial(alter, first), says, order)


@at_nodes(*GLU, *CLAMPED, fix="multiply the activated gate by up")
def up_missing(site: Site) -> Iterator[Edit]:
    """One of the two factors is missing, or they are added."""
    name = ACTIVATION.get(site.node.op, "SILU")
    yield Edit(_gated(lambda x, y: _applied(name, x)), "leaves out up: the activated gate goes on alone", "gate")
    yield Edit(_gated(lambda x, y: y), "leaves out the gate: up goes on alone", "up")
    yield Edit(_gated(lambda x, y: _applied(name, x) + y), "adds activated gate and up", "sum")


@at_nodes("CLAMP", fix="clamp the values")
def clamp_missing(site: Site) -> Iterator[Edit]:
    """Values that the model clamps are not clamped."""
    low, high = (float(value) for value in site.floats[:2])
    says, fix = f"does not clamp values to {low:.4g} and {high:.4g}", f"clamp values to {low:.4g} and {high:.4g}"
    yield Edit(through, says, fix=fix)
