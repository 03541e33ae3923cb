"""RoPE at nodes of a graph. op_params are those of ggml_rope_impl: n_dims, mode, context, base, scale, YaRN's four."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.diagnose.bugs.rope import reordered, wrong_positions
from llamadiff.diagnose.graph_bugs.edit import (  # fmt: skip
    Constant,
    Edit,
    Site,
    after,
    at_nodes,
    gives,
    instead,
    through,
    with_float,
    with_int,
    with_source,
)
from llamadiff.diagnose.sought import ROPE_BASE, ROPE_FACTOR
from llamadiff.ggml.engine import Alter
from llamadiff.ggml.graph import GraphNode
from llamadiff.ggml.op import Op, Operand
from llamadiff.ggml.ops.rope import MROPE, NEOX

Array = NDArray[Any]
DIMS, MODE, BASE, SCALE, EXT, ATTN = 1, 2, 5, 6, 7, 8  # places among the parameters


@at_nodes("ROPE", of="rope-layout")
def layout(site: Site) -> Iterator[Edit]:
    """Halves for pairs, and the other way round."""
    mode, half = int(site.ints[MODE]), int(site.ints[DIMS]) // 2
    pairs, halves = "(2i, 2i+1)", f"(i, i+{half})"
    if mode == 0:
        yield Edit(with_int(p2=NEOX), f"rotates {halves}; this model needs {pairs}")
    elif mode == NEOX:
        yield Edit(with_int(p2=0), f"rotates {pairs}; this model needs {halves}")


@at_nodes("ROPE", of="rope-base")
def base(site: Site) -> Iterator[Constant]:
    """Another frequency base, solved for."""
    own = float(site.floats[BASE])
    others = tuple(value for value in ROPE_BASE.familiar if value != own)
    yield Constant(lambda value: with_float(p5=value), ROPE_BASE, own, others)


@at_nodes("ROPE", of="rope-scaling-ignored")
def scaling_ignored(site: Site) -> Iterator[Edit]:
    """Neither linear scaling nor YaRN."""
    scale, ext = float(site.floats[SCALE]), float(site.floats[EXT])
    if scale != 1 or ext:
        what = "YaRN" if ext else f"the scaling by {1 / scale:.4g}"
        yield Edit(with_float(p6=1.0, p7=0.0, p8=1.0), f"ignores {what} that the file asks for")
    if ext:
        kept = float(site.floats[ATTN]) * _grown(scale)
        yield Edit(with_float(p6=1.0, p7=0.0, p8=kept), "ignores YaRN that the file asks for", "magnitude kept")


@at_nodes("ROPE", of="rope-scaling-inverted")
def scaling_inverted(site: Site) -> Iterator[Edit]:
    """Positions are multiplied by the factor; YaRN's magnitude goes with it, or is none, or stays."""
    scale = float(site.floats[SCALE])
    if scale == 1:
        return
    says = f"multiplies positions by {1 / scale:.4g} instead of dividing"
    if not site.floats[EXT]:
        yield Edit(with_float(p6=1 / scale), says)
        return
    grown, inverted = _grown(scale), _grown(1 / scale)
    for magnitude, variant in ((inverted, ""), (1.0, "plain"), (grown, "magnitude")):
        yield Edit(with_float(p6=1 / scale, p8=float(site.floats[ATTN]) * magnitude / inverted), says, variant)


def _grown(scale: float) -> float:
    """YaRN's attention temperature, which ggml multiplies the attention factor by."""
    return 1 + 0.1 * math.log(1 / scale)


@at_nodes("ROPE", of="rope-scaling-doubled")
def scaling_doubled(site: Site) -> Iterator[Edit]:
    """The factor's square, or positions that were divided before."""
    scale = float(site.floats[SCALE])
    if scale != 1:
        says = f"divides positions by {1 / scale:g} twice"
        yield Edit(with_float(p6=scale * scale), says)
        yield Edit(with_source(1, lambda n: n.x(1) * scale), says, "first")


@at_nodes("ROPE", of="rope-scaling-applied")
def scaling_applied(site: Site) -> Iterator[Constant]:
    """Positions are scaled by another factor."""
    yield Constant(lambda value: with_float(p6=1 / value, p7=0.0), ROPE_FACTOR, 1 / float(site.floats[SCALE]))


@at_nodes("ROPE", of="rope-yarn-as-linear")
def yarn_as_linear(site: Site) -> Iterator[Edit]:
    """All frequencies are divided."""
    if site.floats[EXT]:
        says, kept = "divides all frequencies; YaRN keeps the high ones", _grown(float(site.floats[SCALE]))
        yield Edit(with_float(p7=0.0), says)
        yield Edit(with_float(p7=0.0, p8=float(site.floats[ATTN]) * kept), says, "magnitude")


@at_nodes("ROPE", of="rope-yarn-magnitude")
def yarn_magnitude(site: Site) -> Iterator[Edit]:
    """cos and sin are multiplied by another attention factor."""
    scale, factor = float(site.floats[SCALE]), float(site.floats[ATTN])
    grown = 1 + 0.1 * math.log(1 / scale) if site.floats[EXT] else 1.0
    for wanted, says in ((1 / grown, "leaves out YaRN's attention factor"), (1.0, "applies YaRN's attention factor")):
        if abs(wanted - factor) > 1e-6:
            yield Edit(with_float(p8=wanted), says, f"{wanted == 1.0}")


@at_nodes("ROPE", of="rope-factors-ignored")
def factors_ignored(site: Site) -> Iterator[Edit]:
    """No frequency factors."""
    if site.number(2) is not None:
        yield Edit(with_source(2, None), f"ignores the frequency factors ({site.named(2)})")


@at_nodes("ROPE", of="rope-factors-inverted")
def factors_inverted(site: Site) -> Iterator[Edit]:
    """Frequencies are multiplied by the factors."""
    if site.number(2) is not None:
        yield Edit(with_source(2, lambda n: 1 / n.x(2)), "multiplies frequencies by the frequency factors")


@at_nodes("ROPE", of="rope-partial-ignored")
def whole_heads(site: Site) -> Iterator[Edit]:
    """The whole of each head."""
    own, width = int(site.ints[DIMS]), site.node.shape[-1]
    if own < width:
        yield Edit(with_int(p1=width), f"rotates all {width} values of a head; this model rotates {own}")


@at_nodes("ROPE", of="rope-partial")
def fewer(site: Site) -> Iterator[Edit]:
    """A part of each head."""
    own = int(site.ints[DIMS])
    for part in (2, 4):
        if own % (2 * part) == 0:
            says = f"rotates the first {own // part} values of a head; this model rotates {own}"
            yield Edit(with_int(p1=own // part), says, f"1/{part}")
            says = f"rotates the first {own // part // 2} of {own // 2} pairs"
            yield Edit(_with_factors(np.where(np.arange(own // 2) < own // part // 2, 1.0, np.inf)), says, f"{part}")
            exponents = 2 * np.arange(own // part // 2) * (1 / own - 1 / (own // part))
            kept = _with_factors(float(site.floats[BASE]) ** exponents)  # the frequencies of all pairs
            yield Edit(after(kept, with_int(p1=own // part)), says, f"{part} narrow")


def _with_factors(factors: Array) -> Alter:
    """Frequencies divided by more factors."""

    def alter(n: Op) -> Op:
        own = n.optional(2)
        values = np.asarray(factors if own is None else own.reshape(-1)[: len(factors)] * factors, np.float32)
        return replace(n, sources=(*n.sources[:2], Operand(values.reshape(1, 1, 1, 1, -1))))

    return alter


@at_nodes("ROPE", of="rope-direction")
def direction(site: Site) -> Iterator[Edit]:
    """By -theta."""
    yield Edit(with_source(1, lambda n: -n.x(1)), "rotates by -theta: the sign of sin is flipped")


@at_nodes("ROPE", of="rope-position")
def position(site: Site) -> Iterator[Edit]:
    """Positions off by one or two."""
    for shift in (1, -1, 2, -2):
        says = f"rotates by the position {'+' if shift > 0 else '-'} {abs(shift)}; positions count from 0"
        yield Edit(_shifted(shift), says, f"{shift:+d}")


def _shifted(by: int) -> Alter:
    return with_source(1, lambda n: n.x(1) + by)


@at_nodes("ROPE", of="rope-position-restarted")
def position_restarted(site: Site) -> Iterator[Edit]:
    """Positions wrong in decode steps."""
    if int(site.ints[MODE]) & MROPE:
        return
    for says, positions in wrong_positions(site.case.run):
        yield Edit(instead(1, positions.reshape(1, *site.shape(1))), says, says)


@at_nodes("ROPE", of="rope-missing")
def missing(site: Site) -> Iterator[Edit]:
    """What comes in goes out."""
    yield Edit(through, "does not rotate at all")


@at_nodes("ROPE", of="rope-twice")
def twice(site: Site) -> Iterator[Edit]:
    """Rotated, and rotated again: everywhere, or after the first batch."""
    first, tokens = site.case.run.edges[1], len(site.case.run.tokens)
    yield Edit(gives(partial(_again, site, 0)), "rotates twice")
    if first < tokens:
        which = "in decode steps" if first >= site.case.run.n_prefill else "after the first batch"
        yield Edit(gives(partial(_again, site, first)), f"rotates twice {which}", "later")


def _again(site: Site, first: int, x: Array) -> Array:
    """Heads that are rotated, rotated once more from a token on."""
    turned = site.computed(site.node, x)
    return np.concatenate([np.broadcast_to(x, turned.shape)[:, :, :first], turned[:, :, first:]], axis=2)


def _in_order(to_halves: bool) -> Alter:
    return with_source(0, lambda n: reordered(n.x(), to_halves))


@at_nodes("ROPE", of="rope-permuted")
def permuted(site: Site) -> Iterator[Edit]:
    """The values of a head in another order before."""
    if site.node.shape[-1] % 2:
        return
    for to_halves in (True, False):
        way = "pairs into halves" if to_halves else "halves into pairs"
        says = f"rotates heads whose values were put from {way} first"
        yield Edit(_in_order(to_halves), says, str(to_halves))


@at_nodes("ROPE", of="rope-other-order")
def other_order(site: Site) -> Iterator[Edit]:
    """The right values in the other order."""
    if site.node.shape[-1] % 2 == 0:
        for to_halves in (True, False):
            other = gives(partial(reordered, to_halves=to_halves))
            yield Edit(other, "has the right values in the other order within each head", str(to_halves))


def _rope_of(site: Site) -> GraphNode | None:
    """The rotation that a node's result goes into, through its norm if it has one."""
    for _ in range(3):
        users = site.users()
        turned = next((user for user in users if user.op == "ROPE"), None)
        if turned is not None:
            return turned
        normed = next((user for user in users if user.op in ("RMS_NORM", "MUL", "ADD")), None)
        if normed is None:
            return None
        site = site.at(normed)
    return None


@at_nodes("MUL_MAT", "ADD", "VIEW", of="qk-permuted")
def permuted_weights(site: Site) -> Iterator[Edit]:
    """The rows of Q or K in another order within each head; with a bias, or without."""
    node, rope = site.node, _rope_of(site)
    made = node.op == "VIEW" or bool(site.weight(0 if node.op == "MUL_MAT" else 1))
    if rope is None or not made or rope.shape[-1] % 2 or node.shape[-1] % rope.shape[-1]:
        return
    dim = rope.shape[-1]
    biased = node.op == "MUL_MAT" and any(user.op == "ADD" for user in site.users())
    for to_halves in (True, False):
        way = "Hugging Face's order (halves)" if to_halves else "GGUF's order (pairs)"
        says = f"has the rows of each head permuted into {way}; right only if RoPE rotates that layout"
        says = f"{says}; the bias is not permuted" if biased else says
        yield Edit(gives(partial(_by_heads, dim, to_halves)), says, f"{to_halves}{' bias' * biased}")


def _by_heads(dim: int, to_halves: bool, x: Array) -> Array:
    return reordered(x.reshape(*x.shape[:-1], -1, dim), to_halves).reshape(x.shape)


@at_nodes("MUL_MAT", "ADD", "VIEW", of="rope-on-v")
def on_values(site: Site) -> Iterator[Edit]:
    """V goes through the layer's rotation too."""
    rope = site.nearest("ROPE")
    if rope is None or not any(_keeps_values(site, user) for user in site.users()):
        return

    def turned(x: Array) -> Array:
        heads = x.reshape(len(x), 1, len(site.case.run.tokens), -1, rope.shape[-1])
        return site.computed(rope, heads).reshape(-1, *x.shape[1:])

    if int(np.prod(site.node.shape[-2:])) % rope.shape[-1] == 0:
        yield Edit(gives(turned), "is rotated by RoPE, as only Q and K should be")


def _keeps_values(site: Site, user: GraphNode) -> bool:
    """Whether a node writes into the cache of V."""
    leaf = site.engine.graph.leaves.get(user.view[0]) if user.op == "SET_ROWS" and user.view else None
    return leaf is not None and leaf.name.startswith("cache_v")
