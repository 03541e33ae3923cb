"""llama.cpp's nodes and a model's ops, lined up by their values: no names are needed.

A node and an op are one thing if they have the same numbers, in whatever order of axes, heads or channels. What one
side fuses and the other does not (a product and its bias, additions in another order) lies between two that are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ggml.graph import LOOKS, WRITES, Graph, GraphNode
from llamadiff.port.torch_ops import TorchRun
from llamadiff.trace import taps

Array = NDArray[Any]
SAME = 1e-11  # NMSE of sorted values: float32's rounding stays a hundred times below
COMPUTES_NOTHING = (*LOOKS, *WRITES, "GET_ROWS", "NONE")


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


def computes(node: GraphNode) -> bool:
    """Whether a node makes new values."""
    return node.op not in COMPUTES_NOTHING


def align(graph: Graph, values: Mapping[int, Array], run: TorchRun, ends: Mapping[int, int]) -> Pairs:
    """Line up all nodes that compute something. Of ops with the same values, that is taken which comes next.

    ``ends``: nodes that are what a layer reads, by its number, and after these what the head reads, and the logits.
    Such a node is one with the op that made that, or with none.
    """
    by_size: dict[int, list[tuple[int, Array]]] = {}
    for op in run.ops:
        by_size.setdefault(op.values.size, []).append((op.number, profile(op.values)))
    pairs: dict[int, int] = {}
    for node in graph.nodes:
        if not computes(node) and node.number not in ends:
            continue
        if node.number in ends:
            made = run.ops[run.ends[ends[node.number]]].values.ravel()
            own = values[node.number].ravel()
            if made.size == own.size and distance(own, made) <= SAME:
                pairs[node.number] = run.ends[ends[node.number]]
            continue
        own = profile(seen_of(node, values[node.number], len(graph.tokens)))
        after = max((pairs[number] for number in computed_before(graph, node) if number in pairs), default=-1)
        alike = [number for number, other in by_size.get(own.size, ()) if is_same(own, other)]
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


def seen_of(node: GraphNode, values: Array, n_tokens: int) -> Array:
    """A node's values without those of keys that are padding."""
    known = taps.parse(str(node.label))
    return values[..., :n_tokens] if known is not None and known.causal else values


def profile(values: Array) -> Array:
    """The same for any order: what is hidden (-inf) counts as zero, as it does where it was never computed."""
    flat = np.asarray(values, np.float64).ravel()
    return np.sort(np.where(np.isfinite(flat), flat, 0.0))


def computed_before(graph: Graph, node: GraphNode) -> set[int]:
    """The nodes that compute what a node reads, through those that only look."""
    found, waiting = set[int](), list(graph.reads(node))
    while waiting:
        other = graph.by_number.get(waiting.pop())
        if other is None or other.number in found:
            continue
        if computes(other):
            found.add(other.number)
        else:
            waiting += graph.reads(other)
    return found
