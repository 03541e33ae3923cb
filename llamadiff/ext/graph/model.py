"""A model run through llama.cpp's own graph: for architectures that the reference engine does not know."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from llamaref import Weights

from llamadiff.engines.capture_request import text_request
from llamadiff.engines.model_file import USUAL, ModelFile, Part, Runnable
from llamadiff.engines.run_spec import Run
from llamadiff.ext.graph.engine import GraphEngine
from llamadiff.ext.graph.graph import GRAPH, Graph, GraphNode, tap_shape
from llamadiff.ext.graph.readers import GraphReader
from llamadiff.judge.settings import settings_of
from llamadiff.llamacpp.capture import capture, read_run, scratch_directory
from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.request import Request, Settings
from llamadiff.system.errors import UserError
from llamadiff.system.progress import Progress, silent
from llamadiff.trace import taps
from llamadiff.trace.metadata import Info
from llamadiff.trace.reader import Trace
from llamadiff.trace.stated import reason

LARGEST = 1 << 30  # bytes of a graph that a trace keeps


class GraphModel(Runnable):
    """A GGUF file and a recorded graph of it; the taps are the graph's named nodes."""

    producer: ClassVar[Mapping[str, str]] = {"name": "llama.cpp's graph", "version": "numpy"}
    by_graph = True

    def __init__(
        self, path: str | Path, graph: Graph, settings: Settings = USUAL, weights: Weights | None = None
    ) -> None:
        super().__init__(path, "f32", settings, weights)
        self.graph = graph
        self.engine, self.tokens = GraphEngine(graph, self.weights), graph.tokens
        self.n_layer = int(self.describe("")["layers"])
        self.taps = [self._tap(label, node) for label, node in graph.labelled.items()]

    def _tap(self, label: str, node: GraphNode) -> taps.Tap:
        """A named node as a tap: the vocabulary's word where it has one, with the axes that the graph has."""
        known = taps.parse(label)
        if known is not None and known.causal:
            return replace(known, kind=replace(known.kind, op=self.graph.op_of(node)))
        axes = [str(size) for size in tap_shape(node, len(self.graph.tokens))]
        if node.rows is not None:
            axes[node.rows] = ("token", "query")[node.rows]
        layer = taps.layer_of(label)
        word = label if layer is None else label.rsplit("-", 1)[0]
        unnamed = "(" in label  # nobody is asked to write these
        op = self.graph.op_of(node)
        ranked = (
            known.kind.inputs if known is not None and op == "ARGSORT" else ""
        )  # what tells whether a choice is right
        kind = taps.Kind(word, op, ranked, tuple(axes), "", layered=layer is not None, optional=unnamed)
        return taps.Tap(kind, layer)

    @cached_property
    def weight_names(self) -> dict[str, str]:  # type: ignore[override]
        """Tap name -> the weight that makes it: of a product, or of the row lookup."""
        return {label: name for label in self.graph.labelled if (name := self.graph.weight_of(label)) is not None}

    @cached_property
    def sizes(self) -> dict[str, int]:  # type: ignore[override]
        """The sizes of the axes that taps have, as far as the metadata tells."""
        about = self.describe("")
        heads = max(about["heads"], 1)
        dim = self.hyper_parameter("attention.key_length")
        expert = self.hyper_parameter("expert_count")
        return {
            "embd": about["embd"], "head": heads, "kv_head": max(about["kv_heads"], 1), "vocab": about["vocab"],
            "dim": dim if isinstance(dim, int) else about["embd"] // heads,
            "expert": expert if isinstance(expert, int) else 0,
        }  # fmt: skip

    def parts(self, tokens: Sequence[int]) -> list[Part]:
        """One: a node may read any node before it."""
        return [Part(lambda _, step: self.engine.run(step))]

    def inputs(self, tap: taps.Tap) -> list[str]:
        return self.graph.inputs(tap.name)


def kept_graph(model: ModelFile, trace: Trace) -> GraphModel | None:
    """The graph that a trace keeps; None where it keeps none, or none of its tokens.

    Raises UserError for a damaged one.
    """
    packed = trace.attached(GRAPH)
    if packed is None:
        return None
    try:
        graph = Graph.unpacked(zlib.decompressobj().decompress(packed, LARGEST))
        return GraphModel(model.path, graph) if graph.tokens == trace.info.tokens else None
    except (ValueError, KeyError, TypeError, IndexError, struct.error, zlib.error) as error:
        raise UserError(f"{trace.path}: the graph in it cannot be read ({reason(error)}); capture it again") from None


def graph_of_run(
    model: ModelFile,
    trace: Trace,
    progress: Progress = silent,
    place: Settings | None = None,
    child: Child | None = None,
) -> GraphModel | None:
    """llama.cpp's graph of the tokens of a run, in one go: as the trace keeps it, or as llama.cpp makes it now.

    ``child``: the process that made the trace, to be asked once more. None where it cannot.
    """
    kept, n_ctx = kept_graph(model, trace), settings_of(trace).get("n_ctx")
    room = n_ctx if isinstance(n_ctx, int) else 0
    return kept or _asked_for(model, trace.info, room, progress, place or Settings(), child)


def _asked_for(
    model: ModelFile, info: Info, n_ctx: int, progress: Progress, settings: Settings, child: Child | None
) -> GraphModel | None:
    first = info.positions[0] if info.positions else 0
    has_gaps = list(info.positions) != list(range(first, first + len(info.positions)))  # llama.cpp runs no such batch
    if has_gaps and list(info.positions) != sorted({*info.positions}):
        return None
    first = 0 if has_gaps else first
    progress("asking llama.cpp for its graph")
    settings = replace(settings, lora=model.settings.lora, lora_scale=model.settings.lora_scale)
    try:
        with scratch_directory() as folder:
            path = Path(folder) / "graph"
            request = text_request(model, Run(tokens=info.tokens, settings=settings), path)
            read_run(replace(request, first=first, graph=str(path), output=None), progress, child, GraphReader)
            graph = Graph.read(path).in_room(n_ctx)
            return GraphModel(model.path, graph.at(info.positions) if has_gaps else graph, settings)
    except UserError:
        return None


def by_its_graph(
    model: str | Path, request: Request, progress: Progress = silent, child: Child | None = None
) -> tuple[GraphModel, Trace]:
    """Run llama.cpp: the model with the graph of all tokens in one go, and the trace of the run that was asked for."""
    with scratch_directory() as folder:
        path = Path(folder) / "graph"
        trace = capture(replace(request, graph=str(path)), progress, child, GraphReader)
        return GraphModel(model, Graph.read(path), request.settings), trace
