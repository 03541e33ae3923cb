"""Overflow and rounding at nodes of a graph: of any node's result, and of what products and activations read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from llamadiff.ext.explain.alter import after, gives, with_float, with_source
from llamadiff.ext.explain.bugs.activations import CLAMPED, GLU, gated_by
from llamadiff.ext.explain.bugs.matmul import PRODUCTS, is_bias
from llamadiff.ext.explain.bugs.norms import NORMS
from llamadiff.ext.explain.conventions.reading import eight_bit_ways
from llamadiff.ext.explain.registry import ANY, Edit, at_nodes
from llamadiff.ext.explain.site import Site
from llamadiff.ext.graph.engine import Alter
from llamadiff.ext.graph.graph import LOOKS
from llamadiff.ext.graph.op import Array, Op
from llamadiff.numerics.arithmetic import ROUNDINGS
from llamadiff.numerics.halves import round_f16
from llamadiff.numerics.types import HALVES

LARGEST = 65504.0  # of float16


def overflowing(x: Array) -> Array:
    """Values that are Inf from float16's largest on, and else as they are."""
    return np.asarray(np.where(np.abs(x) > LARGEST, np.copysign(np.inf, x), x), x.dtype)


@at_nodes(ANY, fix="keep this tensor in float32 or bfloat16: float16 ends at 65504", source="sglang#27540")
def overflow_in_half(site: Site) -> Iterator[Edit]:
    """Values overflow float16: they are Inf from 65504 on."""
    recorded = site.case.recorded
    if recorded is None or site.node.op in LOOKS or site.node.kind != "f32":
        return
    if np.nanmax(np.abs(recorded), initial=0.0) >= LARGEST or not np.isfinite(recorded).all():
        says = f"overflows float16: values beyond {LARGEST:.0f} are Inf"
        yield Edit(gives(round_f16), says, "inf")
        yield Edit(gives(overflowing), says, "overflow alone")
        yield Edit(gives(clipped), f"is clipped to float16's largest value, {LARGEST:.0f}", "clipped")


@at_nodes(ANY, fix="nothing: 16 bits round this much", harmless=True)
def result_rounded(site: Site) -> Iterator[Edit]:
    """The op's result was rounded to 16 bits on its way."""
    if site.node is site.sub.nodes[-1] and site.node.kind == "f32":
        for kind in HALVES:
            yield Edit(gives(ROUNDINGS[kind]), f"rounds its result to {kind}", kind)


@at_nodes(
    *PRODUCTS, fix="nothing: activations in 8 bits round this much", source="aprender#3356, ferrox#108", harmless=True
)
def activations_rounded(site: Site) -> Iterator[Edit]:
    """Activations are rounded to 8 bits in another way than llama.cpp's before they are multiplied."""
    if site.weight(0):
        for name, to in eight_bit_ways(site.shape(1)[-1]).items():
            rounds: Callable[[Op], Array] = lambda n, to=to: to(n.x(1))  # type: ignore[misc]  # noqa: E731
            yield Edit(with_source(1, rounds), f"rounds activations to {name}", name)


@at_nodes(*PRODUCTS, fix="nothing: weights kept in 16 bits round this much", harmless=True)
def weights_rounded(site: Site) -> Iterator[Edit]:
    """Weights are kept in 16 bits once they are dequantized."""
    name = site.weight(0)
    for kind in HALVES if name else ():
        yield Edit(_decoding(site, name, kind), f"keeps its weights in {kind}", kind)


def _decoding(site: Site, name: str, kind: str) -> Alter:
    w, to = site.engine.w, ROUNDINGS[kind]

    def alter(n: Op) -> Op:
        weight = n.sources[0]
        assert weight is not None
        return replace(n, sources=(replace(weight, decode=lambda rows: to(w.decode_rows(name, rows))), *n.sources[1:]))

    return alter


@at_nodes("MUL_MAT", fix="nothing: 16 bits round this much", harmless=True)
def product_rounded(site: Site) -> Iterator[Edit]:
    """Products are rounded to 16 bits before the bias is added."""
    if site.weight(0) and any(user.op == "ADD" and is_bias(site.at(user)) for user in site.users()):
        for kind in HALVES:
            yield Edit(gives(ROUNDINGS[kind]), f"rounds to {kind} before the bias is added", kind)


@at_nodes(*NORMS, fix="nothing: 16 bits round this much", harmless=True)
def norm_rounded(site: Site) -> Iterator[Edit]:
    """Normalised rows are rounded to 16 bits before the weight multiplies them, as transformers does."""
    for kind in HALVES:
        yield Edit(gives(ROUNDINGS[kind]), f"rounds its rows to {kind} before the weight multiplies them", kind)


@at_nodes(*GLU, *CLAMPED, fix="nothing: 16 bits round this much", harmless=True)
def activation_rounded(site: Site) -> Iterator[Edit]:
    """The activation is rounded to 16 bits before up multiplies it."""
    for kind in HALVES:
        says = f"rounds its activation to {kind} before up multiplies it"
        yield Edit(gated_by(site.node.op, ROUNDINGS[kind]), says, kind)


@at_nodes("SOFT_MAX", fix="nothing: half-precision attention rounds its inputs", harmless=True)
def softmax_of_rounded(site: Site) -> Iterator[Edit]:
    """Scores are rounded to 16 bits before the softmax."""
    for kind in HALVES if site.number(1) is not None else ():
        yield Edit(with_source(0, _rounded(kind, False)), f"rounds scores to {kind} first", kind)
        scaled = after(with_source(0, _rounded(kind, True)), with_float(p0=1.0))
        yield Edit(scaled, f"rounds scaled scores to {kind}", f"{kind} scaled")


def _rounded(kind: str, scaled: bool) -> Callable[[Op], Array]:
    return lambda n: ROUNDINGS[kind](n.x() * n.floats[0] if scaled else n.x())


def clipped(x: Array) -> Array:
    """Values in float16's range."""
    return np.clip(x, -LARGEST, LARGEST)
