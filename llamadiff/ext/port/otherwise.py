"""What a model computes otherwise than llama.cpp's graph, where no known bug is it.

It may read something else: the result of an op that the graph leaves out, or of another branch, or another parameter.
Or the model goes on from the node's result: it adds a bias, or multiplies by a gate. Each is carried out on the graph's
own values, and is said if it gives those of an op of the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.graph.engine import Alter
from llamadiff.ext.graph.graph import LOOKS, Graph, GraphNode
from llamadiff.ext.graph.op import Op, Operand
from llamadiff.ext.port.alignment import (
    ByValue,
    Pairs,
    computes,
    distance,
    name_of,
    profile,
    reached,
    read_by,
    seen_of,
    whole_of,
)
from llamadiff.ext.port.departures import Departure
from llamadiff.ext.port.graph_values import Again
from llamadiff.ext.port.layout import STRAIGHT, Moved, layouts
from llamadiff.ext.port.tensors import MADE, have
from llamadiff.ext.port.torch_ops import TorchOp
from llamadiff.result.diagnosis import Cause

Array = NDArray[Any]
COPIES = ("expand", "repeat")
FOLLOWED = 12  # nodes after a place whose weights are looked at
FEW = 8  # ops that are named one by one
OTHER = 1e-9  # NMSE of values that are others
WAYS: tuple[tuple[str, Callable[[Array, Array], Array]], ...] = (("adds", np.add), ("multiplies by", np.multiply))

Key = tuple[Any, ...]


@dataclass(frozen=True)
class StandIn:
    """What the model has in a node's place: an op, and its ``values`` in the node's shape, where these are known.

    ``says``: what the model does, and ``key``, what makes that the same in another layer; ``at``: the node that it is
    said of, if it is not the first of the place; ``parameter``: the model's, which the graph does not read; ``cause``:
    the known bug that says it.
    """

    node: GraphNode
    op: TorchOp | None = None
    values: Array | None = None
    says: str | None = None
    key: Key | None = None
    at: GraphNode | None = None
    parameter: str | None = None
    cause: Cause | None = None

    @property
    def given(self) -> Array:
        """The values, of one that has some."""
        assert self.values is not None
        return self.values

    @property
    def kind(self) -> tuple[bool, str]:
        """Alike for nodes that part for one reason."""
        return self.says is None, self.op.name if self.says is None and self.op is not None else ""


class Search:
    """What is tried, on one graph and one run of the model. ``parameters``: the model's, by name."""

    def __init__(self, graph: Graph, again: Again, known: ByValue, parameters: Mapping[str, Array]) -> None:
        self.graph, self.again, self.known, self.parameters = graph, again, known, parameters

    def of(self, place: Spot, key: Key | None = None) -> StandIn | None:
        """The first that holds. ``key``: of one that holds elsewhere, which is tried alone."""
        case = _Case(self, place, key)
        ways = (case.has_otherwise, case.as_another, case.goes_on, case.reads, case.reads_two)
        return next((found for way in ways for found in way()), None)

    def chooses(self, place: Spot) -> StandIn | None:
        """Whether the model chooses another number of experts, at a place that is about these."""
        return next(_Case(self, place, None).chooses(), None)

    def unread(self, place: Spot, op: TorchOp | None) -> str | None:
        """A parameter that the model reads there, and no node of the part; else what it computes, if an op is known."""
        return _Case(self, place, None).unread(op)


@dataclass(frozen=True)
class Spot:
    """A departure, and the ``nodes`` from it on that may stand for one op. ``seen``: the graph's values.

    ``pairs``: nodes and ops that are one. ``moved``: orders of rows and columns. ``part``: the nodes of its layer.
    ``taken``: ops that stand for other departures.
    """

    departure: Departure
    nodes: Sequence[GraphNode]
    part: Sequence[GraphNode]
    seen: Mapping[int, Array]
    pairs: Pairs
    moved: Moved = STRAIGHT
    taken: frozenset[int] = frozenset()


class _Case:
    """One place."""

    def __init__(self, search: Search, place: Spot, key: Key | None) -> None:
        self.graph, self.again, self.known = search.graph, search.again, search.known
        self.parameters, self.place, self.key = search.parameters, place, key
        self.run = self.known.run
        ends = (0, *self.run.ends)
        self.first, self.last = ends[place.departure.part], ends[place.departure.part + 1]
        self.nodes_of = place.pairs.node_of()
        self.ranks = _ranks(place.part, lambda node: (node.op, _without_layer(node)))
        self.op_ranks = _ranks(self.run.ops[self.first : self.last], lambda op: (op.name, op.line))

    def chooses(self) -> Iterator[StandIn]:
        """The model chooses more experts, or fewer: what is computed of them has other sizes."""
        products = [node for node in self.place.part if node.op == "MUL_MAT_ID"]
        theirs = [op.values.shape[-1] for op in self.run.ops[self.first : self.last] if op.name == "topk"]
        if not products or len(set(theirs)) != 1:
            return
        ids = self.graph.by_number.get(products[0].sources[2] or -1)
        own = ids.shape[-1] if ids is not None else theirs[0]
        node = self.place.departure.node
        router = [
            each for each in self.place.part if each.number < products[0].number and each.op in ("ARGSORT", "TOP_K")
        ]
        if own != theirs[0] and router and node.number >= min(self.graph.reads(router[-1])):
            says = f"chooses {theirs[0]} experts for each token; llama.cpp's graph {own}"
            yield StandIn(node, says=says, key=("chooses",), at=router[-1])

    def has_otherwise(self) -> Iterator[StandIn]:
        """The model has another parameter where the graph reads a tensor of the file, or the same in another order."""
        for node, nodes in self._weighted():
            for slot, number in enumerate(node.sources):
                leaf = self.graph.leaves.get(number) if number is not None else None
                if leaf is None or leaf.number in self.graph.given:
                    continue
                for name, whole, made, values in self._instead_of(leaf.name):
                    key = ("has", self._rank(node), slot, made)
                    if self._is_wanted(key):
                        altered = {node.number: _with(slot, values)}
                        now = self._again({}, nodes, altered)
                        says = f"has {name} where llama.cpp's graph has {leaf.name}"
                        at = node if computes(node) else None
                        for found in self._results(now, says, key, nodes=nodes, at=at):
                            yield replace(found, parameter=whole)

    def _weighted(self) -> Iterator[tuple[GraphNode, list[GraphNode]]]:
        """The nodes that may read a tensor: the place's, and those that follow; with those to be computed for each."""
        path = self._path(None)
        for node in path:
            yield node, path
        lost = [node for node in self.place.part if node.number > self.place.departure.node.number
                and node not in path and node.number not in self.place.pairs.pairs]  # fmt: skip
        for node in lost[:FOLLOWED]:
            yield node, [other for other in self.place.part if other.number >= node.number]

    def _instead_of(self, tensor: str) -> Iterator[tuple[str, str, str, Array]]:
        """Parameters that are not a tensor, in its shape; and the parts of such that are several in one."""
        whole = self.again.w.whole(tensor)
        own = whole.squeeze()
        for name, parameter in self.parameters.items():
            for part, x in _parts_of(parameter.squeeze(), own.size):
                for made, make in MADE:
                    for values in (make(x), make(x).T):
                        if values.shape == own.shape and distance(values, own) > OTHER:
                            yield part.format(made.format(name)), name, part + made, values.reshape(whole.shape)

    def as_another(self) -> Iterator[StandIn]:
        """The model does what the graph does at another node of the same op: with its constants."""
        node, path = self.place.departure.node, self._path(None)
        tried = {node.params}
        for other in self.graph.nodes:
            if other.op != node.op or other.params in tried or not computes(other):
                continue
            tried.add(other.params)
            key = ("as another", _without_layer(other))
            if self._is_wanted(key):
                altered = {node.number: partial(_with_params, other.params)}
                now = self._again({}, path, altered)
                yield from self._results(now, f"does there what llama.cpp's graph does at {name_of(other)}", key)

    def goes_on(self) -> Iterator[StandIn]:
        """The model adds something to what the node gives, or multiplies it by something."""
        for node in self.place.nodes:
            own = self._own(node)
            for says, key, after, x, parameter in self._beside(node, own):
                for word, way in WAYS:
                    whole = ("goes on", word, self._rank(node), *key)
                    if self._is_wanted(whole):
                        with np.errstate(all="ignore"):  # what overflows is no op's
                            made = way(own, x)
                        for found in self._result(node, made, f"{word} {says()}", whole, after):
                            yield replace(found, parameter=parameter, at=node)

    def _beside(self, node: GraphNode, own: Array) -> Iterator[tuple[Callable[[], str], Key, int, Array, str | None]]:
        """What may be added: words for it, what makes it the same in another layer, after which op, its values, and
        which parameter it is.
        """
        for name, x in self.parameters.items():
            if x.size == own.shape[-1] > 1:
                yield name.__str__, (_without_numbers(name),), 0, x.ravel(), name
        for op in self._ops(own.size):
            for place, order in enumerate(layouts(own.shape, op.values, self.place.moved)):
                key = (self.op_ranks[op.number], place)
                yield partial(self._what, op), key, op.number, order.of_node(op.values, own.shape), None
        for other in self.place.part:
            if other.number < node.number and other.op == "VIEW" and np.prod(other.shape) == own.size:
                x = self.place.seen[other.number].reshape(own.shape)
                yield partial(self._seen_in, other), (self._rank(other),), 0, x, None

    def reads(self) -> Iterator[StandIn]:
        """The model reads something else than a node that the graph computes: there, or wherever it is read."""
        after = [node for node in self.place.part if node.number > self.place.departure.node.number]
        for node in read_by(self.graph, self.place.departure.node):
            own = self._own(node)
            here = self._path(node.number)
            everywhere = [other for other in self.place.part if other.number > node.number]
            for op in self._ops(own.size):
                for place, order in enumerate(layouts(own.shape, op.values, self.place.moved)):
                    key = ("reads", self._rank(node), self.op_ranks[op.number], place)
                    values = order.of_node(op.values, own.shape)
                    if not self._is_wanted(key) or distance(values, own) <= OTHER:
                        continue
                    changed = {node.number: whole_of(node, values, self.place.seen, self.graph)}
                    for path, nodes in ((here, self.place.nodes), (everywhere, after)):
                        now = self._again(changed, path)
                        yield from self._results(now, self._reading(op, node), key, op.number, nodes)

    def reads_two(self) -> Iterator[StandIn]:
        """The model computes something of two nodes first, alike, as it rotates Q and K."""
        made = [(node, dict(self._made_first(node))) for node in read_by(self.graph, self.place.departure.node)]
        for (first, ways), (second, others) in combinations(made, 2):
            for names in [names for names in ways if names in others]:
                key = ("reads two", self._rank(first), self._rank(second), names)
                if not self._is_wanted(key):
                    continue
                for one, other in product(ways[names], others[names]):
                    changed = {
                        node.number: whole_of(node, values, self.place.seen, self.graph)
                        for node, (_, values) in ((first, one), (second, other))
                    }
                    now = self._again(changed, self._path(min(changed)))
                    says = f"computes {names} of {name_of(first)} and {name_of(second)} first{_at(one[0])}"
                    yield from self._results(now, says, key, max(one[0].number, other[0].number))

    def _made_first(self, node: GraphNode) -> Iterator[tuple[str, list[tuple[TorchOp, Array]]]]:
        """What the model makes of a node, in its shape: names of the ops, and each way in which it may be laid out."""
        own = self._own(node)
        for op in self._ops(own.size):
            made = self._made_of(op)
            if made is not None and made[0] == name_of(node):
                found = [(op, order.of_node(op.values, own.shape)) for order in layouts(own.shape, op.values)]
                if found:
                    yield made[1], found

    def unread(self, op: TorchOp | None) -> str | None:
        """A parameter that is read on the way to an op, and by no node of the part; else what the op is made of."""
        known = [self.again.w.whole(leaf.name) for node in self.place.part for number in node.sources
                 if (leaf := self.graph.leaves.get(-1 if number is None else number)) is not None
                 and leaf.number not in self.graph.given]  # fmt: skip
        before = set() if op is None else self._upstream(op.number, self.first) - {self.first}
        for number in sorted(before):
            for name in self.run.ops[number].weights:
                x = self.parameters.get(name)
                if x is not None and not have(known, x):
                    return f"reads {name}, and no node of llama.cpp's there does"
        made = None if op is None else self._made_of(op)
        return None if made is None or op is None else f"computes {made[1]} of {made[0]}{_at(op)}"

    def _rank(self, node: GraphNode) -> Key:
        """A node alike in every layer; what ends the one before is the input."""
        return self.ranks.get(node.number, ("the layer's input",))

    def _again(
        self, changed: Mapping[int, Array], nodes: Sequence[GraphNode], altered: Mapping[int, Alter] | None = None
    ) -> dict[int, Array]:
        """What nodes then give; none where one of them cannot take what it is given."""
        with suppress(ValueError, IndexError):
            return self.again.following(self.place.seen, changed, nodes, altered)
        return {}

    def _is_wanted(self, key: Key) -> bool:
        return self.key is None or self.key == key

    def _results(
        self,
        now: Mapping[int, Array],
        says: str,
        key: Key,
        after: int = 0,
        nodes: Sequence[GraphNode] | None = None,
        at: GraphNode | None = None,
    ) -> Iterator[StandIn]:
        for node in self.place.nodes if nodes is None else nodes:
            if node.number in now and computes(node) and node.number not in self.place.pairs.pairs:
                yield from self._result(node, now[node.number], says, key, after, at)

    def _result(
        self, node: GraphNode, values: Array, says: str, key: Key, after: int = 0, at: GraphNode | None = None
    ) -> Iterator[StandIn]:
        """What is found, if the values are those of an op that comes later than what it is made of."""
        whole = self.place.seen[node.number]
        seen = seen_of(node, values.reshape(whole.shape), self.graph) if values.size == whole.size else values
        if not np.isfinite(seen).any() or distance(seen, self._own(node)) <= OTHER:
            return
        alike = [self.run.ops[number] for number in self.known.alike(seen)]
        others = self.nodes_of.keys() | self.place.taken
        if any(op.number in others for op in alike) or (alike and alike[0].name in COPIES):
            return  # what another node has, or copies of that
        op = next((op for op in alike if max(after, self.first) < op.number <= self.last), None)
        if op is not None:
            yield StandIn(node, op, seen, says, key, at)

    def _own(self, node: GraphNode) -> Array:
        return seen_of(node, self.place.seen[node.number], self.graph)

    def _ops(self, size: int) -> Iterator[TorchOp]:
        """The ops of this part with so many values, and what it reads; each kind of values once."""
        said = list[Array]()
        for op in self.run.ops[self.first : self.last]:
            if op.values.size != size or op.values.dtype.kind != "f":
                continue
            own = profile(op.values)
            if not any(np.array_equal(own, other) for other in said):
                said.append(own)
                yield op

    def _path(self, source: int | None) -> list[GraphNode]:
        """The nodes from a source on to those that are looked at."""
        wanted, nodes = {node.number for node in self.place.nodes}, list[GraphNode]()
        for node in reversed(self.graph.nodes):
            if node.number in wanted and (source is None or node.number > source):
                nodes.append(node)
                if not computes(node) or node in self.place.nodes:
                    wanted |= set(self.graph.reads(node))
        return nodes[::-1]

    def _reading(self, op: TorchOp, source: GraphNode) -> str:
        """That an op of the model is read where the graph reads a node."""
        own, same = self._seen_in(source), self._node_like(op)
        if same == own or source.number in self.nodes_of.get(op.number, ()):
            return f"has the values of {own} in another order"
        if same is not None:
            return f"reads {same} where llama.cpp's graph reads {own}"
        made = self._made_of(op, self.known.alike(self._own(source)))
        if made is not None and made[0] == own:
            return f"computes {made[1]} of {own} first{_at(op)}"
        return f"reads {self._what(op)} where llama.cpp's graph reads {own}"

    def _seen_in(self, node: GraphNode) -> str:
        """A node; of one that only looks at another, what it is a part of."""
        base: GraphNode | None = node
        while base is not None and base.op in LOOKS:
            number = base.view[0] if base.view is not None else base.sources[0]
            base = self.graph.by_number.get(-1 if number is None else number)
        return name_of(node) if base is node or base is None else f"a part of {name_of(base)}"

    def _what(self, op: TorchOp) -> str:
        """What an op of the model gives: a node of the graph that has its values, or what it is made of."""
        same, made = self._node_like(op), self._made_of(op)
        if same is not None:
            return same
        shown = self._shown_by(op) if made is None and op.looks else None
        if shown is not None:
            return f"a part of {shown}"
        return f"what {op.name} gives{_at(op)}" if made is None else f"what {made[1]} of {made[0]} gives{_at(op)}"

    def _shown_by(self, op: TorchOp) -> str | None:
        """The node whose values an op shows some of."""
        while op.looks and op.number not in self.nodes_of and len(op.inputs) == 1:
            op = self.run.ops[op.inputs[0]]
        return name_of(self.graph.by_number[self.nodes_of[op.number][0]]) if op.number in self.nodes_of else None

    def _node_like(self, op: TorchOp) -> str | None:
        """What has an op's values: what the layer reads, or a node."""
        if op.number == self.first and 0 < self.place.departure.part < len(self.run.ends) - 1:
            return "the layer's input"
        same = [node for like in self.known.alike(op.values) for node in self.nodes_of.get(like, ())]
        return name_of(self.graph.by_number[same[0]]) if same else None

    def _made_of(self, op: TorchOp, of: Sequence[int] = ()) -> tuple[str, str] | None:
        """The last value that a node has before an op, or that of some ops ``of`` it, and the ops from it on."""
        before = self._upstream(op.number, self.first) - {op.number}
        known = [number for number in before if number in self.nodes_of]
        base = max([number for number in known if number in of] or known, default=None)
        if base is None:
            return None
        made, names = {base}, list[str]()
        upstream = self._upstream(op.number, base)
        for number in range(base + 1, op.number + 1):
            other = self.run.ops[number]
            if number in upstream and made & set(other.inputs):
                made.add(number)
                names += [] if other.looks else [other.name.strip("_")]
        if not names:
            return None
        shown = names if len(names) <= FEW else [*names[: FEW - 1], "..."]
        return name_of(self.graph.by_number[self.nodes_of[base][0]]), ", ".join(shown)

    def _upstream(self, number: int, base: int) -> set[int]:
        """An op, and those from ``base`` on that it is made of."""
        ops = self.run.ops
        return reached([number], lambda own: [before for before in ops[own].inputs if before >= base])


def _ranks(things: Sequence[Any], kind: Callable[[Any], Key]) -> dict[int, Key]:
    """What tells each from others, alike in every layer: its kind, and how many of that come before it."""
    counted: dict[Key, int] = {}
    found = dict[int, Key]()
    for thing in things:
        own = kind(thing)
        counted[own] = counted.get(own, 0) + 1
        found[thing.number] = (*own, counted[own])
    return found


def _without_layer(node: GraphNode) -> str:
    return re.sub(r"-?[0-9]+", "", node.label or node.name)


def _without_numbers(name: str) -> str:
    return re.sub(r"[0-9]+", "", name)


def _at(op: TorchOp) -> str:
    return f" ({op.line})" if op.line is not None else ""


def _with_params(params: bytes, n: Op) -> Op:
    return replace(n, params=params)


def _parts_of(x: Array, size: int) -> Iterator[tuple[str, Array]]:
    """A parameter of so many values, or the parts of one that has two or three times as many."""
    if x.size == size:
        yield "{}", x
    for count in (2, 3):
        if x.size == count * size:
            for axis in [axis for axis in range(x.ndim) if x.shape[axis] % count == 0]:
                for number, part in enumerate(np.split(x, count, axis)):
                    yield f"part {number + 1} of {count} of {{}}", part
                for number in range(count):
                    yield f"every {count}th of {{}} from {number} on", x.take(range(number, x.shape[axis], count), axis)


def _with(slot: int, values: Array) -> Callable[[Op], Op]:
    """An op that reads other values of a weight."""

    def altered(n: Op) -> Op:
        shape = (1, *[1] * (4 - values.ndim), *values.shape)
        sources = [Operand(values.reshape(shape)) if i == slot else source for i, source in enumerate(n.sources)]
        return replace(n, sources=tuple(sources))

    return altered
