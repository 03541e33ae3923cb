"""The places where llama.cpp's graph parts from a model, in words: nodes of one kind that part for one reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llamadiff.ext.graph.graph import Graph, GraphNode
from llamadiff.ext.port.causes import Causes
from llamadiff.ext.port.departures import EYES
from llamadiff.ext.port.lineup import Departed, LiningUp, kind_of, word_of
from llamadiff.ext.port.otherwise import Key, StandIn
from llamadiff.ext.port.sides import FILE, GRAPH, KEYLESS, MODEL
from llamadiff.ext.port.tensors import Tensors
from llamadiff.ext.port.torch_ops import CodeLine
from llamadiff.result.diagnosis import Cause
from llamadiff.trace import taps
from llamadiff.words.diagnosis_text import layers_of as layers_text

# What a known bug's sentence calls the right side: here it is llama.cpp's graph.
RIGHT = r", where (.+?) is right\b"
EXCHANGED = {
    "this model": "llama.cpp's graph", "the model": "llama.cpp's graph", "this layer": "llama.cpp's layer",
    "is left out: its input comes out as it is": "leaves this out, and goes on with its input",
}  # fmt: skip


@dataclass(frozen=True)
class Apart:
    """Nodes of one kind that part from the model, in as many layers.

    ``error``: the largest NMSE against what the model has in their place, by the op at ``line``; NaN where none was
    shown to stand there. ``reads``: where the model computes what the first of them reads; ``code``: what it makes of
    that. ``cause`` is what the model does, as a known bug has it; ``otherwise`` where none has it. ``side`` is who is
    wrong: llama.cpp's graph, or the file. ``fault``: what the file has otherwise than the checkpoint, and shows there.
    """

    op: str
    nodes: tuple[GraphNode, ...]
    layers: tuple[int, ...]
    error: float
    line: CodeLine | None
    reads: tuple[CodeLine, ...]
    code: tuple[CodeLine, ...]
    cause: Cause | None
    otherwise: str | None = None
    side: str = GRAPH
    fault: str | None = None

    @property
    def name(self) -> str:
        """The op, its nodes without their layers, and which layers."""
        words = list(dict.fromkeys(map(word_of, self.nodes)))
        where = f", {layers_text(self.layers)}" if self.layers else ""
        return f"{self.op} {' and '.join(words)}".rstrip() + where

    @property
    def text(self) -> str:
        """The model's code there; empty where none was found."""
        return self.line.text if self.line is not None else ""

    @property
    def says(self) -> str:
        """What the model does and llama.cpp's graph does not."""
        if self.cause is None and self.otherwise is not None:
            return self._in_all_layers(self.otherwise)
        if self.cause is None:
            return "computes something else there" if self.line is not None else "has no such values"
        says = re.sub(RIGHT, r", where llama.cpp has \1", self.cause.says)
        for theirs, ours in EXCHANGED.items():
            says = says.replace(theirs, ours)
        return self._in_all_layers(says)

    @property
    def is_keyless(self) -> bool:
        """Whether llama.cpp does it by itself, whatever a file says."""
        return self.cause is not None and self.cause.name in KEYLESS

    def _in_all_layers(self, says: str) -> str:
        """What is said of the first of several layers, of all of them."""
        if len(self.layers) < 2:
            return says
        layer = self.layers[0]
        given = (
            rf"\b({taps.RESIDUAL}|{EYES})-{layer - 1}\b"
            if layer
            else r"\b(embd|inp_embd|inpL|inp_scaled|pos_embed|pre_ln|patch_bias)\b"
        )
        says = re.sub(given, "the layer's input", says)
        without = re.sub(rf"(?<=[A-Za-z_])(?<![0-9]e)-{layer}\b", "", says)
        return re.sub(rf"\.{layer}\.", ".{i}.", without)


@dataclass(frozen=True)
class Reason:
    """What the model does where no known bug says it; what makes it the same in another layer, and at which node.

    ``side``: who is wrong, as far as the tensors tell.
    """

    says: str | None
    key: Key | None = None
    at: GraphNode | None = None
    side: str = GRAPH


class Reasons:
    """Looks for them, in one graph. ``misplaced``: what was found of the file's tensors."""

    def __init__(self, lining: LiningUp, graph: Graph, tensors: Tensors, opinion: str | None) -> None:
        self.lining, self.graph, self.tensors, self.opinion = lining, graph, tensors, opinion
        self.misplaced: list[str] = []
        self._asked: dict[int | None, bool] = {}

    def of(self, each: Departed, keys: list[Key]) -> Reason:
        """Why a place parts, of which no known bug says it. ``keys``: of what holds elsewhere."""
        known = each.model if each.model is not None and each.model.says is not None else None
        other = known or self.lining.otherwise(each.place, keys)
        if other is not None:
            return Reason(other.says, other.key, other.at, self._side(other.parameter))
        tensor = self.tensors.differing(each.place.nodes, self.graph, each.departure.layer)
        return Reason(tensor or self.lining.unread(each), side=GRAPH if tensor is None else FILE)

    def _side(self, parameter: str | None) -> str:
        """The file's, where none of its tensors has a parameter that the model reads in place of one."""
        values = None if parameter is None else self.lining.parameters.get(parameter)
        return GRAPH if values is None or self.tensors.as_it_is(values) else FILE

    def side(self, place: Apart, side: str) -> str:
        """Who is wrong, by what the file's tensors say, and by ``side`` else."""
        if place.is_keyless or self.opinion == MODEL:  # a third reading of the file has the model's logits
            return GRAPH
        layer = place.layers[0] if place.layers else None
        if layer not in self._asked:
            found = list(self.tensors.misplaced(layer))
            self._asked[layer] = bool(found)
            self.misplaced += found
        if FILE in (place.side, side) or self._asked[layer]:
            return FILE
        return FILE if self.tensors.are_others(place.nodes, self.graph) else side


def places_of(
    departed: Sequence[Departed], causes: Causes, otherwise: Callable[[Departed, list[Key]], Reason]
) -> Iterator[Apart]:
    """Those of one kind together, and for one reason."""
    kinds: dict[Any, list[Departed]] = {}
    for each in departed:
        kinds.setdefault((kind_of(each.departure.node), each.op.line if each.op else None), []).append(each)
    for (_, line), alike in kinds.items():
        reasons: dict[Any, list[tuple[Departed, Cause | None, Reason]]] = {}
        keys = list[Key]()
        for each, known in zip(alike, causes.of(alike), strict=True):
            model = each.model or StandIn(each.departure.node)
            why = known or model.cause
            reason = otherwise(each, keys) if why is None or model.parameter is not None else Reason(None, at=model.at)
            reasons.setdefault(why.name if why is not None else reason.key, []).append((each, why, reason))
        for same in reasons.values():
            first, why, reason = same[0]
            nodes = tuple(other.at or each.departure.node for each, _, other in same)
            layers = dict.fromkeys(each.departure.layer for each, *_ in same)
            yield Apart(
                nodes[0].op, nodes, tuple(number for number in layers if number is not None),
                float(np.max([each.error for each, *_ in same])), line,
                tuple(_lines(op.line for op in first.departure.reads)),
                tuple(_lines(op.line for op in first.departure.ops)),
                why, None if why is not None else reason.says, reason.side,
            )  # fmt: skip


def joined(places: Iterable[Apart]) -> Iterator[Apart]:
    """Nodes of one op that part for one reason, as Q and K do."""
    found: dict[Any, list[Apart]] = {}
    for place in places:
        key = (
            place.op,
            place.side,
            place.layers,
            place.says if place.cause is not None or place.otherwise is not None else (place.line or id(place)),
        )
        found.setdefault(key, []).append(place)
    for alike in found.values():
        nodes = tuple(node for place in alike for node in place.nodes)
        yield replace(alike[0], nodes=nodes, error=float(np.max([place.error for place in alike])))


def _lines(lines: Iterable[CodeLine | None]) -> Iterator[CodeLine]:
    yield from dict.fromkeys(line for line in lines if line is not None)
