"""The values of every node of llama.cpp's graph, computed anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from llamaref import Weights
from llamaref.engine import Silent
from numpy.typing import NDArray

from llamadiff.ggml.engine import Alter, GraphEngine
from llamadiff.ggml.graph import Graph, GraphNode

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
    engine.forward(graph.tokens, None, Silent())
    return engine.kept
