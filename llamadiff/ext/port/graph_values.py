"""The values of every node of llama.cpp's graph, computed anew; and some of them once more, with others changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from llamaref import Tap, Weights
from numpy.typing import NDArray

from llamadiff.ext.graph.engine import Alter, GraphEngine
from llamadiff.ext.graph.graph import Graph, GraphNode

Array = NDArray[Any]


class _Keeping(GraphEngine):
    """Keeps what every node gave."""

    def __init__(self, graph: Graph, weights: Weights, altered: Mapping[int, Alter] | None = None) -> None:
        super().__init__(graph, weights, altered)
        self.kept: dict[int, Array] = {}

    def keep(self, node: GraphNode, x: Array, values: dict[int, Array], recorded: bool = False) -> None:
        self.kept[node.number] = np.array(x[0], np.float32)
        super().keep(node, x, values, recorded)


def node_values(graph: Graph, weights: Weights, altered: Mapping[int, Alter] | None = None) -> dict[int, Array]:
    """By number, [ne3, ne2, ne1, ne0], in float32 and without any rounding of operands."""
    engine = _Keeping(graph, weights, altered)
    engine.forward(graph.tokens, None, Tap())
    return engine.kept


class Again(GraphEngine):
    """Computes what follows from changed values."""

    def following(
        self,
        values: Mapping[int, Array],
        changed: Mapping[int, Array],
        nodes: Sequence[GraphNode],
        altered: Mapping[int, Alter] | None = None,
    ) -> dict[int, Array]:
        """What some nodes give, in their order, where others' values are ``changed``; with these, by number.

        ``values``: what all nodes give otherwise. ``altered``: nodes that compute something else.
        """
        found, altered = dict(changed), altered or {}
        now = _Others(values, {**self.leaves(), **{number: x[None] for number, x in changed.items()}})
        with np.errstate(all="ignore"):
            for node in nodes:
                number = node.number
                if number not in changed and (number in altered or any(n in found for n in self.graph.reads(node))):
                    found[number] = np.array(self.computed(node, now, Tap(), altered.get(number))[0], np.float32)
                self.keep(node, found.get(number, values[number])[None], now)
        return found


class _Others(dict[int, Array]):
    """Values in a batch of one; those that are not there are others'."""

    def __init__(self, others: Mapping[int, Array], own: Mapping[int, Array]) -> None:
        super().__init__(own)
        self.others = others

    def __missing__(self, number: int) -> Array:
        return self.others[number][None]
