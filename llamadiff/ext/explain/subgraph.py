"""The nodes of a recorded graph between a tap and what was recorded before it: a recipe for any architecture."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from llamadiff.ext.explain.case import Array, Case, NotRecordedError, OutOfTimeError
from llamadiff.ext.graph.engine import Alter, GraphEngine
from llamadiff.ext.graph.graph import GraphNode, tap_shape
from llamadiff.trace import taps


@dataclass(frozen=True)
class Subgraph:
    """Nodes in order, the last of them the tap. ``given``: recorded values of those that a run starts from.

    ``altered`` nodes compute something else. ``right`` holds every node's right values, once they were needed: nodes
    that do not depend on an altered one are not computed again. ``places`` are the edits that bugs have for the nodes,
    once they were asked: they are the same whatever is altered.
    """

    engine: GraphEngine
    nodes: tuple[GraphNode, ...]
    given: Mapping[int, Array]
    altered: Mapping[int, Alter] = field(default_factory=dict)
    right: dict[int, Array] = field(default_factory=dict)
    places: dict[Any, Any] = field(default_factory=dict)

    @property
    def afresh(self) -> Subgraph:
        """The same of another case: in other arithmetics, say."""
        return replace(self, right={}, places={})

    def compute(self, case: Case) -> Array:
        """The tap [b, ...], one batch entry for each arithmetic."""
        right = self.right_values(case)
        return self.as_tap(self._altered(case) if self.altered else right[self.nodes[-1].number], case)

    def right_values(self, case: Case) -> dict[int, Array]:
        """Every node's, where nothing is altered."""
        if not self.right:
            self.right.update(self._run(case, {}, everything=True))
        return self.right

    def as_tap(self, x: Array, case: Case) -> Array:
        """The last node's values as the tap has them."""
        node = self.nodes[-1]
        if case.tap.name in self.engine.graph.kept:
            return as_rows(x, case.tap.name)[:, : len(case.run.tokens)]
        x, known = x.reshape(-1, *tap_shape(node, len(self.engine.graph.tokens))), taps.parse(case.tap.name)
        return x[..., : len(case.run.tokens)] if known is not None and known.causal else x

    def _altered(self, case: Case) -> Array:
        """The tap with what is altered; NaN where a node cannot take what an altered one gives it."""
        node = self.nodes[-1]
        if case.budget is not None and case.budget.is_spent:
            raise OutOfTimeError(case.tap.name)
        with suppress(IndexError, ValueError):
            x = self._run(case, self.altered, everything=False)[node.number]
            if x.size:
                return x
        return np.full((1, *node.shape), np.nan, np.float32)

    def _run(self, case: Case, altered: Mapping[int, Alter], everything: bool) -> dict[int, Array]:
        """The nodes' values as each was computed, before others wrote into its memory."""
        graph, values, changed, made = self.engine.graph, self.engine.leaves(), set[int](), dict[int, Array]()
        with np.errstate(all="ignore"):
            for node in self.nodes:
                number = node.number
                if number in self.given:
                    made[number] = self.given[number]
                    self.engine.keep(node, self.given[number], values, recorded=True)
                    continue
                if everything or number in altered or not changed.isdisjoint(graph.reads(node)):
                    x = self.engine.computed(node, values, case.carrier, altered.get(number))
                    if case.budget is not None:
                        case.budget.spend(node, graph, x.size)
                    changed.add(number)
                else:
                    x = self.right[number]
                made[number] = x
                self.engine.keep(node, x, values)
        return values | made

    def after(self, numbers: set[int]) -> list[GraphNode]:
        """The nodes that depend on some of them."""
        found, out = set(numbers), []
        for node in self.nodes:
            if node.number not in self.given and not found.isdisjoint(self.engine.graph.reads(node)):
                found.add(node.number)
                out.append(node)
        return out

    def computes(self, node: GraphNode) -> bool:
        """Whether a node is computed here."""
        return node.number not in self.given

    def is_span(self, case: Case) -> bool:
        """Whether taps that could have been recorded are computed here on the way to the judged one."""
        labels = {node.label for node in self.nodes if self.computes(node)} - {case.tap.name, None}
        return any(label in case.run.shapes and "(" not in str(label) for label in labels)


def subgraph_of(case: Case) -> Subgraph:
    """The subgraph of a case's tap. Raises NotRecordedError for a tap that is no node, or without a graph."""
    engine: Any = case.engine
    if not case.by_graph:
        raise NotRecordedError(case.tap.name)
    graph = engine.graph
    last = graph.labelled.get(case.tap.name) or graph.kept.get(case.tap.name)
    if last is None:
        raise NotRecordedError(case.tap.name)
    kept = {view.number: name for name, view in graph.kept.items()}
    inside, given = {last.number}, dict[int, Array]()
    waiting = [last]
    while waiting:
        for number in graph.reads(waiting.pop()):
            source = graph.by_number.get(number)
            if source is None or number in inside:
                continue
            inside.add(number)
            values = _rows_recorded(source, kept[number], case) if number in kept else _recorded(source, case)
            if values is None:
                waiting.append(source)
            else:
                given[number] = values
    return Subgraph(engine, tuple(node for node in graph.nodes if node.number in inside), given)


def _rows_recorded(view: GraphNode, name: str, case: Case) -> Array | None:
    """A cache as its recorded rows make it; None if they were not recorded."""
    try:
        return from_rows(case.values(name), view, name)
    except NotRecordedError:
        return None


def _recorded(node: GraphNode, case: Case) -> Array | None:
    """A node's recorded values [1, ne3, ne2, ne1, ne0]."""
    if node.label is None or node.writes:
        return None
    try:
        x = case.values(node.label)
    except NotRecordedError:
        return None
    return as_node(x, node, len(case.run.tokens))


def as_node(x: Array, node: GraphNode, n_tokens: int) -> Array:
    """A tap's values [1, ...] as its node has them [1, ne3, ne2, ne1, ne0]; keys beyond the tokens are zero.

    The axes may be others: heads that are merged, or not.
    """
    shape = tap_shape(node, n_tokens)
    if x[0].size != np.prod(shape):
        whole = np.zeros((1, *shape), x.dtype)
        whole[..., : x.shape[-1]] = x
        x = whole
    return x.reshape(1, *node.shape)


def as_rows(x: Array, name: str) -> Array:
    """A view of a cache, [b, 1, slot, kv_head, dim] or of V [b, 1, dim, kv_head, slot], as the tap has it."""
    return x[:, 0] if name.startswith("kv_k") else x[:, 0].swapaxes(1, 3)


def from_rows(x: Array, node: GraphNode, name: str) -> Array:
    """A tap of cached rows [b, token, kv_head, dim] as a view of the cache, whose other slots are empty."""
    rows = x if name.startswith("kv_k") else x.swapaxes(1, 3)
    whole = np.zeros((len(x), *node.shape), x.dtype)
    whole[:, 0][tuple(slice(size) for size in rows.shape)] = rows
    return whole
