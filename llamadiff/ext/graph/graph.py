"""A recorded graph of llama.cpp: nodes, leaves (weights and inputs), and which node is which tap."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from llamadiff.ext.graph.op import Array
from llamadiff.trace import taps
from llamadiff.trace.stated import parse_json

GRAPH = "llamadiff.graph"  # where a file keeps one
STORES = ("SET_ROWS", "CPY")  # their first source, into the memory that they view
VIEWS = ("VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE")  # the memory of another, as it lies there
LOOKS = (*VIEWS, "CONT", "CPY")

_MASKS = {"SOFT_MAX": 1, "FLASH_ATTN_EXT": 3}  # op -> which of its sources the mask is


@dataclass(frozen=True)
class GraphNode:
    """One node: its op, and which tensors it reads. Tensors are numbered; leaves are named.

    ``view``: the tensor whose memory it looks into, where it begins and how it steps, in values. ``label`` is the name
    of the tap that it is, if it is one, and ``rows`` the axis of that which runs over tokens.
    """

    number: int
    name: str
    label: str | None
    op: str
    kind: str
    shape: tuple[int, ...]
    params: bytes
    sources: tuple[int | None, ...]
    view: tuple[int, bytes] | None
    rows: int | None = None

    @property
    def writes(self) -> bool:
        """Whether what it gives lies in another's memory: those that store, and whatever is computed in place."""
        return self.view is not None and self.op not in VIEWS


@dataclass(frozen=True)
class Leaf:
    """What a graph is given: a weight of the file, or an input or a cache with the values it had at first."""

    number: int
    name: str
    kind: str
    shape: tuple[int, ...]


def _node(n: Mapping[str, Any]) -> GraphNode:
    view = None if n["view"] is None else (n["view"][0], bytes.fromhex(n["view"][1]))
    shape, sources, params = tuple(n["shape"]), tuple(n["sources"]), bytes.fromhex(n["params"])
    return GraphNode(n["number"], n["name"], n["label"], n["op"], n["kind"], shape, params, sources, view, n["rows"])


@dataclass(frozen=True)
class Graph:
    """Nodes in the order in which they run, leaves, and the values of those leaves that are no weights."""

    nodes: tuple[GraphNode, ...]
    leaves: Mapping[int, Leaf]
    given: Mapping[int, Array]
    tokens: tuple[int, ...]

    @classmethod
    def read(cls, path: Path) -> Graph:
        """Read what a run of llama.cpp recorded."""
        return cls.unpacked(path.read_bytes())

    @classmethod
    def unpacked(cls, data: bytes) -> Graph:
        """The same of a file's bytes. Raises ValueError, or KeyError, for others."""
        from safetensors import SafetensorError
        from safetensors.numpy import load

        try:
            given = {int(name): values for name, values in load(data).items()}
        except SafetensorError as error:
            raise ValueError(str(error)) from None
        (size,) = struct.unpack("<Q", data[:8])
        about = parse_json(parse_json(data[8 : 8 + size])["__metadata__"][GRAPH])
        nodes = tuple(map(_node, about["nodes"]))
        known = (Leaf(leaf["number"], leaf["name"], leaf["kind"], tuple(leaf["shape"])) for leaf in about["leaves"])
        leaves = {leaf.number: leaf for leaf in known}
        return cls(nodes, leaves, given, tuple(about["tokens"]))

    def at(self, positions: Sequence[int]) -> Graph:
        """The same of some tokens of a longer prompt, at their positions there.

        K and V of the others it does not have: what attention gives is NaN.
        """
        places = {node.sources[1] for node in self.nodes if node.op == "ROPE"}
        masks = {node.sources[_MASKS[node.op]] for node in self.nodes if len(node.sources) > _MASKS.get(node.op, 9)}
        given = dict(self.given)
        for number, values in given.items():
            if number in places and values.size == len(positions):
                given[number] = np.array(positions, values.dtype).reshape(values.shape)
            elif self._shown(masks, number):
                given[number] = np.full_like(values, np.nan)
        return replace(self, given=given)

    def in_room(self, n_ctx: int) -> Graph:
        """The same in a context of so many tokens (0: as it is), by which llama.cpp chooses LongRoPE's factors."""
        original = max(
            (struct.unpack_from("<i", node.params, 16)[0] for node in self.nodes if node.op == "ROPE"), default=0
        )
        if not n_ctx or not original:
            return self
        side = "long" if n_ctx > original else "short"
        named = {each: re.sub("(?<=^rope_factors_)(long|short)", side, leaf.name) for each, leaf in self.leaves.items()}
        return replace(self, leaves={each: replace(leaf, name=named[each]) for each, leaf in self.leaves.items()})

    def _shown(self, masks: Collection[int | None], number: int) -> bool:
        """Whether a leaf is a mask, or is cast to one (flash attention's, float16)."""
        copies = (node.number for node in self.nodes if node.op in LOOKS and number in node.sources)
        return number in masks or any(copy in masks for copy in copies)

    @cached_property
    def by_number(self) -> dict[int, GraphNode]:
        return {node.number: node for node in self.nodes}

    @cached_property
    def labelled(self) -> dict[str, GraphNode]:
        return {node.label: node for node in self.nodes if node.label is not None}

    @cached_property
    def kept(self) -> dict[str, GraphNode]:
        """The taps of cached rows (``kv_k-3``) -> the views of a layer's cache that attention reads."""
        words = {"cache_k": "kv_k", "cache_v": "kv_v"}
        names = {leaf.number: leaf.name.rpartition("_l") for leaf in self.leaves.values()}
        known = {number: f"{words[cache]}-{i}" for number, (cache, _, i) in names.items() if cache in words}
        views = [node for node in self.nodes if node.op == "VIEW" and node.view and node.view[0] in known]
        return {known[node.view[0]]: node for node in views if node.view}

    def op_of(self, node: GraphNode) -> str:
        """The op that makes a node's values: of one that shows another, which llama.cpp has no name for, that one's."""
        shown = self.by_number.get(node.sources[0] or 0) if node.op in LOOKS and node.sources else None
        is_named = shown is not None and shown.label is not None and "(" not in shown.label
        return node.op if shown is None or is_named else self.op_of(shown)

    def inputs(self, label: str) -> list[str]:
        """The taps that a tap is computed from, following nodes that are no taps to their sources."""
        found: dict[str, None] = {}
        seen: set[int] = set()
        waiting = [*self.reads(self.labelled[label])]
        while waiting:
            number = waiting.pop()
            node = self.by_number.get(number)
            if node is None or number in seen:
                continue
            seen.add(number)
            if node.label is not None and node.label != label:
                found[node.label] = None
            else:
                waiting.extend(self.reads(node))
        order = list(self.labelled)
        return sorted(found, key=order.index)

    def weight_of(self, label: str) -> str | None:
        """The weight that makes a tap: of the product, or the row lookup, nearest to it."""
        waiting, seen = [self.labelled[label].number], set[int]()
        while waiting:
            node = self.by_number.get(waiting.pop(0))
            if node is None or node.number in seen or (node.label not in (None, label)):
                continue
            seen.add(node.number)
            first = node.sources[0] if node.sources else None
            leaf = self.leaves.get(first) if first is not None else None
            if leaf is not None and leaf.number not in self.given and node.op in ("MUL_MAT", "MUL_MAT_ID", "GET_ROWS"):
                return leaf.name
            waiting += self.reads(node)
        return None

    def reads(self, node: GraphNode) -> tuple[int, ...]:
        """Tensors that a node reads; a view of a cache reads what was written into it before."""
        if node.number not in self._reads:
            self._reads[node.number] = tuple(self._read_by(node))
        return self._reads[node.number]

    @cached_property
    def _reads(self) -> dict[int, tuple[int, ...]]:
        return {}  # what was asked already

    def _read_by(self, node: GraphNode) -> list[int]:
        numbers = [source for source in node.sources if source is not None]
        for view in [self.by_number[number] for number in numbers if number in self.by_number]:
            if view.op in VIEWS and view.view is not None:
                written = self._writers.get(view.view[0], ())
                numbers += [writer.number for writer in written if view.number < writer.number < node.number]
        if node.view is not None:
            written = self._writers.get(node.view[0], ())
            numbers += [node.view[0], *(writer.number for writer in written if writer.number < node.number)]
        return numbers

    @cached_property
    def views(self) -> dict[int, list[GraphNode]]:
        """Memory -> the nodes that look into it."""
        return self._by_memory(lambda node: node.op in VIEWS)

    @cached_property
    def _writers(self) -> dict[int, list[GraphNode]]:
        """Memory -> the nodes that write into it."""
        return self._by_memory(lambda node: node.writes)

    def _by_memory(self, does: Callable[[GraphNode], bool]) -> dict[int, list[GraphNode]]:
        out: dict[int, list[GraphNode]] = {}
        for node in self.nodes:
            if node.view is not None and does(node):
                out.setdefault(node.view[0], []).append(node)
        return out


def tap_shape(node: GraphNode, n_tokens: int) -> tuple[int, ...]:
    """A node's axes as a tap has them, in a graph of so many tokens."""
    return tap_axes(str(node.label), node.shape, n_tokens)


def tap_axes(label: str, shape: tuple[int, ...], n_tokens: int) -> tuple[int, ...]:
    """ggml's axes without ones at the outer end: two at least, three where heads are before tokens.

    A one that is the only token stays.
    """
    known = taps.parse(label)
    heads_first = known is not None and known.row_axis == 1
    while len(shape) > (3 if heads_first else 2) and shape[0] == 1:
        if n_tokens == 1 and not heads_first and shape[1] != 1:
            break
        shape = shape[1:]
    return shape
