"""Runs of llama.cpp that see its whole graph: one checks every node, one records the graph itself."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from llamaref import Weights
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from llamadiff.ggml.graph import GRAPH
from llamadiff.llamacpp.dequantize import Dequantizer
from llamadiff.llamacpp.graph_recorder import Alignment, GraphRecorder
from llamadiff.llamacpp.interface import ABORT, Handle
from llamadiff.llamacpp.node_checker import NodeChecker
from llamadiff.llamacpp.quantizing import q8_way
from llamadiff.llamacpp.record_taps import Capture
from llamadiff.llamacpp.request import Say, Settings, no_tap_fits
from llamadiff.llamacpp.tensors import Node
from llamadiff.system.errors import UserError
from llamadiff.system.output import write_whole
from llamadiff.trace import taps
from llamadiff.trace.writer import TraceWriter

Array = NDArray[Any]
CALLED_OFF = 2  # llama_decode's code for a pass that its abort callback ended


class NodeRun(Capture):
    """One context whose every node is checked as it runs."""

    at_once = 0

    def run(self, say: Say) -> None:
        """Prefill and decode steps; then write what was found."""
        assert self.request.output is not None
        weights = Weights(self.request.model, threads=self.request.settings.threads)
        dequantizer = Dequantizer(weights, self.lib)
        weights.decoder = dequantizer.decoder
        keep = None if self.request.keep is None else Path(self.request.keep)
        asked = self.request
        settings = asked.settings
        self.checker = NodeChecker(weights, keep, asked.keep_all, asked.only_list, q8_way(self.lib), asked.pictures,
                                   settings.on_device)  # fmt: skip
        with threadpool_limits(1, "blas"):
            prefill_s = self._decode_all(self._context(), say)
        self.checker.settle()
        report = {
            "info": json.loads(self._info(prefill_s).to_json()),
            "nodes": [found.to_json() for found in self.checker.results],
            "trusted": len(dequantizer.trusted), "refused": sorted(dequantizer.refused),
        }  # fmt: skip
        write_whole(Path(self.request.output), json.dumps(report).encode())

    def _decode(self, context: Any, tokens: list[int], start: int) -> None:
        self.checker.begin(0 if start == 0 else self.checker.step + 1)
        super()._decode(context, tokens, start)

    def _observe(self, pointer: Any, ask: bool, _: Any) -> bool:
        """Asked: keep the inputs. Done: compute the node again."""
        try:
            node = self.ggml.node(pointer)
            if ask:
                self._note_weights(node)
                self.checker.asked(node)
            else:
                self.checker.done(node)
            return True
        except BaseException as error:  # must not reach C
            self.failure = error
            return False


class CaptureWithGraph(Capture):
    """A run whose trace keeps the graph of all its tokens in one go: what explains it needs no llama.cpp then."""

    recorder: GraphRecorder | None = None

    def _attach(self, writer: TraceWriter) -> None:
        settings = replace(self.request.settings, type_k="F32", type_v="F32", flash_attn=False)
        self.recorder = GraphRecorder(Weights(self.request.model), len(self.tokens), whole=True)
        self.recorder.in_steps = len(self.given.edges) > 2 or bool(self.request.n_predict)
        self.at_once = 0
        self._decode(self._context(settings), self.tokens, 0)
        rows = Alignment(self.recorder, [self.recorder]).rows
        writer.attach(GRAPH, zlib.compress(self.recorder.packed(self.tokens, rows)))

    def _observe(self, pointer: Any, ask: bool, _: Any) -> bool:
        if self.recorder is None:
            return super()._observe(pointer, ask, _)
        try:
            if ask:
                self.recorder.asked(self.ggml.node(pointer))
            return True
        except BaseException as error:  # must not reach C
            self.failure = error
            return False


class GraphAlone(Capture):
    """The graph of all tokens in one go, and nothing of what its nodes give."""

    at_once = 0

    def run(self, say: Say) -> None:
        """Every node is seen before any runs; when the last was, the pass is called off."""
        assert self.request.graph is not None
        self.recorder, self.is_seen = GraphRecorder(Weights(self.request.model), len(self.tokens), whole=True), False
        context, called_off = self._context(), ABORT(lambda _: self.is_seen)
        self.lib.llama_set_abort_callback(context, called_off, None)
        self._decode(context, self.tokens, 0)
        rows = Alignment(self.recorder, [self.recorder]).rows
        self.recorder.write(Path(self.request.graph), self.tokens, rows)

    def _batch(self, context: Handle, tokens: list[int], positions: range) -> int:
        code = super()._batch(context, tokens, positions)
        return 0 if self.is_seen and code == CALLED_OFF else code

    def _observe(self, pointer: Any, ask: bool, _: Any) -> bool:
        try:
            if ask:
                node = self.ggml.node(pointer)
                self.recorder.asked(node)
                self.is_seen = self.is_seen or node.name == "result_output"
            return not ask  # nobody wants a value
        except BaseException as error:  # must not reach C
            self.failure = error
            return False


class GraphRun(Capture):
    """The graph of all tokens in one go, recorded as an engine, and the run as it was asked for, with every tap."""

    at_once = 0

    def run(self, say: Say) -> None:
        """First what the passes of the run are like; then the graph, where that is another; then the values."""
        assert self.request.graph is not None
        assert self.request.output is not None
        settings = self.request.settings
        plain = replace(settings, type_k="F32", type_v="F32", flash_attn=False)
        self.weights, self.recorders = Weights(self.request.model), list[GraphRecorder]()
        self.kinds: dict[tuple[bool, int], int] = {}  # whether a batch is the first, and its size -> its recorder
        in_steps = len(self.given.edges) > 2 or bool(self.request.n_predict)
        self.whole = settings == plain and not in_steps
        self.alignment: Alignment | None = None
        context = self._context()
        self._decode_all(context, say)
        self.remembers = self.recorders[0].has_cache
        if in_steps and not self.remembers:
            raise UserError(f"{self.request.model}: this model keeps nothing between passes; ask for no decode steps")
        graph = self.recorders[0] if self.whole else self._graph_of_all(plain)
        graph.in_steps = in_steps
        self.alignment = Alignment(graph, self.recorders)
        graph.write(Path(self.request.graph), self.tokens, self.alignment.rows)
        self.shapes = self.alignment.shapes()
        self.places = [self._asked_for(places) for places in self.alignment.places]
        if not any(self.places):
            raise UserError(no_tap_fits(self.request))
        with TraceWriter(self.request.output, expected_taps=len(self.shapes)) as writer:
            self.writer, context = writer, self._context()
            for start, stop in pairwise([*self.given.edges, *range(len(self.given.tokens) + 1, self.total + 1)]):
                self._decode(context, self.tokens[start:stop], start)
            if self.request.keep_graph:
                writer.attach(GRAPH, zlib.compress(graph.packed(self.tokens, self.alignment.rows)))
            writer.finish(self._info(0.0))

    def _graph_of_all(self, settings: Settings) -> GraphRecorder:
        passes, kinds = self.recorders, self.kinds
        self.recorders, self.kinds, self.whole = [], {}, True
        self._decode(self._context(settings), self.tokens, 0)
        (graph,), self.recorders, self.kinds = self.recorders, passes, kinds
        return graph

    def _decode(self, context: Any, tokens: list[int], start: int) -> None:
        """One more batch; those of a size are alike, but for the first."""
        kind = start == 0, len(tokens)
        self.new = kind not in self.kinds
        if self.new:
            self.recorders.append(GraphRecorder(self.weights, len(tokens), self.whole))
        self.number, self.place = self.kinds.setdefault(kind, len(self.kinds)), -1
        super()._decode(context, tokens, start)

    def _observe(self, pointer: Any, ask: bool, _: Any) -> bool:
        try:
            node = self.ggml.node(pointer)
            if self.alignment is not None:
                return self._recorded(node, ask)
            if ask and self.new:
                self._note_weights(node)
                self.recorders[-1].asked(node)
            return self.whole  # values are looked at one by one, a structure is not
        except BaseException as error:  # must not reach C
            self.failure = error
            return False

    def _recorded(self, node: Node, ask: bool) -> bool:
        """Whether a node is a tap; if it has been computed, its rows are kept."""
        self.place += ask
        label = self.places[self.number].get(self.place)
        if label is not None and not ask:
            self._keep(label, node.values())
        return label is not None or not ask

    def _asked_for(self, places: Mapping[int, str]) -> dict[int, str]:
        patterns, layers = self.request.patterns, self.request.layer_range
        return {place: tap for place, tap in places.items()
                if taps.selected(tap, taps.layer_of(tap), patterns, layers)}  # fmt: skip

    def _keep(self, name: str, values: Array) -> None:
        """Rows of a tap on its own axes, without padding after the keys."""
        shape, axis = self.shapes[name]
        tap = taps.parse(name)
        if tap is not None and tap.causal:
            values, shape = values[..., : self.total], (*shape[:-1], self.total)
        if axis is None:
            self.writer.add(name, values.reshape(shape))
            return
        rows = values.reshape(*shape[:axis], self.rows, *shape[axis + 1 :])
        self.writer.add(name, rows if tap is None else self._visible(tap, rows), axis, shape, self.start)
