"""Graphs of a few nodes, written by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from llamadiff.ext.graph.engine import GraphEngine
from llamadiff.ext.graph.graph import Graph, GraphNode, Leaf


def node(
    number: int, op: str, shape: tuple[int, ...], *sources: int, view: Any = None, params: bytes = b""
) -> GraphNode:
    return GraphNode(number, f"n{number}", None, op, "f32", shape, params, sources, view)


def engine_of(nodes: list[GraphNode], given: dict[int, np.ndarray], weights: Any = None, **names: str) -> GraphEngine:
    """Nodes over leaves: plain memory, or weights of a file by name (``w0``: leaf 0's)."""
    leaves = {number: Leaf(number, names.get(f"w{number}", f"leaf_{number}"), "f32", x.shape)
              for number, x in given.items()}  # fmt: skip
    memory = {number: x for number, x in given.items() if not weights or leaves[number].name not in weights}
    return GraphEngine(Graph(tuple(nodes), leaves, memory, (1, 2, 3)), weights)


def ramp(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1
