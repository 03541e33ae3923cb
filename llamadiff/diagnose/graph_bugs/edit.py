"""Bugs as edits of graph nodes: the site that a bug looks at, what it changes there, and how it is registered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.diagnose.case import Case, NotRecordedError
from llamadiff.diagnose.registry import BUGS, Change, define, extend
from llamadiff.diagnose.solve import least_squares, solve
from llamadiff.diagnose.sought import Sought
from llamadiff.diagnose.subgraph import Subgraph
from llamadiff.ggml.engine import Alter, GraphEngine, Then
from llamadiff.ggml.graph import LOOKS, GraphNode, Leaf
from llamadiff.ggml.op import Op, Operand
from llamadiff.trace.taps import layer_of

Array = NDArray[Any]
SLOW = 1 << 24  # weights behind a node, beyond which constants are not solved for but tried


@dataclass(frozen=True)
class Edit:
    """What a node computes instead, as a clause without its subject; ``more`` are other nodes that change with it.

    ``variant`` tells the edit from the bug's others.
    """

    alter: Alter
    says: str
    variant: str = ""
    more: Mapping[int, Alter] = field(default_factory=dict)


@dataclass(frozen=True)
class Constant:
    """An edit with a constant to solve for; ``own`` is the model's, ``familiar`` are values that are tried for it.

    ``linear``: of a factor, which may be negative where the tap follows it in proportion.
    """

    make: Callable[[float], Alter]
    sought: Sought
    own: float = 0.0
    familiar: tuple[float, ...] | None = None
    variant: str = ""
    more: Callable[[float], Mapping[int, Alter]] = lambda value: {}
    linear: bool = False


@dataclass(frozen=True)
class Site:
    """A node of a subgraph, with what bugs ask about it."""

    node: GraphNode
    sub: Subgraph
    case: Case

    @property
    def engine(self) -> GraphEngine:
        return self.sub.engine

    @property
    def floats(self) -> Array:
        return np.frombuffer(self.node.params, np.float32)

    @property
    def ints(self) -> Array:
        return np.frombuffer(self.node.params, np.int32)

    def number(self, place: int) -> int | None:
        """The tensor that is the node's source at a place."""
        return self.node.sources[place] if place < len(self.node.sources) else None

    def leaf(self, place: int) -> Leaf | None:
        """The leaf at a place, if there is one."""
        number = self.number(place)
        return self.engine.graph.leaves.get(number) if number is not None else None

    def weight(self, place: int) -> str:
        """The name of the file's tensor at a place; empty if none is there."""
        leaf = self.leaf(place)
        return leaf.name if leaf is not None and leaf.number not in self.engine.graph.given else ""

    def source(self, place: int) -> GraphNode | None:
        """The node at a place, following view-like nodes, and picked rows, to their base."""
        number = self.number(place)
        node = self.engine.graph.by_number.get(number) if number is not None else None
        while node is not None and self.shows(node) and node.sources and node.sources[0] is not None:
            below = self.engine.graph.by_number.get(node.sources[0])
            if below is None:
                break
            node = below
        return node

    def source_of_view(self) -> GraphNode | None:
        """The node whose memory this one looks into."""
        return self.engine.graph.by_number.get(self.node.view[0]) if self.node.view is not None else None

    def shows(self, node: GraphNode) -> bool:
        """Whether a node shows another's values as they are: all, or the rows that a run is asked for."""
        picks = node.op == "GET_ROWS" and {node.sources[1]} & set(self.engine.graph.given)
        return node.op in LOOKS or bool(picks and not self.at(node).weight(0))

    def at(self, node: GraphNode) -> Site:
        """Another node of the same subgraph."""
        return replace(self, node=node)

    def direct(self, place: int) -> str:
        """The op of the node that is right at a place; empty for a leaf."""
        number = self.number(place)
        node = self.engine.graph.by_number.get(number) if number is not None else None
        return node.op if node is not None else ""

    def shape(self, place: int) -> tuple[int, ...]:
        """The shape of what is at a place."""
        number, graph = self.number(place), self.engine.graph
        assert number is not None
        return tuple((graph.by_number.get(number) or graph.leaves[number]).shape)

    def users(self) -> list[GraphNode]:
        """The graph's nodes that read this one, directly or through nodes that show it."""
        found, out = {self.node.number}, []
        for node in self.engine.graph.nodes:
            if not found.isdisjoint(node.sources):
                if self.shows(node):
                    found.add(node.number)
                else:
                    out.append(node)
        return out

    def own(self, node: GraphNode | None) -> bool:
        """Whether a node is one that is computed here, so that it can be changed too."""
        return node is not None and self.sub.computes(node) and node in self.sub.nodes

    def vector(self, name: str) -> Array:
        """A tensor of the file."""
        return self.engine.w.whole(name)

    def has(self, name: str) -> bool:
        return name in self.engine.w

    def others(self, name: str) -> Iterator[tuple[str, str]]:
        """Tensors of the file with the shape of one: name, and the same counted from its layer."""
        shape = self.engine.w.shape(name)
        layer = _layer(name)
        for other in self.case.run.model.tensors:
            if other != name and self.engine.w.shape(other) == shape:
                own = _layer(other)
                stem = other.split(".", 2)[-1]
                yield other, f"{own - layer:+d}.{stem}" if own is not None and layer is not None else other

    def recorded(self, shape: tuple[int, ...]) -> Iterator[tuple[str, Array]]:
        """Recorded taps before this node with as many values as a shape has, the nearest first: name and values."""
        for label, node in reversed(self.engine.graph.labelled.items()):
            if node.number < self.node.number and np.prod(node.shape) == np.prod(shape) and "(" not in label:
                with suppress(NotRecordedError):
                    yield label, self.case.values(label).reshape(1, *shape)

    @cached_property
    def layer(self) -> int | None:
        """The layer of the node: that of the first named one from it on; None outside the layers."""
        nodes = (node for node in self.engine.graph.nodes if node.number >= self.node.number)
        return next((layer_of(node.label) for node in nodes if node.label is not None), None)

    @cached_property
    def shown(self) -> str:
        """The first tap that this node, or one that follows it in the graph, is."""
        nodes = (node for node in self.engine.graph.nodes if node.number >= self.node.number)
        return next((node.label for node in nodes if node.label is not None and "(" not in node.label), "")

    def nearest(self, op: str) -> GraphNode | None:
        """The node with an op that is nearest to this one, of its own layer if there is one."""
        found = [node for node in self.engine.graph.nodes if node.op == op]
        own = [node for node in found if node.label and layer_of(node.label) == self.layer]
        return min(own or found, key=lambda node: abs(node.number - self.node.number), default=None)

    def writer(self, cache: str) -> GraphNode | None:
        """What makes the rows that are put into a cache (``cache_k``) of this layer."""
        for node in self.engine.graph.nodes:
            leaf = self.engine.graph.leaves.get(node.view[0]) if node.op == "SET_ROWS" and node.view else None
            if leaf is not None and leaf.name == f"{cache}_l{self.layer}":
                return self.at(node).whole_source(0)
        return None

    def whole_source(self, place: int) -> GraphNode | None:
        """The node at a place, following view-like nodes as long as they show all values: not to a fused product."""
        by_number, number = self.engine.graph.by_number, self.number(place)
        node = by_number.get(number) if number is not None else None
        while node is not None and self.shows(node) and node.sources and node.sources[0] is not None:
            below = by_number.get(node.sources[0])
            if below is None or np.prod(below.shape) != np.prod(node.shape):
                break
            node = below
        return node

    def computed(self, node: GraphNode, x: Array) -> Array:
        """What another node, whose other sources are leaves, makes of values in its first source's place."""
        first = node.sources[0]
        assert first is not None
        shaped = replace(node, shape=x.shape[-4:])
        return self.engine.computed(shaped, {**self.engine.leaves(), first: x}, self.case.carrier)

    def named(self, place: int) -> str:
        """What is at a place, in words."""
        if self.weight(place):
            return self.weight(place)
        number = self.number(place)
        node = self.engine.graph.by_number.get(number) if number is not None else None
        while node is not None and (node.label is None or "(" in node.label) and node.sources:
            first = node.sources[0]
            below = self.engine.graph.by_number.get(first) if first is not None and self.shows(node) else None
            if below is None:
                break
            node = below
        return "one side" if node is None else str(node.label or node.name)

    @property
    def tap(self) -> str | None:
        """The first named tap that shows this node's result; None if that is the tap that is judged."""
        after = [self.node, *self.sub.after({self.node.number})]
        named = (str(node.label) for node in after if node.label and "(" not in node.label)
        first = next(named, self.case.tap.name)
        return None if first == self.case.tap.name else first


OtherOp = Callable[[Op], Op]
Edits = Callable[[Site], Iterator[Edit | Constant]]


def _layer(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blk" else None


ANY = "any"  # op, in the place of its name
EDITS: list[tuple[str, tuple[str, ...], Edits]] = []  # bug, ops and edits, as they are registered


def at_nodes(
    *ops: str, of: str = "", fix: str = "", source: str = "", general: bool = False
) -> Callable[[Edits], Edits]:
    """Register a function that changes nodes with these ops: as one more way to have the bug ``of``, or as a new bug.

    A new bug has the function's name, and its docstring says what it is.
    """

    def register(edits: Edits) -> Edits:
        def changes(r: Subgraph, case: Case) -> Iterator[Change]:
            if not (BUGS[name].harmless and r.is_span(case)):  # what rounds somewhere would excuse what is wrong there
                yield from _changes(r, case, ops, edits)

        name, about = of or edits.__name__.replace("_", "-"), " ".join((edits.__doc__ or "").split())
        EDITS.append((name, ops, edits))
        if of:
            extend(of, ops, changes)
        else:
            define(name, about, fix, source, general, edits.__module__, ops, changes)
        return edits

    return register


ALONE = "at "
Place = tuple[Site, Edit | Constant]


def _changes(r: Subgraph, case: Case, ops: tuple[str, ...], edits: Edits) -> Iterator[Change]:
    """The edits of all nodes: the same one wherever it can be, or at one kind of op, then at each node alone."""
    found: dict[str, list[Place]] = {}
    for site in (Site(node, r, case) for node in r.nodes if {node.op, ANY} & set(ops) and r.computes(node)):
        for edit in edits(site):
            found.setdefault(edit.variant, []).append((site, edit))
    for variant, places in found.items():
        for where, some in _scopes(places).items():
            if case.everywhere in (None, not where.startswith(ALONE)):
                yield from _applied(r, case, some, f"{variant} {where}".strip())


def _scopes(places: list[Place]) -> dict[str, list[Place]]:
    """Which places have an edit together: all, those of Q and K, of Q, K and V, of one word, each alone."""
    scopes = {"": places}
    for letters in ("QK", "QKV"):
        some = [place for place in places if place[0].shown[:1] in letters]
        if len(some) > 1 and len(some) not in map(len, scopes.values()):
            scopes[f"of {letters}"] = some
    for word in dict.fromkeys(_word(place) for place in places):
        some = [place for place in places if _word(place) == word]
        if 1 < len(some) < len(places):
            scopes[f"of {word}"] = some
    alone = {f"{ALONE}{number}": [place] for number, place in enumerate(places)} if len(places) > 1 else {}
    return scopes | alone


def _word(place: Place) -> str:
    return place[0].shown.rpartition("-")[0]


def _applied(r: Subgraph, case: Case, places: list[Place], variant: str) -> Iterator[Change]:
    first, edit = places[0]
    if isinstance(edit, Edit):
        yield Change(_with(r, places, 0.0), edit.says, variant, at=first.tap)
        return
    slow = _weights_after(r, {site.node.number for site, _ in places}) > SLOW
    how = replace(case, hurried=True) if slow else case
    build = partial(_with, r, places)
    values = least_squares(case, build) if edit.linear else []
    for value in values or solve(how, build, edit.sought, edit.familiar):
        yield Change(build(value), edit.sought.says(value, edit.own), variant, value, first.tap)


def _with(r: Subgraph, places: list[Place], value: float) -> Subgraph:
    altered = dict(r.altered)
    for site, edit in places:
        alter = edit.alter if isinstance(edit, Edit) else edit.make(value)
        more = edit.more if isinstance(edit, Edit) else edit.more(value)
        for number, other in ((site.node.number, alter), *more.items()):
            altered[number] = other if number not in altered else after(altered[number], other)
    return replace(r, altered=altered)


def _weights_after(r: Subgraph, numbers: set[int]) -> int:
    """How many weights are multiplied by from some nodes on."""
    total = 0
    for node in [*(node for node in r.nodes if node.number in numbers), *r.after(numbers)]:
        leaf = r.engine.graph.leaves.get(node.sources[0]) if node.sources and node.sources[0] is not None else None
        if leaf is not None and node.op in ("MUL_MAT", "MUL_MAT_ID") and leaf.number not in r.engine.graph.given:
            total += int(np.prod(leaf.shape))
    return total


# what an op is changed into


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


def times(place: int, factor: float) -> OtherOp:
    """An operand is multiplied by a constant."""
    return with_source(place, lambda n: n.x(place) * np.float32(factor))


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
