"""What an op is changed into: other parameters, other operands, another op, other values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from llamadiff.ext.explain.case import Array, NotRecordedError
from llamadiff.ext.explain.site import Site
from llamadiff.ext.graph.engine import Alter, Then
from llamadiff.ext.graph.op import Op, Operand

OtherOp = Callable[[Op], Op]


def after(first: Alter, second: Alter) -> Alter:
    """One change of a node, and another of what it computes then; nothing changes the values of one that gave some."""
    if isinstance(second, Then):
        return Then(second.change, first if second.alter is None else after(first, second.alter))
    if isinstance(first, Then):
        return Then(first.change, second if first.alter is None else after(first.alter, second))

    def both(n: Op) -> Op | Array:
        changed = first(n)
        return second(changed) if isinstance(changed, Op) else changed

    return both


def through(n: Op) -> Array:
    """The op is left out: its first operand goes on."""
    return n.x()


def takes(value: Callable[[Op], Any]) -> Alter:
    """The op gives these values."""
    return lambda n: np.asarray(value(n), np.float32)


def only(place: int) -> Alter:
    """One operand goes on alone."""
    return lambda n: n.x(place)


def gives(change: Callable[[Array], Array]) -> Alter:
    """What the op gives, [b, ne3, ne2, ne1, ne0], goes on changed."""
    return Then(change)


def changed(place: int, change: Callable[[Array], Any]) -> OtherOp:
    """An operand's values changed."""
    return with_source(place, lambda n: change(n.x(place)))


def times(place: int, factor: float) -> OtherOp:
    """An operand is multiplied by a constant."""
    return changed(place, lambda x: x * np.float32(factor))


def plus(place: int, by: Any) -> OtherOp:
    """A constant is added to an operand."""
    return changed(place, lambda x: x + by)


def swapped(first: int, second: int) -> OtherOp:
    """Two operands change places."""

    def alter(n: Op) -> Op:
        sources = list(n.sources)
        sources[first], sources[second] = sources[second], sources[first]
        return replace(n, sources=tuple(sources))

    return alter


def moved_on(x: Array, by: int, axis: int) -> Array:
    """Values that lie so many places further on along an axis; zeros where none come from."""
    out, rows = np.zeros_like(x), np.moveaxis(x, axis, 0)
    np.moveaxis(out, axis, 0)[max(by, 0) : len(rows) + min(by, 0)] = rows[max(-by, 0) : len(rows) - max(by, 0)]
    return out


def instead(place: int, x: Array) -> OtherOp:
    """Other values in an operand's place."""
    return with_source(place, lambda n: x)


def renamed(name: str) -> OtherOp:
    """Another op on the same operands."""
    return lambda n: replace(n, name=name)


def with_float(**values: float) -> OtherOp:
    """Parameters changed: ``p5=1e6`` is the sixth, as float32."""

    def alter(n: Op) -> Op:
        floats = n.floats.copy()
        for place, value in values.items():
            floats[int(place[1:])] = value
        return replace(n, params=floats.tobytes())

    return alter


def with_int(**values: int) -> OtherOp:
    """Parameters changed: ``p2=0`` is the third, as int32."""

    def alter(n: Op) -> Op:
        ints = n.ints.copy()
        for place, value in values.items():
            ints[int(place[1:])] = value
        return replace(n, params=ints.tobytes())

    return alter


def with_source(place: int, change: Callable[[Op], Any] | None) -> OtherOp:
    """A source's values changed; None: it is not there."""

    def alter(n: Op) -> Op:
        source = n.sources[place]
        if source is None:  # another bug has taken it away
            raise NotRecordedError(n.name)
        new = None if change is None else replace(source, values=np.asarray(change(n)))
        return replace(n, sources=(*n.sources[:place], new, *n.sources[place + 1 :]))

    return alter


def with_weight(site: Site, place: int, name: str) -> Alter:
    """Another tensor of the file in a weight's place."""
    other = Operand(np.zeros((0,)), site.engine.w.type(name).lower(), name)

    def alter(n: Op) -> Op:
        return replace(n, sources=(*n.sources[:place], other, *n.sources[place + 1 :]))

    return alter
