"""The engine that judges a checkpoint's own code computes GELU as its config.json states it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from llamadiff.ext.graph.graph import Graph, GraphNode
from llamadiff.ext.pytorch.original import _with_stated_gelu


@pytest.mark.parametrize(
    ("config", "ops", "after"),
    [
        ({"hidden_act": "gelu"}, ("MUL_MAT", "GELU"), ("MUL_MAT", "GELU_ERF")),
        ({"activation_function": "gelu_new"}, ("GEGLU_ERF",), ("GEGLU",)),
        ({"activation": "gelu"}, ("GELU",), ("GELU_ERF",)),  # falcon
        ({"hidden_act": "gelu_new"}, ("GELU",), ("GELU",)),
        ({"hidden_act": "relu"}, ("GELU",), ("GELU",)),
        ({}, ("GELU",), ("GELU",)),
    ],
)
def test_gelu_is_the_configs(config, ops, after):
    nodes = tuple(GraphNode(i, "", None, op, "f32", (1,), b"", (), None) for i, op in enumerate(ops))
    graph = Graph(nodes, {}, {}, (1,))
    changed, _ = _with_stated_gelu(graph, SimpleNamespace(**config))
    assert tuple(node.op for node in changed.nodes) == after
    assert (changed is graph) == (ops == after)
