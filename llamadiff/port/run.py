"""The verb: is llama.cpp's graph of a file what the checkpoint's own code computes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llamadiff.comparison.diagnosis_text import layers_of as layers_text
from llamadiff.diagnose.diagnosis import Cause
from llamadiff.engines.capture_request import text_request
from llamadiff.engines.graph_model import by_its_graph
from llamadiff.engines.model_file import ModelFile
from llamadiff.engines.run_spec import How, Run
from llamadiff.ggml.graph import GraphNode
from llamadiff.llamacpp.capture import scratch_directory
from llamadiff.llamacpp.child import Child
from llamadiff.numerics import tolerances
from llamadiff.port.alignment import distance
from llamadiff.port.causes import Causes
from llamadiff.port.graph_values import node_values
from llamadiff.port.lineup import Departed, Lineup, LiningUp, kind_of, word_of
from llamadiff.port.loading import check_vocabulary, kept_as_in, model_of
from llamadiff.port.otherwise import Key
from llamadiff.port.tensors import differing, parameters_of
from llamadiff.port.torch_ops import CodeLine, layers_of
from llamadiff.trace import taps
from llamadiff.weights.config_keys import NAMES, Stated, metadata_oddities, stated_by

CLOSE = 1e-8  # NMSE of logits that are the model's but for rounding
KERNELS = 1e-2  # NMSE of llama.cpp's logits against its graph's that no rounding to 16 bits explains
# What a known bug's sentence calls the right side: here it is llama.cpp's graph.
EXCHANGED = {
    "this model": "llama.cpp's graph", "the model": "llama.cpp's graph", "this layer": "llama.cpp's layer",
}  # fmt: skip


@dataclass(frozen=True)
class Apart:
    """Nodes of one kind that part from the model, in as many layers.

    ``error``: the largest NMSE against what the model has in their place, by the op at ``line``; NaN where none was
    shown to stand there. ``reads``: where the model computes what the first of them reads; ``code``: what it makes of
    that. ``cause`` is what the model does, as a known bug has it; ``tensor`` what it has otherwise than the file.
    """

    op: str
    nodes: tuple[GraphNode, ...]
    layers: tuple[int, ...]
    error: float
    line: CodeLine | None
    reads: tuple[CodeLine, ...]
    code: tuple[CodeLine, ...]
    cause: Cause | None
    tensor: str | None = None

    @property
    def name(self) -> str:
        """The op, its nodes without their layers, and which layers."""
        words = list(dict.fromkeys(map(word_of, self.nodes)))
        where = f", {layers_text(self.layers)}" if self.layers else ""
        return f"{self.op} {' and '.join(words)}".rstrip() + where

    @property
    def says(self) -> str:
        """What the model does and llama.cpp's graph does not."""
        if self.cause is None and self.tensor is not None:
            return self._in_all_layers(self.tensor)
        if self.cause is None:
            return "computes something else there" if self.line is not None else "has no such values"
        says = self.cause.says
        for theirs, ours in EXCHANGED.items():
            says = says.replace(theirs, ours)
        return self._in_all_layers(says)

    def _in_all_layers(self, says: str) -> str:
        """What is said of the first of several layers, of all of them."""
        if len(self.layers) < 2:
            return says
        layer = self.layers[0]
        without = re.sub(rf"(?<=[A-Za-z_])(?<![0-9]e)-{layer}\b", "", says)
        return re.sub(rf"\.{layer}\.", ".{i}.", without)


@dataclass(frozen=True)
class Reason:
    """What the model does where no known bug says it; what makes it the same in another layer, and at which node."""

    says: str | None
    key: Key | None = None
    at: GraphNode | None = None


@dataclass(frozen=True)
class Port:
    """``model`` is the file's description, ``code`` the class of the checkpoint's code. ``logits``: NMSE of the graph's
    against the model's; ``own``: of llama.cpp's against the graph's. ``keys``: where something parts, the file's keys
    that do not say what the model's config does.
    """

    model: Mapping[str, Any]
    code: str
    tokens: Sequence[tuple[int, str | None]]
    baseline: Mapping[str, Any]
    places: Sequence[Apart]
    lineup: Lineup
    logits: float
    own: float
    keys: Sequence[str] = ()

    @property
    def verdict(self) -> str:
        if self.places:
            return tolerances.WRONG
        is_close = self.logits <= CLOSE and self.own <= KERNELS
        return tolerances.MATCH if is_close else tolerances.UNCHECKED


def port(path: Path, checkpoint: str, run: Run, how: How) -> Port:
    """Line a checkpoint's code up with llama.cpp's graph of a file. Raises UserError."""
    file = ModelFile(path)
    how.progress("loading the checkpoint")
    model = model_of(checkpoint)
    kept_as_in(model, file)
    with scratch_directory() as folder, Child(run.settings) as child:
        graph, trace = by_its_graph(path, text_request(file, run, Path(folder) / "llama.cpp"), how.progress, child)
        check_vocabulary(model, trace.info.tokens)
        how.progress("computing llama.cpp's graph")
        values = node_values(graph.graph, graph.weights)
        how.progress("lining up the model with it")
        lining = LiningUp(model, graph.graph, graph.weights, values, len(layers_of(model)))
        found = lining.run()
        how.progress("searching for causes")
        own = parameters_of(model, [name for name, _ in layers_of(model)])

        def otherwise(each: Departed, keys: list[Key]) -> Reason:
            if each.says is not None:
                return Reason(each.says, each.key, each.at)
            other = lining.otherwise(each, keys)
            if other is not None:
                return Reason(other.says, other.key, other.at)
            tensor = differing(each.place.nodes, graph.graph, graph.weights, own.get(each.departure.layer, {}))
            return Reason(tensor or lining.unread(each))

        places = list(_joined(_places(found.departed, Causes(graph), otherwise)))
        recorded = trace[taps.LOGITS].ravel() if taps.LOGITS in trace else None
        logits = values[graph.graph.nodes[-1].number].ravel()
        return Port(
            file.describe(), type(model).__name__, file.token_texts(trace.info.tokens), dict(trace.info.producer),
            places, found, found.logits, distance(recorded, logits) if recorded is not None else float("nan"),
            tuple(_other_keys(file, model)) if places else (),
        )  # fmt: skip


def _other_keys(file: ModelFile, model: Any) -> Iterator[str]:
    """Both values of each key that the file has, and the config has otherwise."""
    config: Any = getattr(model, "config", None)
    stated = stated_by(config.to_dict() if hasattr(config, "to_dict") else {}, file.architecture)
    own = {key: value for key, value in stated.values.items() if stated.names[key] in NAMES.get(key, stated.names[key])}
    for found in metadata_oddities(file, Stated(own, stated.names), {}):
        if found.certain and found.where in file.weights.fields:
            yield f"{found.where} {found.says}"


def _places(
    departed: Sequence[Departed], causes: Causes, otherwise: Callable[[Departed, list[Key]], Reason]
) -> Iterator[Apart]:
    """Those of one kind together, and for one reason."""
    kinds: dict[Any, list[Departed]] = {}
    for each in departed:
        kinds.setdefault((kind_of(each.departure.node), each.op.line if each.op else None), []).append(each)
    for (_, line), alike in kinds.items():
        reasons: dict[Any, list[tuple[Departed, Cause | None, Reason]]] = {}
        keys = list[Key]()
        for each, why in zip(alike, causes.of(alike), strict=True):
            reason = Reason(None) if why is not None else otherwise(each, keys)
            keys += [reason.key] if reason.key is not None and reason.key not in keys else []
            reasons.setdefault(why.name if why is not None else reason.key, []).append((each, why, reason))
        for same in reasons.values():
            first, why, reason = same[0]
            nodes = tuple(other.at or each.at or each.departure.node for each, _, other in same)
            layers = dict.fromkeys(each.departure.layer for each, *_ in same)
            yield Apart(
                nodes[0].op, nodes, tuple(number for number in layers if number is not None),
                float(np.max([each.error for each, *_ in same])), line,
                tuple(_lines(op.line for op in first.departure.reads)),
                tuple(_lines(op.line for op in first.departure.ops)),
                why, reason.says,
            )  # fmt: skip


def _joined(places: Iterable[Apart]) -> Iterator[Apart]:
    """Nodes of one op that part for one reason, as Q and K do."""
    found: dict[Any, list[Apart]] = {}
    for place in places:
        key = (
            place.op,
            place.layers,
            place.says if place.cause is not None or place.tensor is not None else (place.line or id(place)),
        )
        found.setdefault(key, []).append(place)
    for alike in found.values():
        nodes = tuple(node for place in alike for node in place.nodes)
        first = alike[0]
        error = float(np.max([place.error for place in alike]))
        yield Apart(
            first.op, nodes, first.layers, error, first.line, first.reads, first.code, first.cause, first.tensor
        )


def _lines(lines: Iterable[CodeLine | None]) -> Iterator[CodeLine]:
    yield from dict.fromkeys(line for line in lines if line is not None)
