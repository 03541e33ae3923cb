"""What watch.c wrote down of one graph, read again: every node with its inputs, checked as ``backend`` checks them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from llamaref.held import HeldWeights

from llamadiff.ext.graph.check import NOT_LOOKED_AT, NodeCheck
from llamadiff.ext.graph.graph import VIEWS
from llamadiff.ext.graph.node import Node
from llamadiff.ext.graph.node_checker import NodeChecker
from llamadiff.ext.watch.watched_inputs import FED, GIVEN, OUTPUT, KeptInputs
from llamadiff.llamacpp.dequantize import Dequantizer
from llamadiff.llamacpp.quantizing import EightBits
from llamadiff.llamacpp.request import Request
from llamadiff.llamacpp.tensors import DEVICE, HIDDEN, HOST, Words, describe_in_full

HEAD, TENSOR, DATA, WEIGHT, LACKING, NODE, LARGE, RESULT, END = range(9)  # as in watch.c
ROOM = 64
WHERE = (DEVICE, HOST, HIDDEN)  # as in watch.c
TOO_LARGE = f"{NOT_LOOKED_AT}: larger than --max-node"
TOO_MANY = f"{NOT_LOOKED_AT}: its weight is beyond --max-weights, or of a type that gguf-py does not know"


class _Chunk(ctypes.Structure):
    """struct chunk."""

    _fields_ = [
        ("kind", ctypes.c_uint32), ("where", ctypes.c_uint32), ("size", ctypes.c_uint64), ("at", ctypes.c_uint64),
        ("a", ctypes.c_uint64), ("b", ctypes.c_uint64), ("filler", ctypes.c_char * 24),
    ]  # fmt: skip


class _Described(ctypes.Structure):
    """struct described."""

    _fields_ = [
        ("op", ctypes.c_char * 32), ("word", ctypes.c_char * 32), ("type", ctypes.c_char * 24),
        ("block", ctypes.c_uint64), ("block_bytes", ctypes.c_uint64), ("bytes", ctypes.c_uint64),
    ]  # fmt: skip


@dataclass(frozen=True)
class Head:
    """Whose graph a file is of: a process, the graph's number, the number of the ggml there."""

    process: int
    number: int
    ggml: int


def mapped(path: Path) -> mmap:
    """A file of watch.c's, which needs no name any more."""
    with path.open("rb") as file:
        data = mmap(file.fileno(), 0, access=ACCESS_READ)
    path.unlink()
    return data


def head_of(data: mmap) -> Head:
    """What a file begins with."""
    chunk = _Chunk.from_buffer_copy(data)
    return Head(int(chunk.b), int(chunk.a), int(chunk.at))


def chunks(data: mmap) -> Iterator[tuple[_Chunk, memoryview]]:
    """Every chunk with its bytes."""
    view, place = memoryview(data), 0
    while place < len(view):
        chunk = _Chunk.from_buffer_copy(view[place : place + ctypes.sizeof(_Chunk)])
        place += ctypes.sizeof(_Chunk)
        yield chunk, view[place : place + chunk.size]
        place += -(-chunk.size // ROOM) * ROOM


class ProgramWeights:
    """The weights that were handed over: each has a name here, that of another model's a number behind it."""

    def __init__(self, folder: Path, keep: Path | None = None) -> None:
        """``keep``: a folder for what its encoders and text models are given."""
        self.folder, self.weights, self.inputs = folder, HeldWeights(), KeptInputs(keep)
        self.dequantizer = Dequantizer(self.weights)
        self.weights.decoder = self.dequantizer.decoder
        self._names: dict[tuple[int, int], str | None] = {}
        self._numbers = dict[str, int]()

    def name(self, process: int, number: int, said: Mapping[str, Any]) -> str | None:
        """The name here of a weight that a process handed over; None for one that cannot be read."""
        key = process, number
        if key not in self._names:
            data = mapped(self.folder / f"weight-{process}-{number}")
            self._names[key] = self._taken(said, data)
        return self._names[key]

    def _taken(self, said: Mapping[str, Any], data: mmap) -> str | None:
        count = self._numbers[said["name"]] = self._numbers.get(said["name"], 0) + 1
        own = said["name"] if count == 1 else f"{said['name']}@{count}"
        axes = [*reversed(said["ne"])]
        while len(axes) > 2 and axes[0] == 1:
            axes.pop(0)
        try:
            self.weights.hold(own, said["type"], axes, data)
        except (KeyError, ValueError):
            return None
        return str(own)


class WatchedGraph:
    """One graph of a program's, as parts of it come in."""

    def __init__(self, structure: Any, held: ProgramWeights, request: Request, q8: EightBits, number: int) -> None:
        """``number``: of the graphs that are judged, from 0 on."""
        self.structure, self.held = structure, held
        self.request, self.q8, self.number = request, q8, number
        self._checker: NodeChecker | None = None
        self._tensors: dict[int, dict[str, Any]] = {}
        self._data: dict[int, memoryview] = {}
        self._weights: dict[int, str] = {}
        self._lacking: set[int] = set()
        self._pending: Node | None = None
        self.read: dict[str, str] = {}  # weights: the names here, and the program's
        self.nodes: list[str] = []
        self._unread = dict[int, str]()  # results that no node has read yet: where they are, and of which op
        self.fed = dict[str, None]()
        self.given = dict[str, None]()
        self._last: Node | None = None
        self.is_whole = False

    @property
    def fills(self) -> bool:
        """Whether all that comes of it is copied into a memory that was there."""
        return {*self._unread.values()} == {"CPY"}

    @property
    def on_device(self) -> bool:
        """Whether some of its nodes ran on a device."""
        return self._checker is not None and self._checker.on_device

    @property
    def checks(self) -> list[NodeCheck]:
        return self._checker.results if self._checker is not None else []

    def take(self, data: mmap) -> None:
        """Check the nodes of one more part."""
        for chunk, part in chunks(data):
            self._take(chunk, part)
        self._data.clear()
        if self.is_whole and self._checker is not None:
            self._checker.settle()

    @property
    def checker(self) -> NodeChecker:
        if self._checker is None:
            self._checker = NodeChecker(self.held.weights, self.request, self.q8)
            self._checker.begin(self.number)
        return self._checker

    def _take(self, chunk: _Chunk, part: memoryview) -> None:
        if chunk.kind == TENSOR:
            self._tensors[chunk.at] = self._said(chunk, part)
            self._weights.pop(chunk.at, None)
            self._lacking.discard(chunk.at)
        elif chunk.kind in (DATA, RESULT):
            self._data[chunk.at] = part
            if chunk.kind == RESULT:
                self._finish(part)
        elif chunk.kind == WEIGHT:
            self._note_weight(chunk)
        elif chunk.kind == LACKING:
            self._lacking.add(chunk.at)
        elif chunk.kind == NODE:
            self._begin(chunk.at)
        elif chunk.kind == LARGE:
            self.checker.pass_over(self._node(chunk.at), TOO_LARGE)
        elif chunk.kind == END:
            self.is_whole = True
            if self._last is not None:
                self.held.inputs.keep(self.number, OUTPUT, self._last)

    def _note_weight(self, chunk: _Chunk) -> None:
        said = self._tensors[chunk.at]
        name = self.held.name(int(chunk.b), int(chunk.a), said)
        if name is None:
            self._lacking.add(chunk.at)
        else:
            self._weights[chunk.at] = name
            self.read[name] = said["name"]

    def _begin(self, at: int) -> None:
        node = self._node(at)
        self.nodes += [node.name, *(source.name for source in node.sources)]
        for source in self._tensors[at]["sources"]:
            self._unread.pop(source, None)
        self._unread[at] = node.op
        if any(source.address in self._lacking for source in node.sources):
            self.checker.pass_over(node, TOO_MANY)
            self._pending = None
            return
        self._pending = node
        self._keep_inputs(node)
        if not self._is_by_place(node):
            self.checker.asked(node)
        self._data.clear()

    def _keep_inputs(self, node: Node) -> None:
        """Note what an encoder or a text model is given, and keep it: it is not computed here, so nothing judges it."""
        for source in node.sources:
            if source.name in FED and source.op == "NONE" and source.name not in self.fed:
                self.fed[source.name] = None
                self.held.inputs.keep(self.number, source.name, source)
            name = GIVEN.get(source.name.removesuffix(" (copy)"))
            is_given = source.op == "NONE" or name == "mask"  # which may be a copy in another type
            if name is not None and is_given and name not in self.given and len(source.data):
                self.given[name] = None
                self.held.inputs.keep(self.number, name, source)

    def _is_by_place(self, node: Node) -> bool:
        """Whether it looks at a memory whose values were not handed over."""
        return (
            node.op in VIEWS
            and bool(node.sources)
            and node.sources[0].memory > 0
            and not len(node.base.data if node.op == "VIEW" and node.base is not None else node.sources[0].data)
        )

    def _finish(self, part: memoryview) -> None:
        if self._pending is not None and self._is_by_place(self._pending):
            self.checker.judged_by_place(self._pending)
        elif self._pending is not None:
            self.checker.done(replace(self._pending, data=part))
            self._last = replace(self._pending, data=part) if self.fed else None
        self._pending = None
        self._data.clear()

    def _node(self, at: int) -> Node:
        """A node with its sources, of whose bytes some were handed over."""
        said = self._tensors[at]
        view = said["view"]
        base = self._source(view[0]) if view is not None and view[0] in self._tensors else None
        sources = tuple(map(self._source, said["sources"]))
        numbers = [self._tensors[each]["number"] for each in said["sources"][: len(said["places"])]]
        looks = view is None or base is None or said["data"] == base.said["data"] + view[1]
        return Node({**said, "numbers": numbers, "looks": looks, "tap": None}, sources=sources, base=base)

    def _source(self, at: int) -> Node:
        """A source: a weight has its name here, and nothing else has one of those."""
        said, own = self._tensors[at], self._weights.get(at)
        if own is not None:
            said = {**said, "name": own, "op": "NONE"}
        elif said["name"] in self.held.weights:
            said = {**said, "name": f"{said['name']} (given)"}
        return Node(said, data=self._data.get(at, b""))

    def _said(self, chunk: _Chunk, part: memoryview) -> dict[str, Any]:
        """A tensor as plain data, and where its values are."""
        tensor = self.structure.from_buffer_copy(part)
        more = _Described.from_buffer_copy(part[ctypes.sizeof(self.structure) :])
        words = Words(more.op.decode(), more.type.decode(), int(more.bytes), WHERE[chunk.where])
        said = describe_in_full(tensor, chunk.at, words, more.word.decode())
        return {**said, "data": tensor.data or 0, "begins": (int(chunk.a), int(chunk.b))}
