"""Every node of a model's graph as a known bug sees it: one for which everything was recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from llamadiff import Trace
from llamadiff.ext.explain.case import Case, NotRecordedError, Recording
from llamadiff.ext.explain.site import Site
from llamadiff.ext.explain.subgraph import Subgraph
from llamadiff.ext.graph.graph import GraphNode
from llamadiff.ext.graph.model import GraphModel
from llamadiff.numerics.rounding_tap import Carrier
from llamadiff.trace.taps import parse


def every_site(
    model: GraphModel, right: Trace, tokens: Sequence[int], n_prefill: int | None = None, kept: bool = False
) -> Iterator[Site]:
    """The graph's nodes, each at the first tap that it makes; tokens after ``n_prefill`` are decode steps.

    ``kept``: the views of caches too, where their rows are taps.
    """
    count = len(tokens)
    n = count if n_prefill is None else n_prefill
    edges = (0, *range(n, count + 1))
    shapes = {name: right[name].shape for name in right}
    run = Recording(model, tuple(tokens), np.arange(count), edges, n, Carrier([("f32", {})]), shapes, {})
    named = {tap.name: tap for tap in model.taps}

    def values(name: str) -> np.ndarray:
        if name not in shapes:
            raise NotRecordedError(name)
        return right[name][None]

    case = Case(run, named["result_output"], values, None)
    whole = Subgraph(model.engine, model.graph.nodes, {})

    def tap_of(node: GraphNode) -> str:
        return next((other.label for other in [node, *whole.after({node.number})] if other.label), "result_output")

    yield from (Site(node, whole, case.of(tap_of(node))) for node in model.graph.nodes)
    for name, node in model.graph.kept.items() if kept else ():
        if (tap := parse(name)) is not None:
            yield Site(node, whole, replace(case, tap=tap))
