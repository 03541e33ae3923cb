"""RoPE at nodes of a graph. op_params are those of ggml_rope_impl: n_dims, mode, context, base, scale, YaRN's four."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from llamadiff.diagnose.bugs.rope import reordered, wrong_positions
from llamadiff.diagnose.graph_bugs.edit import (  # fmt: skip
    Constant,
    Edit,
    Site,
    at_nodes,
    instead,
    through,
    with_float,
    with_int,
    with_source,
)
from llamadiff.ggml.engine import Alter
from llamadiff.ggml.op import Op, Operand, function_of
from llamadiff.ggml.ops.rope import MROPE, NEOX

BASES = (1e4, 1e5, 1e6, 5e5, 1e7, 8e6)
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
    others = tuple(value for value in BASES if value != own)
    says = lambda value: f"uses base {value:.6g}; the file says {own:.6g}"  # noqa: E731
    yield Constant(lambda value: with_float(p5=value), says, 100.0, 1e9, others)


@at_nodes("ROPE", of="rope-scaling-ignored")
def scaling_ignored(site: Site) -> Iterator[Edit]:
    """Neither linear scaling nor YaRN."""
    scale, ext = float(site.floats[SCALE]), float(site.floats[EXT])
    if scale != 1 or ext:
        what = "YaRN" if ext else f"the scaling by {1 / scale:.4g}"
        yield Edit(with_float(p6=1.0, p7=0.0, p8=1.0), f"ignores {what} that the file asks for")
    if ext:
        yield Edit(with_float(p6=1.0, p7=0.0), "ignores YaRN that the file asks for", "magnitude kept")


@at_nodes("ROPE", of="rope-scaling-inverted")
def scaling_inverted(site: Site) -> Iterator[Edit]:
    """Positions are multiplied by the factor."""
    scale = float(site.floats[SCALE])
    if scale != 1:
        yield Edit(with_float(p6=1 / scale), f"multiplies positions by {1 / scale:.4g}; the model divides by it")


@at_nodes("ROPE", of="rope-scaling-applied")
def scaling_applied(site: Site) -> Iterator[Constant]:
    """Positions are scaled by another factor."""
    own = float(site.floats[SCALE])
    says = lambda value: f"multiplies positions by {value:.5g}; the model by {own:.5g}"  # noqa: E731
    yield Constant(lambda value: with_float(p6=value), says, 1 / 64, 64.0, (0.125, 0.25, 0.5, 1.0, 2.0, 4.0))


@at_nodes("ROPE", of="rope-yarn-as-linear")
def yarn_as_linear(site: Site) -> Iterator[Edit]:
    """All frequencies are divided."""
    if site.floats[EXT]:
        yield Edit(with_float(p7=0.0), "divides all frequencies; YaRN keeps the high ones")


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
def partial_ignored(site: Site) -> Iterator[Edit]:
    """The whole of each head."""
    own, width = int(site.ints[DIMS]), site.node.shape[-1]
    if own < width:
        yield Edit(with_int(p1=width), f"rotates all {width} values of a head; this model rotates {own}")


@at_nodes("ROPE", of="rope-partial")
def partial(site: Site) -> Iterator[Edit]:
    """A part of each head."""
    own = int(site.ints[DIMS])
    for part in (2, 4):
        if own % (2 * part) == 0:
            says = f"rotates the first {own // part} values of a head; this model rotates {own}"
            yield Edit(with_int(p1=own // part), says, f"1/{part}")


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
    """Rotated, and rotated again."""

    def once(n: Op) -> np.ndarray:
        function = function_of("ROPE")
        assert function is not None
        return function(Op(n.name, n.shape, n.kind, n.params, tuple(_plain(s) for s in n.sources), exact=True))

    yield Edit(with_source(0, once), "rotates twice")


def _in_order(to_halves: bool) -> Alter:
    return with_source(0, lambda n: reordered(n.x(), to_halves))


def _plain(source: Operand | None) -> Operand | None:
    return None if source is None else Operand(source.values, source.kind)


@at_nodes("ROPE", of="rope-permuted")
def permuted(site: Site) -> Iterator[Edit]:
    """The values of a head in another order before."""
    if site.node.shape[-1] % 2:
        return
    for to_halves in (True, False):
        way = "pairs into halves" if to_halves else "halves into pairs"
        says = f"rotates heads whose values were put from {way} first"
        yield Edit(_in_order(to_halves), says, str(to_halves))
