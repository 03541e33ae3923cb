"""Why llama.cpp's graph parts from a model: a known bug, with the sides exchanged.

What the model has in a node's place is taken for what a candidate recorded of it, from the graph's own inputs. The edit
of llama.cpp's graph that gives the model's values is what the model does, and the graph does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.explain.budget import Budget
from llamadiff.ext.explain.case import Case, NotRecordedError, Recording
from llamadiff.ext.explain.diagnose import as_cause
from llamadiff.ext.explain.search import Fit, exact_bugs, replayed, search
from llamadiff.ext.graph.engine import Alter
from llamadiff.ext.graph.graph import Graph, GraphNode, tap_axes
from llamadiff.ext.graph.model import GraphModel
from llamadiff.ext.port.alignment import LEAVES_A_STATE, SCAN, seen_of
from llamadiff.ext.port.lineup import Departed
from llamadiff.ext.port.otherwise import Spot
from llamadiff.result.diagnosis import Cause

Array = NDArray[Any]
WORK = 4e9  # multiply-adds for a kind of place
FITS = 5e-12  # NMSE that a bug may leave of the model's values


class Causes:
    """What known bugs say of places in one graph."""

    def __init__(self, model: GraphModel) -> None:
        self.model, self.taps = model, {tap.name: tap for tap in model.taps}
        tokens = model.graph.tokens
        shapes = {label: _shape(node, model.graph) for label, node in model.graph.labelled.items()}
        self.run = Recording.in_float32(model, tokens, shapes)

    def of(self, alike: Sequence[Departed]) -> list[Cause | None]:
        """What the model does at each of some nodes of one kind, as if it were a bug of its own; None for none."""
        budget, known = Budget(WORK), list[Fit]()
        return [self._of(each, known, budget) for each in alike]

    def edits(self, spot: Spot) -> Iterator[tuple[Cause, Mapping[int, Alter]]]:
        """Each known bug at a node in whose place no op is known, and what it alters."""
        if spot.departure.node.label is not None:
            found = list(exact_bugs(self._case(spot, [spot.departure.node], None)))
            for fit, altered in sorted(
                found, key=lambda each: len(each[0].steps[0].bug.ops)
            ):  # what is of this op first
                yield as_cause(fit), altered

    def _of(self, departed: Departed, known: list[Fit], budget: Budget) -> Cause | None:
        """``known``: what was found at others of its kind, and is tried first."""
        for number in range(departed.fused, len(departed.place.nodes) + 1):
            found = self._at(departed, departed.place.nodes[:number], known, budget)
            if found is not None:
                known.append(found)
                return as_cause(found)
        return None

    def _at(self, departed: Departed, nodes: Sequence[GraphNode], known: Sequence[Fit], budget: Budget) -> Fit | None:
        """That of the last of some nodes, of which the others have no values of the model's."""
        label = nodes[-1].label
        if label is None or departed.values is None:
            return None
        shape = self.run.shapes[label]
        own = seen_of(nodes[-1], departed.place.seen[nodes[-1].number], self.model.graph)
        if own.size != departed.values.size or nodes[-1].op in (SCAN, *LEAVES_A_STATE):
            return None
        case = self._case(departed.place, nodes, departed.values.reshape(shape))
        right = case.nmse(own.reshape(1, *shape))
        for fit in known:
            again = replayed(case, right, fit.key, fit.values)
            if again is not None and again.nmse <= FITS:
                return again
        fits = [] if known and budget.is_spent else search(case, right, budget).fits
        return next((fit for fit in fits if fit.nmse <= FITS and not fit.harmless), None)

    def _case(self, spot: Spot, nodes: Sequence[GraphNode], recorded: Array | None) -> Case:
        """The last of some nodes: what is before the first of them was recorded."""
        graph, label = self.model.graph, str(nodes[-1].label)
        order = list(graph.labelled)
        first = spot.departure.node
        before = {name for name in order[: order.index(label)] if graph.labelled[name].number < first.number}

        def values(name: str) -> Array:
            node = graph.labelled.get(name)
            if node is None or name not in before or node.op in (SCAN, *LEAVES_A_STATE):
                raise NotRecordedError(name)
            seen = seen_of(node, spot.seen[node.number], graph)
            x = seen.reshape(1, *self.run.shapes[name])
            return x.astype(np.int32 if name.startswith("ffn_moe_topk") else self.model.engine.w.dtype)

        return Case(self.run, self.taps[label], values, recorded, limit=FITS)


def _shape(node: GraphNode, graph: Graph) -> tuple[int, ...]:
    """A node's axes as a tap has them, without keys that are padding."""
    return tap_axes(str(node.label), seen_of(node, np.empty(node.shape), graph).shape, len(graph.tokens))
