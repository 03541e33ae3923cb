"""Many bugs in one pass: subgraphs that differ in what is altered are lanes of the batch axis."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import prod

import numpy as np

from llamadiff.ext.explain.case import Array, Case, NotRecordedError, OutOfTimeError
from llamadiff.ext.explain.subgraph import Subgraph
from llamadiff.ext.graph.engine import Alter
from llamadiff.ext.graph.graph import GraphNode
from llamadiff.numerics.rounding_tap import Carrier

COLUMNS = 512  # tokens of all lanes of a pass: more cost time, fewer cost passes over the weights
MEMORY = 1 << 26  # values that one node of all lanes may have
REFUSED = (IndexError, ValueError, NotRecordedError)  # a node cannot take what an altered one gives it


def errors(case: Case, subgraphs: Iterable[Subgraph]) -> Iterator[float]:
    """The NMSE that each leaves; infinite where it needs what was not recorded."""
    rest = iter(subgraphs)
    while some := list(islice(rest, _width(case))):
        yield from _errors(case, some)


def _width(case: Case) -> int:
    """How many lanes a pass can have."""
    ways, largest = len(case.carrier.ways), max(map(prod, case.run.shapes.values()))
    return max(1, min(COLUMNS // (ways * len(case.run.tokens)), MEMORY // (ways * largest)))


def _errors(case: Case, subgraphs: Sequence[Subgraph]) -> list[float]:
    with np.errstate(all="ignore"):
        if len(subgraphs) > 1:
            try:
                return [case.nmse(x) for x in _computed(case, subgraphs)]
            except REFUSED as refused:
                if isinstance(refused, OutOfTimeError):
                    return [float("inf")] * len(subgraphs)
        return [_error(case, sub) for sub in subgraphs]


def _error(case: Case, sub: Subgraph) -> float:
    try:
        return case.nmse(sub.compute(case))
    except NotRecordedError:
        return float("inf")


def _computed(case: Case, subgraphs: Sequence[Subgraph]) -> Iterator[Array]:
    """The tap [way, ...] of each subgraph; of one that other shapes come of, computed alone."""
    base = subgraphs[0]
    one_pass = _Pass(case, base, [sub.altered for sub in subgraphs])
    x = one_pass.run()
    for lane, sub in enumerate(subgraphs):
        refused = lane in one_pass.refused
        yield sub.compute(case) if refused else base.as_tap(one_pass.of_lane(lane, x), case)


class _Pass:
    """One pass through a subgraph's nodes.

    Each lane has as many entries of the batch axis as there are arithmetics. Nodes that no lane alters have the right
    values, once for all lanes.
    """

    def __init__(self, case: Case, base: Subgraph, lanes: Sequence[Mapping[int, Alter]]) -> None:
        self.case, self.base, self.lanes, self.engine = case, base, lanes, base.engine
        self.ways = len(case.carrier.ways)
        self.carrier = Carrier(case.carrier.ways * len(lanes), case.carrier.reading, case.carrier.edges)
        self.right, self.values = base.right_values(case), base.engine.leaves()
        self.changed, self.refused = set[int](), set[int]()

    def run(self) -> Array:
        """The last node's values, [lane, ...]."""
        for node in self.base.nodes:
            recorded = node.number in self.base.given
            x = self.base.given[node.number] if recorded else self._node(node)
            self.engine.keep(node, x, self.values, recorded)
            for unused in self.engine.last_uses.get(node.number, ()):
                self.values.pop(unused, None)
        return self._widened(x)

    def of_lane(self, lane: int, x: Array) -> Array:
        """A lane's part of a node's values."""
        return x[lane * self.ways : (lane + 1) * self.ways] if len(x) == self.ways * len(self.lanes) else x

    def _node(self, node: GraphNode) -> Array:
        if self.case.budget is not None and self.case.budget.is_spent:
            raise OutOfTimeError(self.case.tap.name)
        own = [(lane, alters[node.number]) for lane, alters in enumerate(self.lanes) if node.number in alters]
        follows = not self.changed.isdisjoint(self.engine.graph.reads(node))
        if not own and not follows:
            return self.right[node.number]
        self.changed.add(node.number)
        x = self.engine.computed(node, self._seen(node), self.carrier) if follows else self.right[node.number]
        x = self._with(own, node, x) if own else x
        if self.case.budget is not None:
            self.case.budget.spend(node, self.engine.graph, x.size)
        return x

    def _seen(self, node: GraphNode) -> dict[int, Array]:
        """What a node reads, in all lanes."""
        return {number: x if number in self.engine.graph.leaves else self._widened(x) for number, x in self._read(node)}

    def _read(self, node: GraphNode) -> Iterator[tuple[int, Array]]:
        view = node.view[0] if node.view is not None else None
        return ((number, self.values[number]) for number in {*node.sources, view} if number in self.values)

    def _widened(self, x: Array) -> Array:
        """Values in all lanes, of one entry or of one for each arithmetic."""
        n = self.ways * len(self.lanes)
        return np.broadcast_to(x, (n, *x.shape[1:])) if len(x) in (1, n) else np.concatenate([x] * len(self.lanes))

    def _with(self, own: Sequence[tuple[int, Alter]], node: GraphNode, x: Array) -> Array:
        """A node's values with those of the lanes that alter it."""
        out = np.array(self._widened(x), order="C")
        for lane, alter in own:
            values = {number: self.of_lane(lane, x) for number, x in self._read(node)}
            mine = slice(lane * self.ways, (lane + 1) * self.ways)
            try:
                given = self.engine.computed(node, values, self.case.carrier, alter)
                out[mine] = given.reshape(-1, *node.shape)
            except REFUSED:
                self.refused.add(lane)
        return out
