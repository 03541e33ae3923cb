"""A model lined up with llama.cpp's graph, layer by layer, and on from each place where they part.

Each layer of the model reads what llama.cpp's layer read: an error in one is not inherited by the next. Where the graph
parts from the model, the op that stands in the node's place is taken to have given what the node gave. That it is the
right one is shown by what follows: its values are those of the graph again. So several mistakes show in one layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ggml.graph import Graph, GraphNode
from llamadiff.port.alignment import Pairs, align, computed_before, computes, distance, is_same, profile, seen_of
from llamadiff.port.departures import Departure, departures
from llamadiff.port.torch_ops import TorchOp, TorchRun, logits_of, recorded
from llamadiff.trace import taps

Array = NDArray[Any]
ROUNDS = 5  # places one after another in a layer
TRIED = 10  # ops that may stand in a node's place


@dataclass(frozen=True)
class Departed:
    """A departure, and what the model has in the node's place: ``op``, and its values in the node's shape.

    None where no op was shown to stand there. ``nodes``: that node, and those that add or multiply a weight to it; the
    op stands for as many as ``fused``.
    """

    departure: Departure
    op: TorchOp | None = None
    values: Array | None = None
    error: float = float("nan")  # NMSE of the node against these
    nodes: tuple[GraphNode, ...] = ()
    fused: int = 1


@dataclass(frozen=True)
class Lineup:
    """``nodes``: how many compute something, and how many of these are one with an op, or lie between such.

    ``logits``: NMSE of the graph's against the model's own.
    """

    departed: Sequence[Departed]
    nodes: int
    aligned: int
    inside: int
    logits: float

    @property
    def apart(self) -> int:
        """Nodes that part from the model, or follow what parts in their layer."""
        return self.nodes - self.aligned - self.inside


class LiningUp:
    """One model and one graph; ``values`` by node."""

    def __init__(self, model: Any, graph: Graph, values: Mapping[int, Array], n_layer: int) -> None:
        self.model, self.graph, self.values = model, graph, values
        self.ends = _ends(graph, n_layer)
        self.given = {layer: values[number] for number, layer in self.ends.items() if layer <= n_layer}
        self.instead: dict[int, Array] = {}
        self._places: dict[tuple[str, str], tuple[Any, ...]] = {}  # kind of node -> where its op is

    def run(self) -> Lineup:
        """Line up until nothing new parts."""
        logits = logits_of(self.model, self.graph.tokens).ravel()  # first: what a model sets up in a run is there
        found, ended = list[Departed](), set[int | None]()  # layers in which nothing can be told of what follows
        first, alignment = self._aligned()
        counts = self._counts(alignment)
        run, left = first, departures(self.graph, first, alignment, self.ends)
        for _ in range(ROUNDS):
            new = [each for each in left if all(each.node is not other.departure.node for other in found)]
            new = [each for each in new if each.layer not in ended]
            if not new:
                break
            for layer in dict.fromkeys(each.layer for each in new):
                departed = self._all_departed([each for each in new if each.layer == layer], run, alignment)
                ended |= {layer} if departed[0].op is None else set()
                found += departed
            run, alignment = self._aligned()  # with what was found
            left = departures(self.graph, run, alignment, self.ends)
        last = self.values[self.graph.nodes[-1].number].ravel()
        order = {node.number: place for place, node in enumerate(self.graph.nodes)}
        found.sort(key=lambda each: order[each.departure.node.number])
        return Lineup(found, *counts, distance(last, logits) if logits.size == last.size else float("nan"))

    def _aligned(self, more: Mapping[int, Array] | None = None) -> tuple[TorchRun, Pairs]:
        run = recorded(self.model, self.graph.tokens, self.given, {**self.instead, **(more or {})})
        return run, align(self.graph, self.values, run, self.ends)

    def _counts(self, alignment: Pairs) -> tuple[int, int, int]:
        nodes = [node for node in self._fed() if computes(node)]
        aligned = [node for node in nodes if node.number in alignment.pairs]
        before = {number for node in aligned for number in self._span_before(node, alignment)}
        return len(nodes), len(aligned), len(before)

    def _fed(self) -> Iterator[GraphNode]:
        """The nodes that are computed from the tokens: a state is there before any."""
        fed = set[int]()
        for node in self.graph.nodes:
            if node.op == "GET_ROWS" or fed & set(self.graph.reads(node)):
                fed.add(node.number)
                yield node

    def _span_before(self, node: GraphNode, alignment: Pairs) -> Iterator[int]:
        waiting = [node]
        while waiting:
            for number in computed_before(self.graph, waiting.pop()) - set(self.ends):
                if number not in alignment.pairs:
                    yield number
                    waiting.append(self.graph.by_number[number])

    def _all_departed(self, apart: Sequence[Departure], run: TorchRun, alignment: Pairs) -> list[Departed]:
        """Departures of one layer, each with the op in its place; of those that have none, none while others have: what
        these make of the layer may explain them.
        """
        chosen = {each: found for each in apart if (found := self._found(each, run, alignment)) is not None}
        for op in dict.fromkeys(each.node.op for each in apart):
            alike = [each for each in apart if each.node.op == op and each not in chosen]
            if len(alike) > 1:
                chosen |= self._together(alike, run, alignment)
        return [self._departed(each, chosen.get(each)) for each in apart if each in chosen or not chosen]

    def _together(self, alike: Sequence[Departure], run: TorchRun, alignment: Pairs) -> dict[Departure, _Chosen]:
        """Nodes that are shown by what reads all of them, as Q and K are: the same ops in turn."""
        first, *others = [[(each, choice) for choice in self._choices(each, run, alignment)] for each in alike]
        for place, (each, choice) in enumerate(first):
            same = [[pair for pair in pairs if pair[1][0].name == choice[0].name] for pairs in others]
            rank = sum(before[0].name == choice[0].name for _, before in first[:place])
            if any(len(pairs) <= rank for pairs in same):
                continue
            beside = [pairs[rank] for pairs in same]
            tried = [(each, [choice]), *((other, [with_it]) for other, with_it in beside)]
            if self._shown(tried, alignment) is not None:
                return {other: (other, *with_it) for other, with_it in ((each, choice), *beside)}
        return {}

    def _found(self, departure: Departure, run: TorchRun, alignment: Pairs) -> _Chosen | None:
        """The op that stands in a node's place, or in that of the node which adds or multiplies a weight to it."""
        for node in self._chain(departure.node):
            there = replace(departure, node=node)
            choices = self._choices(there, run, alignment)
            place = self._places.get(kind_of(there))
            known = next((each for each in choices if _place(each[0], departure) == place), None)
            found = known or self._shown([(there, choices)], alignment)
            if found is not None:
                self._places.setdefault(kind_of(there), _place(found[0], departure))
                return there, *found
        return None

    def _chain(self, node: GraphNode) -> Iterator[GraphNode]:
        """A node, and those after it that do no more than add or multiply a weight to what it gave."""
        yield node
        while True:
            users = [other for other in self.graph.nodes if node.number in self.graph.reads(other) and computes(other)]
            if len(users) != 1 or users[0].op not in ("ADD", "MUL", "ADD_ID"):
                return
            beside = [number for number in users[0].sources if number is not None and number != node.number]
            if not all(number in self.graph.leaves for number in beside):
                return
            node = users[0]
            yield node

    def _departed(self, departure: Departure, chosen: _Chosen | None) -> Departed:
        nodes = tuple(self._chain(departure.node))
        if chosen is None:
            return Departed(departure, nodes=nodes)
        there, op, order = chosen
        own = self._own(there.node)
        self.instead[op.number] = order.of_op(own, op.values.shape)
        values = order.of_node(op.values, own.shape)
        error = distance(own.ravel(), values.ravel())
        return Departed(departure, op, values, error, nodes, nodes.index(there.node) + 1)

    def _own(self, node: GraphNode) -> Array:
        return seen_of(node, self.values[node.number], len(self.graph.tokens))

    def _choices(self, departure: Departure, run: TorchRun, alignment: Pairs) -> list[tuple[TorchOp, _Order]]:
        """The ops that may stand in a node's place, the nearest first: that of the same values among them."""
        node = departure.node
        own, found = self._own(node), list[tuple[TorchOp, _Order]]()
        if node.number in self.ends:
            op = run.ops[run.ends[self.ends[node.number]]]
            order = _order(own, op.values)
            return [] if order is None else [(op, order)]
        sources = [self._own(self.graph.by_number[number]) for number in computed_before(self.graph, node)
                   if number in alignment.pairs]  # fmt: skip
        for op in (*departure.ops, *departure.reads):
            order = _order_by(sources, own, op, run) or _order(own, op.values)
            if order is not None:
                found.append((op, order))
        found.sort(key=lambda each: distance(each[1].of_node(each[0].values, own.shape).ravel(), own.ravel()))
        return found[:TRIED]

    def _shown(
        self, choices: Sequence[tuple[Departure, Sequence[tuple[TorchOp, _Order]]]], alignment: Pairs
    ) -> tuple[TorchOp, _Order] | None:
        """Of the first departure, the op after which most is as in the graph again, where the others have their first
        ones. Of a node that ends a layer, or that nothing follows, the nearest.
        """
        (departure, own), *others = choices
        after = {number for each, _ in choices for number in self._after(each.node, alignment)}
        if departure.node.number in self.ends or not after:
            return next(iter(own), None)
        beside = {number: x for each, (first, *_) in others for number, x in self._set(each, first).items()}
        best, most = None, 0
        for choice in own:
            _, found = self._aligned({**beside, **self._set(departure, choice)})
            gained = len(after & set(found.pairs))
            if gained > most:
                best, most = choice, gained
        return best

    def _set(self, departure: Departure, choice: tuple[TorchOp, _Order]) -> dict[int, Array]:
        """What an op is taken to have given."""
        op, order = choice
        return {op.number: order.of_op(self._own(departure.node), op.values.shape)}

    def _after(self, node: GraphNode, alignment: Pairs) -> set[int]:
        """The nodes that are computed from one, up to the layer's end, and are lost with it."""
        found = {node.number}
        for other in self.graph.nodes:
            if other.number not in self.ends and found & set(self.graph.reads(other)):
                found.add(other.number)
        ends = {number for number in self.ends if found & set(self.graph.reads(self.graph.by_number[number]))}
        return {
            number
            for number in (found | ends) - {node.number} - set(alignment.pairs)
            if computes(self.graph.by_number[number]) or number in ends
        }


def _ends(graph: Graph, n_layer: int) -> dict[int, int]:
    """Nodes that are what a layer reads, by its number; after the last, what the head reads, and the logits."""
    last = graph.nodes[-1]
    names = {0: taps.input_of(0, graph.labelled), **{i + 1: f"{taps.RESIDUAL}-{i}" for i in range(n_layer)}}
    found = {graph.labelled[name].number: layer for layer, name in names.items() if name in graph.labelled}
    return found if last.number in found else {**found, last.number: n_layer + 1}


def kind_of(departure: Departure) -> tuple[str, str]:
    """A node without its layer."""
    return departure.node.op, word_of(departure.node)


def word_of(node: GraphNode) -> str:
    """A node's name without its layer, and without what tells it from others; none if it has only a number."""
    name = (node.label or node.name).partition(" (")[0]
    if re.fullmatch(r"node_\d+", name):
        return ""
    return name if taps.layer_of(name) is None else name.rsplit("-", 1)[0]


def _place(op: TorchOp, departure: Departure) -> tuple[Any, ...]:
    """Where an op is, alike in every layer."""
    alike = [each.number for each in (*departure.ops, *departure.reads) if (each.name, each.line) == (op.name, op.line)]
    return op.name, op.line, alike.index(op.number) if op.number in alike else -1, op in departure.ops


@dataclass(frozen=True)
class _Order:
    """How a node's values lie in an op's: ``axes`` are the op's, in the node's order; ``pairs``: its last axis has
    pairs where the op's has halves.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    pairs: bool = False

    def of_op(self, values: Array, shape: tuple[int, ...]) -> Array:
        """A node's values as the op has them."""
        there = values.reshape([self.shape[axis] for axis in self.axes])
        there = there.transpose(np.argsort(self.axes))
        return (_halves(there) if self.pairs else there).reshape(shape)

    def of_node(self, values: Array, shape: tuple[int, ...]) -> Array:
        """An op's values as the node has them."""
        here = values.reshape(self.shape)
        return (_pairs(here) if self.pairs else here).transpose(self.axes).reshape(shape)


def _order(node: Array, op: Array) -> _Order | None:
    """The order in which an op's values are nearest to a node's; None where they cannot be laid out so."""
    if node.size != op.size or op.dtype.kind != "f":
        return None
    shape = tuple(size for size in op.shape if size > 1) or (1,)
    wanted = [size for size in node.shape if size > 1]
    orders = [_Order(shape, axes, pairs) for axes in permutations(range(len(shape))) if len(shape) <= 4
              if _fits([shape[axis] for axis in axes], wanted)
              for pairs in ((False, True) if shape[-1] % 2 == 0 else (False,))]  # fmt: skip
    return min(orders, key=lambda each: distance(each.of_node(op, node.shape).ravel(), node.ravel()), default=None)


def _order_by(sources: Sequence[Array], node: Array, op: TorchOp, run: TorchRun) -> _Order | None:
    """The order in which an op of the same shape has the values of a node that is read."""
    for source in sources:
        if source.shape != node.shape or source.size != op.values.size:
            continue
        own = profile(source)
        for other in reversed(run.ops[: op.number + 1]):
            if other.values.shape == op.values.shape and other.values.dtype.kind == "f":
                order = _order(source, other.values) if is_same(own, profile(other.values)) else None
                if order is not None:
                    return order
    return None


def _fits(parts: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether axes can be joined, in their order, to the wanted ones."""
    left = list(parts)
    for size in wanted:
        product = 1
        while product < size and left:
            product *= left.pop(0)
        if product != size:
            return False
    return not left


def _pairs(x: Array) -> Array:
    return x.reshape(*x.shape[:-1], 2, -1).swapaxes(-1, -2).reshape(x.shape)


def _halves(x: Array) -> Array:
    return x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(x.shape)


_Chosen = tuple[Departure, TorchOp, _Order]
