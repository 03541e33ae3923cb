"""A model lined up with llama.cpp's graph, layer by layer, and on from each place where they part.

Each layer of the model reads what llama.cpp's layer read: an error in one is not inherited by the next. Where the graph
parts from the model, its node is given what the model has in its place, and what follows in the layer is computed
again. That it is the right place, and the right values, is shown by what follows: it is the model's. So several
mistakes show in one layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from llamaref import Weights
from numpy.typing import NDArray

from llamadiff.ext.graph.engine import Alter
from llamadiff.ext.graph.graph import Graph, GraphNode
from llamadiff.ext.port.alignment import (
    SAME,
    ByValue,
    Order,
    Pairs,
    align,
    computed_before,
    computes,
    distance,
    name_of,
    reached,
    read_by,
    seen_of,
    whole_of,
)
from llamadiff.ext.port.departures import Departure, departures, ends_of, parts_of, sum_of, without_head
from llamadiff.ext.port.graph_values import Again
from llamadiff.ext.port.layout import Layout, Moved, layouts, nearest_layout, sorted_columns, sorted_rows
from llamadiff.ext.port.otherwise import Key, Search, Spot, StandIn
from llamadiff.ext.port.torch_ops import TorchOp, logits_of, recorded
from llamadiff.result.diagnosis import Cause
from llamadiff.trace import taps

Array = NDArray[Any]
ROUNDS = 8  # places one after another in a layer
TRIED = 24  # ops that may stand in a node's place
INPUT = "DUP"  # the op of the node that stands for what goes into an encoder


Edits = Callable[[Spot], Iterator[tuple[Cause, Mapping[int, Alter]]]]  # known bugs at a node


@dataclass(frozen=True)
class Departed:
    """A place, and what the model has there, if anything was shown to stand there; ``own`` is what the graph has."""

    place: Spot
    model: StandIn | None = None
    own: Array | None = None

    @property
    def departure(self) -> Departure:
        return self.place.departure

    @property
    def op(self) -> TorchOp | None:
        return None if self.model is None else self.model.op

    @property
    def values(self) -> Array | None:
        return None if self.model is None else self.model.values

    @property
    def fused(self) -> int:
        """How many of the place's nodes the model's op stands for."""
        return 1 if self.model is None else self.place.nodes.index(self.model.node) + 1

    @property
    def error(self) -> float:
        """NMSE of the node against the model; NaN without its values."""
        if self.values is None or self.own is None:
            return float("nan")
        return distance(self.own.ravel(), self.values.ravel())


@dataclass(frozen=True)
class Lineup:
    """``nodes``: how many compute something, and how many of these are one with an op, or lie between such.

    ``logits``: NMSE of the graph's against the model's own. ``mended``: of the parts that part from the model, how many
    give what the model does once each node that is told of has the model's values, and how many there are.
    ``sizes``: how many values the graph gives in the end, and how many the model.
    """

    departed: Sequence[Departed]
    nodes: int
    aligned: int
    inside: int
    logits: float
    mended: tuple[int, int] = (0, 0)
    sizes: tuple[int, int] = (0, 0)

    @property
    def apart(self) -> int:
        """Nodes that part from the model, or follow what parts in their layer."""
        return self.nodes - self.aligned - self.inside


class LiningUp:
    """One model and one graph; ``values`` by node, which are mended where they part from the model's."""

    def __init__(
        self, model: Any, graph: Graph, weights: Weights, values: Mapping[int, Array], n_layer: int, edits: Edits
    ) -> None:
        self.model_logits = logits_of(model, graph.tokens).ravel()  # first: it sets up what a run needs
        self.model, self.values = model, dict(values)
        self.graph = graph = without_head(graph, values, n_layer, self.model_logits.size)
        self.parameters = {name: x.detach().float().numpy() for name, x in model.named_parameters()}
        self.ends = ends_of(graph, n_layer)
        self.parts = parts_of(graph, self.ends)
        self._before = dict[int, set[int]]()
        self.order = self._order()
        self.given = {layer: self.order.of_model(values[number]) for number, layer in self.ends.items()
                      if layer <= n_layer}  # fmt: skip
        self.logits = values[graph.nodes[-1].number].ravel()
        self.again, self.edits = Again(graph, weights), edits
        self.given_on: dict[int, Array] = {}  # what ends a part, mended: the next one reads llama.cpp's
        self._keys: list[Key] = []
        self._places: dict[tuple[str, str], tuple[Any, ...]] = {}  # kind of node -> where its op is

    def run(self) -> Lineup:
        """Line up until nothing new parts."""
        self.model_run = recorded(self.model, self.graph.tokens, self.given)
        self.known = ByValue(self.model_run)
        self.search = Search(self.graph, self.again, self.known, self.parameters)
        found, ended = list[Departed](), set[int]()  # parts in which nothing can be told of what follows
        self.alignment = self._aligned()
        counts = self._counts()
        for _ in range(ROUNDS):
            left = departures(self.graph, self.model_run, self.alignment, self.ends, self.parts, self._is_summed)
            new = [each for each in left if all(each.node is not other.departure.node for other in found)]
            new = [each for each in new if each.part not in ended]
            sums = [each for each in new if sum_of(self.graph, each.node) is not None]  # after what they may add
            others = {each.part for each in new if each not in sums}
            new = [each for each in new if each not in sums or each.part not in others]
            if not new:
                break
            for part in dict.fromkeys(each.part for each in new):
                departed = self._all_departed([each for each in new if each.part == part])
                ended |= {part} if departed[0].values is None else set()
                found += departed
                self._mend(part, departed)
            self.alignment = self._aligned()
        same_size = self.model_logits.size == self.logits.size
        off = distance(self.logits, self.model_logits) if same_size else float("nan")
        order = {node.number: place for place, node in enumerate(self.graph.nodes)}
        found.sort(key=lambda each: order[each.departure.node.number])
        parted = {each.departure.part for each in found}
        mended = {self.ends[number] for number in self.alignment.pairs if number in self.ends} & parted
        if off <= SAME and mended < parted:  # the lining up did not get on: what ends as the model does parts nowhere
            found, parted, mended = [], set(), set()
        sizes = int(self.logits.size), int(self.model_logits.size)
        return Lineup(found, *counts, off, (len(mended), len(parted)), sizes)

    def otherwise(self, place: Spot, keys: list[Key]) -> StandIn | None:
        """What the model does there, where no known bug says it. ``keys`` hold elsewhere, and grow."""
        found = next((each for key in (*keys, None) if (each := self.search.of(place, key)) is not None), None)
        if found is not None and found.key is not None and found.key not in keys:
            keys.append(found.key)
        return found

    def unread(self, departed: Departed) -> str | None:
        """By what the model's values are the node's; or what it reads there, and no node does; or what it computes."""
        if departed.values is not None and departed.own is not None:
            own, theirs = departed.own.ravel().astype(np.float64), departed.values.ravel().astype(np.float64)
            factor = float(own @ theirs) / (float(own @ own) or 1.0)
            if distance(factor * own, theirs) <= SAME:
                return f"gives {factor:.6g} times what llama.cpp's graph gives"
        return self.search.unread(departed.place, departed.op)

    def _is_summed(self, node: GraphNode) -> bool:
        """Whether the model adds what a node adds, and what is added to it then, in another order."""
        terms = sum_of(self.graph, node)
        if terms is None:
            return False
        a, b, c = (self.values[number] for number in terms)
        return any(self.known.alike(x + c) for x in (a, b) if x.shape == c.shape)

    def _mend(self, part: int, departed: Sequence[Departed]) -> None:
        """Give nodes what the model has in their places, and what follows in their part what it then is."""
        changed = {
            each.model.node.number: self._whole(each.model)
            for each in departed
            if each.model is not None and each.model.values is not None
        }
        for number, x in self.again.following(self.values, changed, self.parts[part]).items():
            (self.given_on if number in self.ends else self.values)[number] = x

    def _aligned(self) -> Pairs:
        return align(self.graph, {**self.values, **self.given_on}, self.known, self.ends, self.order)

    def _order(self) -> Order:
        """That of the rows of an encoder: what the first layer reads shows it, or what that is computed from."""
        if not self._has_input():
            return Order()
        run = recorded(self.model, self.graph.tokens, {})
        known, wanted = ByValue(run), run.ops[run.ends[0]].values
        rows = wanted.size // wanted.shape[-1]
        fed = {node.number for node in self._fed()}
        for node in [node for node in reversed(self.parts[0]) if node.number in fed]:
            own = self.values[node.number]
            end = [wanted] if self.ends.get(node.number) == 0 else []
            for op in (*end, *(run.ops[number].values for number in known.alike(own))):
                if op.ndim > 1 and own.size == op.size and own.size // own.shape[-1] == rows:
                    if own.shape[-1] == op.shape[-1] and distance(own.ravel(), op.ravel()) <= SAME:
                        return Order()
                    found = sorted_rows(own, op)
                    if found is not None:
                        return Order(found)
        return Order()

    def _whole(self, choice: StandIn) -> Array:
        """What a node has, with what is chosen in its place."""
        return whole_of(choice.node, choice.given, self.values, self.graph)

    def _has_input(self) -> bool:
        return self.graph.nodes[0].op == INPUT

    def _counts(self) -> tuple[int, int, int]:
        nodes = {node.number: node for node in self._fed() if computes(node)}
        aligned = [node for number, node in nodes.items() if number in self.alignment.pairs]
        before = {number for node in aligned for number in self._span_before(node)}
        return len(nodes), len(aligned), len(before & nodes.keys())

    def _fed(self) -> Iterator[GraphNode]:
        """The nodes that are computed from what is fed: a state is there before any."""
        fed = set[int]()
        begins = (INPUT,) if self._has_input() else ("GET_ROWS",)
        for node in self.graph.nodes:
            if node.op in begins or fed & set(self.graph.reads(node)):
                fed.add(node.number)
                yield node

    def _span_before(self, node: GraphNode) -> set[int]:
        def lost(number: int) -> set[int]:
            before = computed_before(self.graph, self.graph.by_number[number]) - set(self.ends)
            return before - set(self.alignment.pairs)

        return reached(lost(node.number), lost)

    def _all_departed(self, apart: Sequence[Departure]) -> list[Departed]:
        """Departures of one part, each with the op in its place; of those that have none, none while others have: what
        these make of the layer may explain them.
        """
        for each in apart:
            place = self._place_of(each, [each.node])
            fewer = self.search.chooses(place)
            if fewer is not None:
                return [Departed(place, fewer)]
        chosen = {each: found for each in apart if (found := self._found(each)) is not None}
        for op in dict.fromkeys(each.node.op for each in apart):
            alike = [each for each in apart if each.node.op == op and each not in chosen]
            if len(alike) > 1 and op != "MUL_MAT_ID":  # models have experts' rows in other orders
                chosen |= self._together(alike)
        for each in [each for each in apart if each not in chosen]:
            taken = frozenset(choice.op.number for choice in chosen.values() if choice.op is not None)
            chosen |= {} if (found := self._searched(each, taken)) is None else {each: found}
        if len(chosen) > 1:
            alone = [each for each, choice in chosen.items() if self._explains_all(each.part, choice)]
            chosen = {each: chosen[each] for each in alone[:1]} or chosen
        return [self._departed(each, chosen.get(each)) for each in apart if each in chosen or not chosen]

    def _explains_all(self, part: int, choice: StandIn) -> bool:
        """Whether a part gives what the model does, once one node has its values."""
        changed = {choice.node.number: self._whole(choice)}
        now = self.again.following(self.values, changed, self.parts[part])
        return any(number in self.ends and self._is_known(number, x) for number, x in now.items())

    def _together(self, alike: Sequence[Departure]) -> dict[Departure, StandIn]:
        """Nodes that are shown by what reads all of them, as Q and K are: the same ops in turn."""
        first, *others = [self._choices(each, each.node) for each in alike]
        for place, choice in enumerate(first):
            same = [[other for other in choices if other.kind == choice.kind] for choices in others]
            rank = sum(before.kind == choice.kind for before in first[:place])
            if any(len(choices) <= rank for choices in same):
                continue
            together = (choice, *(choices[rank] for choices in same))
            if self._shown(alike[0].part, [together]) is not None:
                return dict(zip(alike, together, strict=True))
        return {}

    def _found(self, departure: Departure) -> StandIn | None:
        """What stands in a node's place, or in that of one which follows it, as what comes then shows."""
        chain = list(self._chain(departure.node))
        for node in chain:
            choices = self._choices(departure, node)
            place = self._places.get(kind_of(departure.node))
            known = [(each,) for each in choices if each.op and _place(each.op, departure) == place]
            found = self._shown(departure.part, known) or self._shown(departure.part, [(each,) for each in choices])
            if found is not None:
                op = found[0].op
                self._places.setdefault(kind_of(departure.node), _place(op, departure) if op else ())
                return found[0]
        for node in self._following(departure.node):
            found = self._shown(departure.part, [(each,) for each in self._left_out(departure, node)])
            if found is not None:
                return found[0]
        return None

    def _searched(self, departure: Departure, taken: frozenset[int]) -> StandIn | None:
        """What the model does there that no op alone shows."""
        place = replace(self._place_of(departure, list(self._chain(departure.node))), taken=taken)
        otherwise = self.otherwise(place, self._keys)
        if otherwise is None or otherwise.op is None or otherwise.values is None:
            return self._by_a_known_bug(departure)
        return otherwise

    def _by_a_known_bug(self, departure: Departure) -> StandIn | None:
        """The known bug at a node after which most is as in the model."""
        node, best, most = departure.node, None, 0
        after = self._after([node])
        for cause, altered in self.edits(self._place_of(departure, [node])) if after else ():
            with suppress(ValueError, IndexError):
                now = self.again.following(self.values, {}, self.parts[departure.part], altered)
                gained = sum(self._is_known(number, now[number]) for number in after if number in now)
                if gained > most and node.number in now:
                    seen = seen_of(node, now[node.number], self.graph)
                    best, most = StandIn(node, None, seen, cause=cause), gained
        return best

    def _chain(self, node: GraphNode) -> Iterator[GraphNode]:
        """A node, and those after it that do no more than add or multiply a weight to what it gave."""
        yield node
        while True:
            users = [other for other in self.graph.nodes if computes(other) and node.number in self._read_by(other)]
            if len(users) != 1 or users[0].op not in ("ADD", "MUL", "ADD_ID"):
                return
            beside = [number for number in users[0].sources if number is not None and number != node.number
                      and number not in self.graph.by_number]  # fmt: skip
            beside += self._read_by(users[0]) - {node.number}
            if not all(number in self.graph.leaves for number in beside):
                return
            node = users[0]
            yield node

    def _read_by(self, node: GraphNode) -> set[int]:
        """What a node reads: of an encoder's through what only looks, as the patches' bias is after a transposition."""
        if not self._has_input():
            return {*self.graph.reads(node)}
        if node.number not in self._before:
            self._before[node.number] = computed_before(self.graph, node)
        return self._before[node.number]

    def _departed(self, departure: Departure, chosen: StandIn | None) -> Departed:
        nodes = tuple(self._chain(departure.node))
        if chosen is not None and chosen.node not in nodes:
            nodes = (*nodes, chosen.node)
        place = self._place_of(departure, nodes)
        if chosen is None:
            return Departed(place)
        return Departed(place, chosen, self._own(chosen.node))

    def _place_of(self, departure: Departure, nodes: Sequence[GraphNode]) -> Spot:
        part = departure.part
        return Spot(departure, nodes, self.parts[part], dict(self.values), self.alignment, self._moved(part))

    def _own(self, node: GraphNode) -> Array:
        return seen_of(node, self.values[node.number], self.graph)

    def _choices(self, departure: Departure, node: GraphNode) -> list[StandIn]:
        """What may stand in a node's place: what it reads itself, and the model's ops, the nearest first."""
        run, own = self.model_run, self._own(node)
        if node.number in self.ends:
            op = run.ops[run.ends[self.ends[node.number]]]
            same_size = op.values.size == own.size
            if not same_size:
                return []
            is_last = self.ends[node.number] > len(run.ends) - 2
            values = (Order() if is_last else self.order).of_node(op.values, own.shape)
            return [StandIn(node, op, values.astype(np.float32))]
        sources = [self._own(self.graph.by_number[number]) for number in computed_before(self.graph, node)
                   if number in self.alignment.pairs]  # fmt: skip
        found, moved = [], self._moved(departure.part)
        for op in departure.ops:
            order = self._order_by(sources, own, op) or nearest_layout(own, op.values, moved)
            if order is not None:
                found.append(StandIn(node, op, order.of_node(op.values, own.shape)))
        found.sort(key=lambda each: distance(each.given.ravel(), own.ravel()))
        return [*self._left_out(departure, node), *found[:TRIED]]

    def _left_out(self, departure: Departure, node: GraphNode) -> Iterator[StandIn]:
        """That the model goes on with what the graph computes a node from, or with another node before it."""
        own, run, part = self._own(node), self.model_run, self.parts[departure.part]
        read = read_by(self.graph, departure.node)
        others = [each for each in part if each.number < node.number and computes(each) and each not in read]
        for source in (*read, *others):
            values = self._own(source)
            if values.size != own.size or source.number == node.number:
                continue
            end = self.ends.get(source.number)
            ops = self.known.alike(values) if end is None else [run.ends[end]]
            if ops:
                start = source if source in read else departure.node
                without = _between(self.graph, start, node, part)
                without = without if source in read else [departure.node, *without]
                shown = ", ".join(f"{other.op} {word_of(other)}".rstrip() for other in without)
                says = f"has no {shown}: it goes on with {name_of(source)}"
                yield StandIn(node, run.ops[ops[0]], values.reshape(own.shape), says)

    def _moved(self, part: int) -> Moved:
        """The orders of rows and columns in which the model has what a part's nodes have."""
        rows, columns = list[Array](), list[Array]()
        for node in self.parts[part]:
            if node.number not in self.alignment.pairs or node.number in self.ends:
                continue
            own, op = self._own(node), self.model_run.ops[self.alignment.pairs[node.number]].values
            for kept, order_of in ((rows, sorted_rows), (columns, sorted_columns)):
                order = order_of(own, op) if op.dtype.kind == "f" and op.ndim else None
                if order is not None and not any(np.array_equal(order, other) for other in kept):
                    kept.append(order)
        return Moved(rows, columns)

    def _following(self, node: GraphNode) -> Iterator[GraphNode]:
        """The nodes that are computed from one, and are lost with it; not what ends the layer."""
        for number in sorted(self._after([node]) - set(self.ends)):
            yield self.graph.by_number[number]

    def _order_by(self, sources: Sequence[Array], node: Array, op: TorchOp) -> Layout | None:
        """The order in which an op of the same shape has the values of a node that is read."""
        for source in sources:
            if source.size != node.size or source.size != op.values.size:
                continue
            shaped = source.reshape(node.shape)
            for number in self.known.alike(source):
                other = self.model_run.ops[number].values
                if other.shape != op.values.shape:
                    continue
                found = [each for each in layouts(node.shape, other) if each.holds(shaped, other)]
                if found:
                    return found[0]
        return None

    def _shown(self, part: int, choices: Sequence[tuple[StandIn, ...]]) -> tuple[StandIn, ...] | None:
        """Those after which most is as in the model. Of a node that ends a layer, or that nothing follows, the first.

        What has the very values that were chosen shows nothing.
        """
        best, most = None, 0
        for together in choices:
            nodes = [choice.node for choice in together]
            after = self._after(nodes)
            if nodes[0].number in self.ends or not after:
                return together
            changed = {choice.node.number: self._whole(choice) for choice in together}
            now = self.again.following(self.values, changed, self.parts[part])
            same = {number for choice in together for number in self.known.alike(choice.given)}
            gained = sum(self._is_known(number, now[number], same) for number in after if number in now)
            if gained > most:
                best, most = together, gained
        return best

    def _is_known(self, number: int, values: Array, but: Collection[int] = ()) -> bool:
        """Whether a node's values are the model's, and not those of some ops alone."""
        if number in self.ends:
            return self.order.holds(values, self.model_run, self.ends[number])
        found = self.known.alike(seen_of(self.graph.by_number[number], values, self.graph))
        return not set(found) <= set(but)

    def _after(self, nodes: Sequence[GraphNode]) -> set[int]:
        """The nodes that are computed from some, up to the layer's end, and are lost with them."""
        own = {node.number for node in nodes}
        found = set(own)
        for other in self.graph.nodes:
            if other.number not in self.ends and found & set(self.graph.reads(other)):
                found.add(other.number)
        ends = {number for number in self.ends if found & set(self.graph.reads(self.graph.by_number[number]))}
        return {
            number
            for number in (found | ends) - own - set(self.alignment.pairs)
            if computes(self.graph.by_number[number]) or number in ends
        }


def _between(graph: Graph, source: GraphNode, node: GraphNode, nodes: Sequence[GraphNode]) -> list[GraphNode]:
    """The nodes that compute one from another, without the first."""
    from_it, to_it = {source.number}, {node.number}
    for other in nodes:
        if from_it & set(graph.reads(other)):
            from_it.add(other.number)
    for other in reversed(nodes):
        if other.number in to_it:
            to_it |= set(graph.reads(other))
    return [other for other in nodes if other.number in from_it & to_it - {source.number} and computes(other)]


def kind_of(node: GraphNode) -> tuple[str, str]:
    """A node without its layer."""
    return node.op, word_of(node)


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
