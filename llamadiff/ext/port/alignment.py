"""llama.cpp's nodes and a model's ops, lined up by their values: no names are needed.

A node and an op are one thing if they have the same numbers, in whatever order of axes, heads or channels. What one
side fuses and the other does not (a product and its bias, additions in another order) lies between two that are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.graph.graph import LOOKS, STORES, Graph, GraphNode
from llamadiff.ext.port.torch_ops import TorchRun
from llamadiff.trace import taps

Array = NDArray[Any]
SAME = 1e-11  # NMSE of sorted values: float32's rounding stays a hundred times below
ROUGHLY = 1e-4  # how far apart the sums of squares of such values may be
SCAN = "SSM_SCAN"
LEAVES_A_STATE = ("RWKV_WKV6", "RWKV_WKV7", "GATED_LINEAR_ATTN", "GATED_DELTA_NET")  # rows after those of the tokens
COMPUTES_NOTHING = (*LOOKS, *STORES, "GET_ROWS", "NONE")


@dataclass(frozen=True)
class Pairs:
    """``pairs``: the number of a node -> that of its op."""

    pairs: Mapping[int, int]

    def node_of(self) -> dict[int, list[int]]:
        """The other way round."""
        found: dict[int, list[int]] = {}
        for node, op in self.pairs.items():
            found.setdefault(op, []).append(node)
        return found


def name_of(node: GraphNode) -> str:
    """What a node is called."""
    return node.label or node.name


def computes(node: GraphNode) -> bool:
    """Whether a node makes new values."""
    return node.op not in COMPUTES_NOTHING


class ByValue:
    """The ops of a run, found by their numbers in whatever order."""

    def __init__(self, run: TorchRun) -> None:
        self.run = run
        self._by_size: dict[int, list[tuple[int, float]]] = {}
        self._sorted: dict[int, Array] = {}
        for op in run.ops:
            own = _finite(op.values)
            self._by_size.setdefault(own.size, []).append((op.number, float(own @ own)))

    def alike(self, values: Array) -> list[int]:
        """The numbers of those that have the same values, in their order."""
        own = _finite(values)
        size = float(own @ own)
        near = [number for number, other in self._by_size.get(own.size, ()) if abs(other - size) <= ROUGHLY * size]
        if not near:
            return []
        own.sort()
        return [number for number in near if is_same(own, self._profile(number))]

    def _profile(self, number: int) -> Array:
        """An op's values in order; sorted when they are asked for, which few are."""
        if number not in self._sorted:
            self._sorted[number] = profile(self.run.ops[number].values)
        return self._sorted[number]


@dataclass(frozen=True)
class Order:
    """``rows``: which of the model's rows each of llama.cpp's is, where both go through the layers in another order.

    So it is where a class token is the last of them, or windows come one after the other.
    """

    rows: Array | None = None

    def of_model(self, x: Array) -> Array:
        """llama.cpp's rows in the model's order."""
        if self.rows is None:
            return x
        found = np.empty((len(self.rows), x.size // len(self.rows)), x.dtype)
        found[self.rows] = x.reshape(found.shape)
        return found.reshape(x.shape)

    def of_node(self, x: Array, shape: tuple[int, ...]) -> Array:
        """The model's rows in llama.cpp's order."""
        return (x if self.rows is None else x.reshape(len(self.rows), -1)[self.rows]).reshape(shape)

    def holds(self, x: Array, run: TorchRun, end: int) -> bool:
        """Whether llama.cpp's values are what a layer reads in the model, or what it gives in the end."""
        made = run.ops[run.ends[end]].values
        own = x if end > len(run.ends) - 2 else self.of_model(x)
        return made.size == own.size and distance(own.ravel(), made.ravel()) <= SAME


def align(
    graph: Graph, values: Mapping[int, Array], known: ByValue, ends: Mapping[int, int], order: Order | None = None
) -> Pairs:
    """Line up all nodes that compute something. Of ops with the same values, that is taken which comes next.

    ``ends``: nodes that are what a layer reads, by its number, and after these what the head reads, and the logits.
    Such a node is one with the op that made that, or with none. ``order``: that of rows which go through the layers.
    """
    order = order or Order()
    pairs: dict[int, int] = {}
    for node in graph.nodes:
        if not computes(node) and node.number not in ends:
            continue
        if node.number in ends:
            run = known.run
            if order.holds(values[node.number], run, ends[node.number]):
                pairs[node.number] = run.ends[ends[node.number]]
            continue
        after = max((pairs[number] for number in computed_before(graph, node) if number in pairs), default=-1)
        alike = known.alike(seen_of(node, values[node.number], graph))
        if alike:
            pairs[node.number] = next((number for number in alike if number > after), alike[-1])
    return Pairs(pairs)


def is_same(a: Array, b: Array) -> bool:
    """Whether sorted values are the same but for rounding."""
    return distance(a, b) <= SAME


def distance(a: Array, b: Array) -> float:
    """NMSE of ``a`` against ``b``."""
    with np.errstate(all="ignore"):
        size = float(np.square(b).sum())
        gap = float(np.square(a - b).sum())
    return gap / size if size > 0 else (0.0 if gap == 0 else np.inf)


def seen_of(node: GraphNode, values: Array, graph: Graph) -> Array:
    """A node's values without those of keys that are padding, and without the state that it leaves behind them.

    They are no copy.
    """
    if node.op == SCAN:
        read = node.sources[1]
        shape = graph.by_number[read].shape if read in graph.by_number else node.shape
        return values.ravel()[: int(np.prod(shape))].reshape(shape)
    if node.op in LEAVES_A_STATE:
        return values.reshape(-1, values.shape[-1])[: len(graph.tokens)]
    known = taps.parse(str(node.label))
    return values[..., : len(graph.tokens)] if known is not None and known.causal else values


def whole_of(node: GraphNode, seen: Array, values: Mapping[int, Array], graph: Graph) -> Array:
    """A node with what is ``seen`` of it, and its own ``values`` where it has more: keys that are padding, a state."""
    own = values[node.number]
    if seen.size == own.size:
        return seen.reshape(own.shape)
    whole = own.copy()
    seen_of(node, whole, graph)[...] = seen
    return whole


def profile(values: Array) -> Array:
    """The same for any order: what is hidden (-inf) counts as zero, as it does where it was never computed."""
    return np.sort(_finite(values))


def _finite(values: Array) -> Array:
    flat = np.asarray(values, np.float64).ravel()
    return np.where(np.isfinite(flat), flat, 0.0)


def read_by(graph: Graph, node: GraphNode) -> list[GraphNode]:
    """The nodes that compute what a node reads, then those that it looks at these through, before a cache has them."""
    kept = {other.view[0] for other in graph.nodes if other.op in STORES and other.view is not None}
    found, looks, waiting, seen = list[GraphNode](), list[GraphNode](), [node], set[int]()
    while waiting:
        for number in graph.reads(waiting.pop(0)):
            other = graph.by_number.get(number)
            if other is None or number in seen or other.kind == "i32":
                continue
            seen.add(number)
            if computes(other):
                found.append(other)
                continue
            waiting.append(other)
            if other.op in ("VIEW", "GET_ROWS") and (other.view is None or other.view[0] not in kept):
                looks.append(other)
    return found + looks


def computed_before(graph: Graph, node: GraphNode) -> set[int]:
    """The nodes that compute what a node reads, through those that only look."""
    nodes = graph.by_number

    def before(number: int) -> Iterable[int]:
        return () if number not in nodes or computes(nodes[number]) else graph.reads(nodes[number])

    return {number for number in reached(graph.reads(node), before) if number in nodes and computes(nodes[number])}


def reached(start: Iterable[int], onward: Callable[[int], Iterable[int]]) -> set[int]:
    """All numbers to which ``onward`` leads from some, step by step, and these."""
    found = set(start)
    waiting = list(found)
    while waiting:
        new = set(onward(waiting.pop())) - found
        found |= new
        waiting += new
    return found
