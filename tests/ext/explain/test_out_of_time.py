"""A hypothesis whose computing takes too long."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from llamaref import Tap

from llamadiff.ext.explain.budget import Budget
from llamadiff.ext.explain.case import OutOfTimeError
from llamadiff.ext.explain.subgraph import Subgraph
from llamadiff.ggml.engine import GraphEngine
from llamadiff.ggml.graph import Graph, GraphNode, Leaf


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


def test_a_hypothesis_that_cannot_be_computed_is_not_the_cause():
    def fails(op: Any) -> Any:
        raise IndexError

    nodes = [node(1, "SCALE", (1, 1, 1, 2), 0, params=np.array([2, 0], np.float32).tobytes())]
    engine = engine_of(nodes, {0: ramp(1, 1, 1, 2)})
    case: Any = SimpleNamespace(carrier=Tap(), tap=SimpleNamespace(name="n1"), budget=None)
    nodes[0] = replace(nodes[0], label="n1")
    right = Subgraph(engine, tuple(nodes), {})
    assert right.compute(case).ravel().tolist() == [2, 4]
    wrong = replace(right, altered={1: fails})
    assert np.isnan(wrong.compute(case)).all()
    case.budget = Budget.of_seconds(0)
    with pytest.raises(OutOfTimeError):
        wrong.compute(case)
