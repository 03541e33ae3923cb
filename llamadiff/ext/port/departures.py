"""Where two graphs part: the first nodes from which nothing that follows in their layer has values of the model's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from llamadiff.ext.graph.graph import Graph, GraphNode
from llamadiff.ext.port.alignment import Pairs, computed_before, computes, reached
from llamadiff.ext.port.torch_ops import TorchOp, TorchRun
from llamadiff.trace import taps

Array = NDArray[Any]
FINAL_NORM = "result_norm"
EYES = "layer_out"  # what ends a layer of clip.cpp's
CHOOSES = ("ARGSORT", "TOP_K")
SHOWN, FOLLOWED = 60, 600  # ops of the model that may stand in its place; those that are looked at for it


@dataclass(frozen=True, eq=False)
class Departure:
    """``node`` has other values than the model, and what it reads has the model's: ``reads`` are the ops of these.

    ``ops`` are what the model computes of it, none of which any node has, in their order. ``part``: 0 is what comes
    before the layers, 1 the first of them, and the last one the head.
    """

    node: GraphNode
    part: int
    layer: int | None
    reads: tuple[TorchOp, ...]
    ops: tuple[TorchOp, ...]


def departures(
    graph: Graph,
    run: TorchRun,
    alignment: Pairs,
    ends: Mapping[int, int],
    parts: Sequence[Sequence[GraphNode]],
    is_summed: Callable[[GraphNode], bool],
) -> list[Departure]:
    """In the graph's order. ``ends``: nodes that are what a layer reads (alignment.py). ``is_summed``: whether the
    model adds what a node adds in another order.
    """
    users = _users(graph)
    lost = {
        node.number
        for node in graph.nodes
        if (computes(node) or node.number in ends) and node.number not in alignment.pairs
    }
    lost = {number for number in lost if not _rejoins(graph, number, users, alignment, ends)}
    found = []
    n_layer = len(run.ends) - 2
    for part, nodes in enumerate(parts):
        layer = part - 1 if 1 <= part <= n_layer else None
        for node in nodes:
            before = computed_before(graph, node) - set(ends)
            if node.number in lost and not before & lost and is_summed(node):
                lost.remove(node.number)
            if node.number in lost and not before & lost:
                reads = tuple(run.ops[number] for number in sorted(_aligned_before(graph, run, alignment, node, ends)))
                if reads or node.number in ends:
                    found.append(Departure(node, part, layer, reads, tuple(_instead(run, alignment, reads))))
    return found


def ends_of(graph: Graph, n_layer: int) -> dict[int, int]:
    """Nodes that are what a layer reads, by its number; after the last, what the head reads, and the logits.

    They are called so, or else are what alone leads from one layer's tensors to the next one's; the first also where
    that is computed from what is called so: embeddings may be normalised before it (bloom).
    """
    last, (first, _) = graph.nodes[-1], next(_between_layers(graph, n_layer))
    names = {0: taps.input_of(0, graph.labelled), **{i + 1: f"{taps.RESIDUAL}-{i}" for i in range(n_layer)}}
    if names[n_layer] not in graph.labelled and FINAL_NORM in graph.labelled:
        names[n_layer] = FINAL_NORM  # what gets two names in llama.cpp keeps the later one
    if f"{EYES}-{n_layer - 1}" in graph.labelled:
        names = {i + 1: f"{EYES}-{i}" for i in range(n_layer)}
    found = {graph.labelled[name].number: layer for layer, name in names.items() if name in graph.labelled}
    found |= {first: 0} if 0 not in names else {}
    begins = next((number for number, layer in found.items() if layer == 0), None)
    if begins in reached([first], lambda number: _read_by(graph, number)):
        found = {first if number == begins else number: layer for number, layer in found.items()}
    if len(found) <= n_layer:
        found = dict(_between_layers(graph, n_layer))
    return found if last.number in found else {**found, last.number: n_layer + 1}


def without_head(graph: Graph, values: Mapping[int, Array], n_layer: int, size: int) -> Graph:
    """The graph up to its last node that has as many values as a model gives; all of it where none of the head has.

    A model that embeds texts has no head, and llama.cpp computes logits of its file all the same.
    """
    nodes, ends = graph.nodes, ends_of(graph, n_layer)
    after = {node.number for node in parts_of(graph, ends)[-1]} | {number for number, i in ends.items() if i == n_layer}
    given = [place for place, node in enumerate(nodes) if node.number in after and values[node.number].size == size]
    return replace(graph, nodes=nodes[: given[-1] + 1]) if given else graph


def _read_by(graph: Graph, number: int) -> tuple[int, ...]:
    return graph.reads(graph.by_number[number]) if number in graph.by_number else ()


def _between_layers(graph: Graph, n_layer: int) -> Iterator[tuple[int, int]]:
    """The nodes through which all goes that is computed after the tensors of one layer, and with the next one's."""
    first = list[int]()
    for layer in range(n_layer):
        reading = (place for place, node in enumerate(graph.nodes) if _reads_layer(graph, node, layer))
        first.append(next(reading, len(graph.nodes)))
    for layer, place in enumerate(first):
        known = (_passed(graph, at) for at in range(place, 0, -1))
        yield next((found for found in known if found is not None), graph.nodes[0].number), layer
    ended = max((place for place, node in enumerate(graph.nodes) if _reads_layer(graph, node, n_layer - 1)), default=0)
    known = (_passed(graph, at) for at in range(ended + 1, len(graph.nodes)))
    yield next((found for found in known if found is not None), graph.nodes[-1].number), n_layer


def _reads_layer(graph: Graph, node: GraphNode, layer: int) -> bool:
    leaves = (graph.leaves.get(-1 if number is None else number) for number in node.sources)
    begins = tuple(f"{part}blk.{layer}." for part in ("", "v.", "a."))
    return any(leaf is not None and leaf.name.startswith(begins) for leaf in leaves)


def _passed(graph: Graph, place: int) -> int | None:
    """The one node before a place that is read from there on; None where there are several."""
    before = {node.number for node in graph.nodes[:place]}
    read = {number for node in graph.nodes[place:] for number in graph.reads(node) if number in before}
    return read.pop() if len(read) == 1 else None


def parts_of(graph: Graph, ends: Mapping[int, int]) -> list[list[GraphNode]]:
    """The nodes before the layers, those of each, and the head's, in their order; each with the one that ends it."""
    parts: list[list[GraphNode]] = [[] for _ in range(max(ends.values(), default=0) + 1)]
    part = 0 if 0 in ends.values() else 1
    for node in graph.nodes:
        parts[part].append(node)
        part = ends.get(node.number, part - 1) + 1
    return parts


def _instead(run: TorchRun, alignment: Pairs, reads: Sequence[TorchOp]) -> Iterator[TorchOp]:
    """What the model makes of the same values: ops that no node has, in their order."""
    readers, known = run.readers(), alignment.node_of()
    waiting, seen, found = [op.number for op in reads], set[int](), list[TorchOp]()
    while waiting and len(seen) < FOLLOWED:
        number = waiting.pop(0)
        for op in readers.get(number, ()):
            if op.number in seen or op.number in known:
                continue
            seen.add(op.number)
            if not op.looks or any(run.ops[before].values.size != op.values.size for before in op.inputs):
                found.append(op)
            waiting.append(op.number)
    yield from sorted(found, key=lambda op: op.number)[:SHOWN]


def _users(graph: Graph) -> dict[int, list[int]]:
    users: dict[int, list[int]] = {}
    for node in graph.nodes:
        for number in graph.reads(node):
            users.setdefault(number, []).append(node.number)
    return users


def _rejoins(
    graph: Graph, number: int, users: Mapping[int, Sequence[int]], alignment: Pairs, ends: Mapping[int, int]
) -> bool:
    """Whether something that is computed from a node has the model's values, before the layer's end.

    That the same experts are chosen says nothing of the values that they were chosen by.
    """

    def after(own: int) -> Iterable[int]:
        return () if own in ends else [user for user in users.get(own, ()) if graph.by_number[user].op not in CHOOSES]

    return not alignment.pairs.keys().isdisjoint(reached([number], after) - {number})


def sum_of(graph: Graph, node: GraphNode) -> tuple[int, int, int] | None:
    """What a node adds, and what the addition adds that alone goes on with it; None where there is none.

    A model may add these in another order.
    """
    after = [other for other in graph.nodes if node.number in graph.reads(other)]
    if node.op != "ADD" or [other.op for other in after] != ["ADD"]:
        return None
    (first, second), others = node.sources[:2], [n for n in after[0].sources if n not in (None, node.number)]
    numbers = (first, second, *others)
    if len(numbers) != 3 or not all(number in graph.by_number for number in numbers):
        return None
    a, b, c = (number for number in numbers if number is not None)
    return a, b, c


def _aligned_before(
    graph: Graph, run: TorchRun, alignment: Pairs, node: GraphNode, ends: Mapping[int, int]
) -> set[int]:
    """The ops that have the values which a node is computed from, through spans."""
    aligned = {**alignment.pairs, **{number: run.ends[layer] for number, layer in ends.items()}}

    def before(number: int) -> Iterable[int]:
        own = graph.by_number.get(number)
        return () if own is None or number in aligned else graph.reads(own)

    return {aligned[number] for number in reached(graph.reads(node), before) if number in aligned}
