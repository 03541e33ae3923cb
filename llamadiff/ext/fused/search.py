"""Which nodes run as one kernel: found by values that change where nobody looks at what lies between.

All that comes before is asked for, node by node, so that a range of nodes that nobody looks at has the same inputs to
the last bit. What its end gives is another value only if other kernels made it.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llamadiff.ext.graph.check import NodeCheck, layers_of
from llamadiff.ext.graph.graph import VIEWS
from llamadiff.llamacpp.sent_tensor import NUMPY_TYPES, SentTensor
from llamadiff.numerics import metrics

MORE = 8  # nodes that a kernel may have beyond the ones that were found first
SPAN = 48  # nodes, at most, between two that are looked at
TIMES = 100.0  # as far as the same nodes of another layer, which were looked into, from where on these are, too

Range = tuple[int, int]


@dataclass(frozen=True)
class Pass:
    """What is to be run: ranges of nodes that nobody looks at, and which values are reported.

    ``left``: hidden nodes whose values are read once the one behind them has run, and reported, too.
    ``judged``: a node that is judged on the inputs that it has where all run alone; ``value``, what it gave elsewhere.
    """

    hidden: tuple[Range, ...] = ()
    reported: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    judged: int | None = None
    value: bytes = b""


@dataclass(frozen=True)
class Value:
    """What a node gave, as it was reported and as it lies in memory."""

    tensor: SentTensor

    def is_like(self, other: Value) -> bool:
        """Whether both are the same, to the last bit."""
        return bool(np.array_equal(self.tensor.values(), other.tensor.values(), equal_nan=True))

    def apart(self, other: Value) -> float:
        """NMSE of what another one gives beside this."""
        found, right = (np.asarray(each.tensor.values(), np.float64)[None] for each in (other, self))
        return metrics.nmse(found, right, 0)

    def with_view(self, view: Value) -> Value:
        """These values, but for those that a view of them has, of a type that NumPy can read."""
        whole, part = bytearray(self.tensor.data), view.tensor
        plain = np.dtype(f"u{np.dtype(NUMPY_TYPES[part.type]).itemsize}")
        strides, offset = tuple(reversed(part.said["nb"])), part.said["view"][1]
        seen = np.ndarray(part.shape, plain, part.data, strides=strides)
        np.ndarray(part.shape, plain, whole, offset, strides)[...] = seen
        return Value(SentTensor(self.tensor.said, bytes(whole), self.tensor.order))


@dataclass(frozen=True)
class Graph:
    """A pass's nodes as they run alone; ``reads``: of each, which nodes before it are its sources.

    ``views``: a node that computes nothing -> the one whose memory it looks into.
    """

    nodes: Sequence[NodeCheck]
    reads: Sequence[frozenset[int]] = ()
    views: Mapping[int, int] = field(default_factory=dict)

    def outputs(self, first: int, last: int) -> tuple[int, ...]:
        """Nodes that a range computes and others read behind it, but for the last one."""
        later = frozenset[int]().union(*self.reads[last + 1 :])
        return tuple(
            place
            for place in range(first, last)
            if place in later and (self.nodes[place].op not in VIEWS or self.views.get(place, -1) >= first)
        )


@dataclass(frozen=True)
class Kernel:
    """Nodes ``first`` to ``last`` that run as one: what is found of one of them, on inputs of nodes that ran alone.

    ``place``: of which: of the last, or of one before it that others read, too. ``apart``: NMSE of the kernel's values
    beside those of its nodes alone, where that is largest.
    """

    first: int
    last: int
    place: int
    check: NodeCheck
    apart: float


@dataclass(frozen=True)
class Found:
    """The kernels, in the order of the graph; not ``steady``: the same run does not give the same bits twice."""

    kernels: tuple[Kernel, ...] = ()
    steady: bool = True


Asking = Generator[Pass, Mapping[int, Any], Any]


def kernels(graph: Graph) -> Asking:
    """Look for kernels of several of a pass's nodes: yields passes, is sent what they reported, returns ``Found``."""
    nodes = graph.nodes
    found: list[Kernel] = []
    steady = True
    for ends in _ends(nodes):
        alone, again = (yield Pass(reported=ends)), (yield Pass(reported=ends))
        steady = steady and all(alone[end].is_like(again[end]) for end in ends)
        if not steady:
            break
        spans = [(before + 1, end) for before, end in zip((-1, *ends[:-1]), ends, strict=True)]
        together = yield Pass(tuple((first, end - 1) for first, end in spans if end > first), ends)
        reached, apart = False, dict[tuple[Any, ...], float]()
        for first, end in spans:
            reached = reached or not alone[end].is_like(together[end])
            if not reached or end == first:
                continue
            seen = yield Pass(((first, end - 1),), (end,))
            distance, kind = alone[end].apart(seen[end]), _kind(nodes, first, end)
            if not alone[end].is_like(seen[end]) and not distance <= TIMES * apart.get(kind, -1.0):
                apart[kind] = distance
                yield from _within(graph, first, end, found)
    return Found(tuple(sorted(found, key=lambda kernel: (kernel.last, kernel.first, -kernel.place))), steady)


def _ends(nodes: Sequence[NodeCheck]) -> list[tuple[int, ...]]:
    """Where to look: at the last node of each layer; and, for kernels that reach into the next one, half-way."""
    layers, last = layers_of(nodes), len(nodes) - 1
    ends = [place for place in range(last) if layers[place] != layers[place + 1]]
    edges = sorted({*ends, *range(SPAN, last, SPAN), last}) if not ends else [*ends, last]
    middles = [
        (before + after) // 2 for before, after in zip((0, *edges[:-1]), edges, strict=True) if after - before > 1
    ]
    return [tuple(dict.fromkeys(edges)), tuple(dict.fromkeys((*middles, last)))]


def _kind(nodes: Sequence[NodeCheck], first: int, last: int) -> tuple[Any, ...]:
    """What nodes are, wherever they are."""
    return tuple((node.op, node.kind, node.shape, node.weight_type) for node in nodes[first : last + 1])


def _within(graph: Graph, first: int, end: int, found: list[Kernel]) -> Generator[Pass, Mapping[int, Any], None]:
    """Add the kernels of a span, judged: those of a kind that was not met before, or that are much further off."""
    alone = yield Pass(reported=tuple(range(first, end + 1)))
    while first < end:
        last = None
        for place in range(first + 1, end + 1):  # the nearest end of one
            fused = (yield Pass(((first, place - 1),), (place,)))[place]
            if not fused.is_like(alone[place]):
                last = place
                break
        if last is None:
            return
        begin = first
        for begin in range(last - 1, first - 1, -1):  # its beginning
            fused = (yield Pass(((begin, last - 1),), (last,)))[last]
            if not fused.is_like(alone[last]):
                break
        last, fused = yield from _longest(begin, last, end, fused)
        yield from _judged(graph, begin, last, alone, found)
        first = last + 1


def _judged(
    graph: Graph, first: int, last: int, alone: Mapping[int, Value], found: list[Kernel]
) -> Generator[Pass, Mapping[int, Any], None]:
    """Add a kernel, by each value of it that others read and that is not what its nodes give alone."""
    given = yield Pass(((first, last - 1),), (last,), graph.outputs(first, last))
    others = {place: value for place, value in given.items() if not value.is_like(alone[place])}
    kind = _kind(graph.nodes, first, last)
    apart = max((alone[place].apart(value) for place, value in others.items()), default=0.0)
    alike = [kernel.apart for kernel in found if _kind(graph.nodes, kernel.first, kernel.last) == kind]
    if alike and apart <= TIMES * max(alike):
        return
    for place, value in others.items():
        judged, shown = graph.views.get(place, place), value
        if first <= judged < place and value.tensor.type in NUMPY_TYPES:
            shown = alone[judged].with_view(value)
        else:
            judged = place
        check = (yield Pass(judged=judged, value=bytes(shown.tensor.data)))[judged]
        found.append(Kernel(first, last, judged, check, apart))


def _longest(begin: int, last: int, end: int, fused: Value) -> Generator[Pass, Mapping[int, Any], tuple[int, Value]]:
    """Where a kernel ends if nobody looks at its last node either, and what it gives there.

    It goes on to a node that gets another value so than from a kernel up to the last one, and one behind that.
    """
    for place in range(last + 1, min(last + MORE, end) + 1):
        behind = ((last + 1, place - 1),) if place > last + 1 else ()
        apart = (yield Pass(((begin, last - 1), *behind), (place,)))[place]
        longer = (yield Pass(((begin, place - 1),), (place,)))[place]
        if not longer.is_like(apart):
            return (yield from _longest(begin, place, end, longer))
    return last, fused
