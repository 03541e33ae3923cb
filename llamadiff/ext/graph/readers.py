"""Who reads a run node by node: the nodes checked, or the graph kept, in a trace or as an engine."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamaref import Weights
from threadpoolctl import threadpool_limits

from llamadiff.ext.graph.check import NodeCheck
from llamadiff.ext.graph.graph import GRAPH
from llamadiff.ext.graph.node import Node
from llamadiff.ext.graph.node_checker import NodeChecker
from llamadiff.ext.graph.recorder import Alignment, GraphRecorder
from llamadiff.llamacpp.capture import read_run
from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.dequantize import Dequantizer
from llamadiff.llamacpp.readers import RunReader, TapReader, Tell, seen_scores
from llamadiff.llamacpp.request import Request, no_tap_fits
from llamadiff.llamacpp.sent_tensor import SentTensor
from llamadiff.system.errors import UserError
from llamadiff.system.output import write_whole
from llamadiff.system.progress import Progress, silent
from llamadiff.trace import taps
from llamadiff.trace.metadata import Info
from llamadiff.trace.writer import TraceWriter

if TYPE_CHECKING:
    from typing_extensions import Self


def node_of(answer: Mapping[str, Any], data: Sequence[Any], order: str) -> Node:
    """A node with what it reads, of whose bytes some were sent."""
    held = dict(zip(answer["read"], data, strict=True))
    read = {said["at"]: Node(said, held.get(said["at"]), order) for said in answer["tensors"]}
    said = answer["node"]
    base = None if said["view"] is None else read.get(said["view"][0])
    return Node(said, None, order, tuple(read[at] for at in said["sources"]), base)


class _Recording(RunReader):
    """Reads passes of which every node is told."""

    recording: GraphRecorder | None = None  # of the graph that nodes are told of

    def _node(self, answer: Mapping[str, Any], data: Sequence[Any]) -> None:
        assert self.recording is not None
        self.recording.asked(node_of(answer, data, self.order))

    def record(self, rows: int, whole: bool) -> GraphRecorder:
        """What keeps the graph of a pass over so many tokens, which is told of from now on."""
        self.recording = GraphRecorder(self.weights, rows, whole, self.in_steps)
        return self.recording


class KeepingReader(_Recording, TapReader):
    """The taps of a run as a trace, with the graph of all its tokens in it, where that is to be kept."""

    def _whole(self, answer: Mapping[str, Any], data: Sequence[Any]) -> None:
        """What comes next is the graph of all tokens."""
        self.record(self.total, whole=True)

    def finish(self) -> None:
        if self.recording is not None:
            rows = Alignment(self.recording, [self.recording]).rows
            self.writer.attach(GRAPH, zlib.compress(self.recording.packed([*self.ended["tokens"]], rows)))
        super().finish()


class NodeReader(RunReader):
    """Every node of a run, checked as it is told of."""

    def __init__(self, request: Request, tell: Tell, file: Dequantizer | None = None) -> None:
        """``file``: the model's tensors, where it is open; what reads them is not changed by anybody meanwhile."""
        super().__init__(request, tell)
        if file is None:
            file = Dequantizer.of(Weights(request.model), request.settings.threads)
        self.weights, self.dequantizer = file.weights, file
        self._pending: Node | None = None

    def __enter__(self) -> Self:
        self.open.enter_context(threadpool_limits(1, "blas"))
        return super().__enter__()

    @cached_property
    def checker(self) -> NodeChecker:
        return NodeChecker(self.weights, self.request, self.q8)

    def _pass(self, answer: Mapping[str, Any], data: Sequence[Any]) -> None:
        self.checker.begin(0 if self.start == 0 else self.checker.step + 1)

    def _node(self, answer: Mapping[str, Any], data: Sequence[Any]) -> None:
        self._pending = node = node_of(answer, data, self.order)
        self.devices |= dict.fromkeys((node.name, node.tap or node.name), str(node.said.get("device", "")))
        self.checker.asked(self._pending)

    def _computed(self, answer: Mapping[str, Any], data: Sequence[Any]) -> None:
        node = self._pending
        assert node is not None
        said = {**node.said, "looks": answer["looks"]}
        self.checker.done(replace(node, said=said, data=data[0] if data else None))

    def finish(self) -> None:
        self.checker.settle()


class GraphReader(_Recording):
    """The graph of all tokens in one go as an engine, in a file; and the run's own values of its taps, if wanted."""

    def __init__(self, request: Request, tell: Tell) -> None:
        super().__init__(request, tell)
        self.recorders = list[GraphRecorder]()
        self.kinds: dict[tuple[bool, int], int] = {}  # whether a pass is the first, and its size -> its recorder
        self.whole: GraphRecorder | None = None
        self.alignment: Alignment | None = None
        self.writer: TraceWriter | None = None
        self.number = 0

    @property
    def _is_one(self) -> bool:
        """Whether the run itself is that of all tokens in one go."""
        return self.request.output is None or (
            self.request.settings == self.request.settings.in_float32 and not self.in_steps
        )

    def _pass(self, answer: Mapping[str, Any], data: Sequence[Any]) -> None:
        if self.whole is not None and self.alignment is None:
            return
        kind = self.start == 0, self.rows
        self.number = self.kinds.setdefault(kind, len(self.kinds))
        if self.alignment is None and self.number == len(self.recorders):
            self.recorders.append(self.record(self.rows, self._is_one))

    def _whole(self, answer: Mapping[str, Any], data: Sequence[Any]) -> None:
        """What comes next is the graph of all tokens."""
        if self.in_steps and not self.recorders[0].has_cache:
            raise UserError(f"{self.request.model}: this model keeps nothing between passes; ask for no decode steps")
        self.whole = self.record(self.total, whole=True)

    def _asks(self, answer: Mapping[str, Any], data: Sequence[Any]) -> None:
        """Which nodes' values are wanted of each kind of pass, now that all were told of."""
        self.alignment = Alignment(self.whole or self.recorders[0], self.recorders)
        self.shapes = self.alignment.shapes()
        self.places = [self._asked_for(places) for places in self.alignment.places]
        if not any(self.places):
            raise UserError(no_tap_fits(self.request))
        self.writer = self.writes(len(self.shapes))
        self.tell(places={f"{first:d} {rows}": sorted(self.places[n]) for (first, rows), n in self.kinds.items()})

    def _asked_for(self, places: Mapping[int, str]) -> dict[int, str]:
        patterns, layers = self.request.patterns, self.request.layer_range
        return {place: tap for place, tap in places.items()
                if taps.is_selected(tap, taps.layer_of(tap), patterns, layers)}  # fmt: skip

    def _value(self, answer: Mapping[str, Any], data: Sequence[Any]) -> None:
        """Rows of a tap on its own axes, without padding after the keys."""
        assert self.writer is not None
        name = self.places[self.number][answer["value"]]
        self.devices[name] = answer["node"].get("device", "")
        values = SentTensor(answer["node"], data=data[0], order=self.order).values()
        shape, axis = self.shapes[name]
        tap = taps.parse(name)
        if tap is not None and tap.causal:
            values, shape = values[..., : self.total], (*shape[:-1], self.total)
        if axis is None:
            self.writer.add(name, values.reshape(shape))
            return
        rows = values.reshape(*shape[:axis], self.rows, *shape[axis + 1 :])
        if tap is not None and tap.kind.word == "kq" and self.recorders[0].has_cache:
            rows = seen_scores(rows, self.start)
        self.writer.add(name, rows, axis, shape, self.start)

    def finish(self) -> None:
        graph = self.whole or self.recorders[0]
        alignment = self.alignment or Alignment(graph, [graph])
        packed = graph.packed([*self.ended["tokens"]], alignment.rows)
        assert self.request.graph is not None
        write_whole(Path(self.request.graph), packed)
        if self.writer is not None:
            if self.request.keep_graph:
                self.writer.attach(GRAPH, zlib.compress(packed))
            self.writer.finish(self.info())


@dataclass(frozen=True)
class Nodes:
    """What a run that checked every node found: the run's facts, and its nodes in graph order, pass by pass.

    ``trusted``: how many tensors ggml decoded as gguf-py does, bit for bit; ``refused`` names those where it did not;
    ``on_device``: some nodes ran on a device.
    """

    info: Info
    checks: tuple[NodeCheck, ...]
    trusted: int
    refused: tuple[str, ...]
    on_device: bool = False


def check_nodes(
    request: Request, progress: Progress = silent, child: Child | None = None, file: Dequantizer | None = None
) -> Nodes:
    """Run llama.cpp and compute every node again as it runs; ``file``: the model, if it is open. Raises UserError."""
    reader = read_run(request, progress, child, partial(NodeReader, file=file))
    assert isinstance(reader, NodeReader)
    return found_by(reader)


def found_by(reader: NodeReader) -> Nodes:
    """What a reader has found of a run that is over."""
    read = reader.dequantizer
    checker, refused = reader.checker, tuple(sorted(read.refused))
    return Nodes(reader.info(), tuple(checker.results), len(read.trusted), refused, checker.on_device)
