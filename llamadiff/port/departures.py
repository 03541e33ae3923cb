"""Where two graphs part: the first nodes from which nothing that follows in their layer has values of the model's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from llamadiff.ggml.graph import Graph, GraphNode
from llamadiff.port.alignment import Pairs, computed_before, computes
from llamadiff.port.torch_ops import TorchOp, TorchRun
from llamadiff.trace import taps

Array = NDArray[Any]
SHOWN, FOLLOWED = 8, 400  # ops of the model that are told of; those that are looked at for it


@dataclass(frozen=True, eq=False)
class Departure:
    """``node`` has other values than the model, and what it reads has the model's: ``reads`` are the ops of these.

    ``ops`` are what the model computes of it, none of which any node has, in their order.
    """

    node: GraphNode
    layer: int | None
    reads: tuple[TorchOp, ...]
    ops: tuple[TorchOp, ...]


def departures(graph: Graph, run: TorchRun, alignment: Pairs, ends: Mapping[int, int]) -> list[Departure]:
    """In the graph's order. ``ends``: nodes that are what a layer reads (alignment.py)."""
    users = _users(graph)
    lost = {
        node.number
        for node in graph.nodes
        if (computes(node) or node.number in ends) and node.number not in alignment.pairs
    }
    lost = {number for number in lost if not _rejoins(number, users, alignment, ends)}
    found, passed, n_layer = [], 0, max(ends.values(), default=1) - 1
    for node in graph.nodes:
        passed += node.number in ends and ends[node.number] > 0
        layer = taps.layer_of(node.label or node.name.partition(" ")[0])
        if layer is None and passed < n_layer and ends.get(node.number) != 0:
            layer = passed
        before = computed_before(graph, node) - set(ends)
        if node.number in lost and not before & lost:
            reads = tuple(run.ops[number] for number in sorted(_aligned_before(graph, run, alignment, node, ends)))
            if reads or node.number in ends:
                found.append(Departure(node, layer, reads, tuple(_instead(run, alignment, reads))))
    return found


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
            if not op.looks:
                found.append(op)
            waiting.append(op.number)
    yield from sorted(found, key=lambda op: op.number)[:SHOWN]


def _users(graph: Graph) -> dict[int, list[int]]:
    users: dict[int, list[int]] = {}
    for node in graph.nodes:
        for number in graph.reads(node):
            users.setdefault(number, []).append(node.number)
    return users


def _rejoins(number: int, users: Mapping[int, Sequence[int]], alignment: Pairs, ends: Mapping[int, int]) -> bool:
    """Whether something that is computed from a node has the model's values, before the layer's end."""
    waiting, seen = [number], set[int]()
    while waiting:
        own = waiting.pop()
        if own in ends:
            continue
        for user in users.get(own, ()):
            if user in seen:
                continue
            seen.add(user)
            if user in alignment.pairs:
                return True
            waiting.append(user)
    return False


def _aligned_before(
    graph: Graph, run: TorchRun, alignment: Pairs, node: GraphNode, ends: Mapping[int, int]
) -> set[int]:
    """The ops that have the values which a node is computed from, through spans."""
    found, waiting, seen = set[int](), [node.number], set[int]()
    while waiting:
        own = graph.by_number.get(waiting.pop())
        for number in () if own is None else graph.reads(own):
            if number in seen:
                continue
            seen.add(number)
            if number in ends:
                found.add(run.ends[ends[number]])
            elif number in alignment.pairs:
                found.add(alignment.pairs[number])
            else:
                waiting.append(number)
    return found
