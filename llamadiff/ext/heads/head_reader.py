"""Reads a run of trunk and heads as one graph: what the trunk gives, joined to what each head reads, and their taps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from llamaref import Weights
from numpy.typing import NDArray

from llamadiff.ext.graph.graph import Graph
from llamadiff.ext.graph.node import Node
from llamadiff.ext.graph.readers import node_of
from llamadiff.ext.graph.recorder import Alignment, GraphRecorder
from llamadiff.ext.heads.given import faults
from llamadiff.llamacpp.passes import NoCheck
from llamadiff.llamacpp.readers import RunReader, Tell, seen_scores
from llamadiff.llamacpp.request import Request
from llamadiff.llamacpp.sent_tensor import SentTensor
from llamadiff.system.errors import UserError
from llamadiff.trace import taps
from llamadiff.trace.metadata import Info

Array = NDArray[Any]
HIDDEN = "h_nextn"  # llama.cpp's name of the hidden state that a trunk gives, or a head
OF_TRUNK = "trunk_h_nextn"  # what the trunk's is called here
TAKEN = "mtp_h_input"  # llama.cpp's name of what a head takes
BEFORE = "token before"  # the rows that are taken: token n's is that of token n - 1
LOGITS = "result_output"
CHOSEN = "trunk_chooses"  # where a run's producer says which token the trunk goes on with, of each row


class HeadRecorder(GraphRecorder):
    """The nodes of the trunk, then of the heads. What a head takes is no input but made of what the trunk gives: a row
    of zeros, and the hidden states of all tokens but the last.
    """

    def __init__(self, weights: Weights, rows: int) -> None:
        super().__init__(weights, rows, whole=True, in_steps=False)
        self.part, self.begins = 0, [0]  # the part that is told of, and each one's first node
        self.hidden: dict[str, Any] | None = None  # the trunk's
        self.taken = dict[int, Array]()  # number of the joining node -> what the head was really given

    def begin(self, part: int) -> None:
        """A part begins. Raises UserError where the trunk gave nothing for a head."""
        if part == 1:
            named = [node for node in self.nodes if node["name"] == HIDDEN]
            if not named:
                raise UserError(f"llama.cpp's graph has no {HIDDEN}, so what a head reads of it is not known")
            self.hidden = named[-1]
        if part:
            self.begins.append(len(self.nodes))
        self.part = part

    def _number(self, tensor: Node) -> int:
        if self.part and tensor.name == TAKEN and tensor.address not in self.numbers:
            self.numbers[tensor.address] = number = self._joined()
            self.taken[number] = tensor.values()
        return super()._number(tensor)

    def _joined(self) -> int:
        """The nodes that make of the trunk's hidden states what a head takes; the last one's number: row 0 is zeros,
        row n the n-th token's, and each token takes that of its own number.
        """
        assert self.hidden is not None
        width, given = self.hidden["shape"][-1], self.hidden["number"]
        keys = [-1 - len(self.numbers) - n for n in range(4)]  # no address is negative
        zeros, rows, behind, taken = (self.numbers.setdefault(key, len(self.numbers)) for key in keys)
        for number, name, kind, values in (
            (zeros, "zeros", "f32", np.zeros((1, 1, 1, width), np.float32)),
            (rows, BEFORE, "i32", np.arange(self.rows, dtype=np.int32).reshape(1, 1, 1, -1)),
        ):
            self.leaves.append({"number": number, "name": name, "kind": kind, "shape": [*values.shape]})
            self.given[str(number)] = values
        along = np.array([1, *[0] * 15], np.int32).tobytes()
        self._add(behind, f"{OF_TRUNK} (behind zeros)", "CONCAT", (self.rows + 1, width), [zeros, given], along)
        self._add(taken, TAKEN, "GET_ROWS", (self.rows, width), [behind, rows])
        return taken

    def _add(
        self, number: int, name: str, op: str, shape: Sequence[int], sources: Sequence[int], params: bytes = b""
    ) -> None:
        self.nodes.append({
            "number": number, "name": name, "op": op, "kind": "f32", "shape": [1, 1, *shape], "params": params.hex(),
            "sources": [*sources], "view": None, "tap": None,
        })  # fmt: skip

    def label(self) -> dict[int, str]:
        """The tap that each node is. What trunk and heads name alike is the head's, of several each with its layer."""
        assert self.hidden is not None
        labels, several = super().label(), len(self.begins) > 2
        other = (HIDDEN, LOGITS, TAKEN)
        own = {n: label for n, label in labels.items() if label not in other and not label.startswith(OF_TRUNK)}
        own[self.hidden["number"]] = OF_TRUNK
        for first, last, layer in self._parts():
            for node in self.nodes[first:last]:
                if node["name"] in other:
                    own[node["number"]] = f"{node['name']}-{layer}" if several else node["name"]
        return own

    def _parts(self) -> list[tuple[int, int, int]]:
        """Each head's first node, the one after its last, and its layer's number."""
        edges = [*self.begins[1:], len(self.nodes)]
        found = list[tuple[int, int, int]]()
        for first, last in pairwise(edges):
            named = (node["name"] for node in self.nodes[first:last] if node["name"].startswith("mtp_"))
            layer = next((layer for name in named if (layer := taps.layer_of(name)) is not None), None)
            if layer is None:
                raise UserError("llama.cpp's graph of a head has no node of its own (mtp_), so its layer is not known")
            found.append((first, last, layer))
        return found


@dataclass(frozen=True)
class Wanted:
    """A node whose values are wanted: its number, and how its tap is called and shaped."""

    number: int
    name: str
    shape: tuple[int, ...]
    axis: int | None


class HeadReader(RunReader):
    """A run of trunk and heads: their ``graph``, and a trace of its taps."""

    def __init__(self, request: Request, tell: Tell) -> None:
        super().__init__(request, tell)
        self.part = 0
        self.recorder: HeadRecorder | None = None
        self.wanted: list[dict[int, Wanted]] = []
        self.chosen: Array = np.zeros(0, int)  # the largest of the trunk's logits, of each row

    @cached_property
    def inputs(self) -> NoCheck:
        """What the heads were given that they should not have been (given.py)."""
        return NoCheck()

    def read_answer(self, answer: Mapping[str, Any], data: Sequence[Any]) -> None:
        if "part" in answer:
            self.part = answer["part"]
            if not self.wanted:
                self.recorder = self.recorder or HeadRecorder(self.weights, self.total)
                self.recorder.begin(self.part)
            return
        super().read_answer(answer, data)

    def _node(self, answer: Mapping[str, Any], data: Sequence[Any]) -> None:
        assert self.recorder is not None
        self.recorder.asked(node_of(answer, data, self.order))

    def _asks(self, answer: Mapping[str, Any], data: Sequence[Any]) -> None:
        """Which nodes' values are wanted: those of taps on which a head depends."""
        assert self.recorder is not None
        recorder = self.recorder
        alignment = Alignment(recorder, [recorder])
        shapes, rows = alignment.shapes(), alignment.rows
        self.graph = needed(Graph.unpacked(recorder.packed(self.began["tokens"], rows)))
        assert recorder.hidden is not None
        self.inputs.faults += faults(self.graph, recorder.hidden["number"] + 1)
        self.writer = self.writes(len(self.graph.labelled))
        ours = {number for key, number in recorder.numbers.items() if key < 0}  # nodes that llama.cpp has not
        for first, last in pairwise([*recorder.begins, len(recorder.nodes)]):
            told = [node["number"] for node in recorder.nodes[first:last] if node["number"] not in ours]
            self.wanted.append({
                place: Wanted(number, label, *shapes[label])
                for place, number in enumerate(told)
                if number in self.graph.by_number and (label := self.graph.by_number[number].label) is not None
            })  # fmt: skip
        for number, values in recorder.taken.items():
            label = str(self.graph.by_number[number].label)
            self._add(Wanted(number, label, *shapes[label]), values)
        self.tell(places=[sorted({*places, *self._logits_at(part)}) for part, places in enumerate(self.wanted)])

    def _logits_at(self, part: int) -> list[int]:
        """Where the trunk's logits are among its nodes, which are no tap here."""
        assert self.recorder is not None
        nodes = self.recorder.nodes[: self.recorder.begins[1]] if part == 0 else []
        return [place for place, node in enumerate(nodes) if node["name"] == LOGITS][-1:]

    def _value(self, answer: Mapping[str, Any], data: Sequence[Any]) -> None:
        wanted = self.wanted[self.part].get(answer["value"])
        values = SentTensor(answer["node"], data=data[0], order=self.order).values()
        if wanted is None:
            self.chosen = values.reshape(self.total, -1).argmax(axis=-1)
        else:
            self._add(wanted, values)

    def info(self) -> Info:
        info = super().info()
        return replace(info, producer={**info.producer, CHOSEN: self.chosen.tolist()})

    def _add(self, wanted: Wanted, values: Array) -> None:
        """A tap on its own axes, without padding after the keys."""
        shape, tap = wanted.shape, taps.parse(wanted.name)
        if tap is not None and tap.causal:
            values, shape = values[..., : self.total], (*shape[:-1], self.total)
        values = values.reshape(shape)
        if tap is not None and tap.kind.word == "kq":
            values = seen_scores(values, 0)
        if wanted.axis is None:
            self.writer.add(wanted.name, values)
        else:
            self.writer.add(wanted.name, values, wanted.axis, shape, 0)

    def finish(self) -> None:
        self.writer.finish(self.info())

    @property
    def path(self) -> Path:
        assert self.request.output is not None
        return Path(self.request.output)


def needed(graph: Graph) -> Graph:
    """A graph without the nodes on which no head depends: the trunk's logits, above all."""
    kept, waiting = set[int](), [node.number for node in graph.nodes if str(node.label).startswith(LOGITS)]
    while waiting:
        number = waiting.pop()
        if number not in kept:
            kept.add(number)
            node = graph.by_number.get(number)
            waiting += graph.reads(node) if node is not None else ()
    return replace(graph, nodes=tuple(node for node in graph.nodes if node.number in kept))
