"""A node of a subgraph, and what bugs ask about it: its parameters, what it reads, who reads it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from llamadiff.ext.explain.case import Array, Case, NotRecordedError
from llamadiff.ext.explain.subgraph import Subgraph
from llamadiff.ext.graph.engine import GraphEngine
from llamadiff.ext.graph.graph import LOOKS, GraphNode, Leaf
from llamadiff.trace import taps
from llamadiff.trace.taps import layer_of

_NUMBERED = re.compile(r"(node|leaf)_[0-9]+")
_OPS: Mapping[str, tuple[str, int]] = {  # an op of a node without a name, in words, and of how many of its sources
    "ADD": ("the sum of {}", 2), "MUL": ("the product of {}", 2), "MUL_MAT": ("the product of {}", 2),
    "MUL_MAT_ID": ("the experts' product of {}", 2), "SCALE": ("the scaled {}", 1), "GET_ROWS": ("the chosen {}", 1),
}  # fmt: skip


@dataclass(frozen=True)
class Site:
    """A node of a subgraph, with what bugs ask about it."""

    node: GraphNode
    sub: Subgraph
    case: Case

    @property
    def engine(self) -> GraphEngine:
        return self.sub.engine

    @property
    def floats(self) -> Array:
        return np.frombuffer(self.node.params, np.float32)

    @property
    def ints(self) -> Array:
        return np.frombuffer(self.node.params, np.int32)

    def number(self, place: int) -> int | None:
        """The tensor that is the node's source at a place."""
        return self.node.sources[place] if place < len(self.node.sources) else None

    def node_at(self, place: int) -> GraphNode | None:
        """The node that is right at a place; None for a leaf."""
        number = self.number(place)
        return self.engine.graph.by_number.get(number) if number is not None else None

    def leaf(self, place: int) -> Leaf | None:
        """The leaf at a place, if there is one."""
        number = self.number(place)
        return self.engine.graph.leaves.get(number) if number is not None else None

    def weight(self, place: int) -> str:
        """The name of the file's tensor at a place; empty if none is there."""
        leaf = self.leaf(place)
        return leaf.name if leaf is not None and leaf.number not in self.engine.graph.given else ""

    def source(self, place: int, whole: bool = False) -> GraphNode | None:
        """The node at a place, following view-like nodes, and picked rows, to their base.

        ``whole``: as long as they show all values of it, so not to a fused product.
        """
        node = self.node_at(place)
        while node is not None and self.shows(node) and node.sources and node.sources[0] is not None:
            below = self.engine.graph.by_number.get(node.sources[0])
            if below is None or (whole and np.prod(below.shape) != np.prod(node.shape)):
                break
            node = below
        return node

    @property
    def adapter(self) -> str:
        """The weight that an adapter adds to, where this node is a product with one of its two matrices, that times
        its scale, or the sum of that and the weight's own product; else empty."""
        node, place = self, {"ADD": 1, "SCALE": 0}.get(self.node.op)
        while place is not None:
            below = node.node_at(place)
            if below is None or below.op not in ("SCALE", "MUL_MAT", "MUL_MAT_ID"):
                return ""
            node, place = self.at(below), 0 if below.op == "SCALE" else None
        leaf = node.leaf(0) if node.node.op in ("MUL_MAT", "MUL_MAT_ID") else None
        weight, _, end = leaf.name.rpartition(".") if leaf is not None else ("", "", "")
        return weight if end in ("lora_a", "lora_b") else ""

    def source_of_view(self) -> GraphNode | None:
        """The node whose memory this one looks into."""
        return self.engine.graph.by_number.get(self.node.view[0]) if self.node.view is not None else None

    def shows(self, node: GraphNode) -> bool:
        """Whether a node shows another's values as they are: all, or the rows that a run is asked for."""
        picks = node.op == "GET_ROWS" and {node.sources[1]} & set(self.engine.graph.given)
        return node.op in LOOKS or bool(picks and not self.at(node).weight(0))

    def at(self, node: GraphNode) -> Site:
        """Another node of the same subgraph."""
        return replace(self, node=node)

    def direct(self, place: int) -> str:
        """The op of the node that is right at a place; empty for a leaf."""
        node = self.node_at(place)
        return node.op if node is not None else ""

    def shape(self, place: int) -> tuple[int, ...]:
        """The shape of what is at a place."""
        number, graph = self.number(place), self.engine.graph
        assert number is not None
        return tuple((graph.by_number.get(number) or graph.leaves[number]).shape)

    def user(self, *ops: str) -> GraphNode | None:
        """The first of the users with one of these ops."""
        return next((user for user in self.users() if user.op in ops), None)

    def users(self) -> list[GraphNode]:
        """The graph's nodes that read this one, directly or through nodes that show it."""
        found, out = {self.node.number}, []
        for node in self.engine.graph.nodes:
            if not found.isdisjoint(node.sources):
                if self.shows(node):
                    found.add(node.number)
                else:
                    out.append(node)
        return out

    def own(self, node: GraphNode | None) -> bool:
        """Whether a node is one that is computed here, so that it can be changed too."""
        return node is not None and self.sub.computes(node) and node in self.sub.nodes

    def vector(self, name: str) -> Array:
        """A tensor of the file."""
        return self.engine.w.whole(name)

    def has(self, name: str) -> bool:
        return name in self.engine.w

    def others(self, name: str) -> Iterator[tuple[str, str]]:
        """Tensors of the file with the shape of one: name, and the same counted from its layer."""
        shape = self.engine.w.shape(name)
        layer = _layer(name)
        for other in self.case.run.model.tensors:
            if other != name and self.engine.w.shape(other) == shape:
                own = _layer(other)
                stem = other.split(".", 2)[-1]
                yield other, f"{own - layer:+d}.{stem}" if own is not None and layer is not None else other

    def recorded(self, shape: tuple[int, ...]) -> Iterator[tuple[str, Array]]:
        """Recorded taps before this node with as many values as a shape has, the nearest first: name and values."""
        for label, node in reversed(self.engine.graph.labelled.items()):
            if node.number < self.node.number and np.prod(node.shape) == np.prod(shape) and "(" not in label:
                with suppress(NotRecordedError):
                    x = self.case.values(label)
                    if x.size == np.prod(shape):  # of scores, those of empty slots are not recorded
                        yield label, x.reshape(1, *shape)

    @cached_property
    def layer(self) -> int | None:
        """The layer of the node: that of the first named one from it on; None outside the layers."""
        return next((layer_of(label) for label in self._labels_from_here()), None)

    @cached_property
    def shown(self) -> str:
        """The first tap that this node, or one that follows it in the graph, is."""
        return next((label for label in self._labels_from_here() if "(" not in label), "")

    def _labels_from_here(self) -> Iterator[str]:
        nodes = (node for node in self.engine.graph.nodes if node.number >= self.node.number)
        return (node.label for node in nodes if node.label is not None)

    def nearest(self, op: str) -> GraphNode | None:
        """The node with an op that is nearest to this one, of its own layer if there is one."""
        found = [node for node in self.engine.graph.nodes if node.op == op]
        own = [node for node in found if node.label and layer_of(node.label) == self.layer]
        return min(own or found, key=lambda node: abs(node.number - self.node.number), default=None)

    def writer(self, cache: str) -> GraphNode | None:
        """What makes the rows that are put into a cache (``cache_k``) of this layer."""
        for node in self.engine.graph.nodes:
            leaf = self.engine.graph.leaves.get(node.view[0]) if node.op == "SET_ROWS" and node.view else None
            if leaf is not None and leaf.name == f"{cache}_l{self.layer}":
                return self.at(node).source(0, whole=True)
        return None

    def computed(self, node: GraphNode, x: Array) -> Array:
        """What another node, whose other sources are leaves, makes of values in its first source's place."""
        first = node.sources[0]
        assert first is not None
        shaped = replace(node, shape=x.shape[-4:])
        return self.engine.computed(shaped, {**self.engine.leaves(), first: x}, self.case.carrier)

    def named(self, place: int) -> str:
        """What is at a place, in words: a tensor's or a tap's name, or else the op that makes it of such."""
        site, node = self, self.node_at(place)
        while node is not None and not _is_name(node.label) and self.shows(node):
            site, place = self.at(node), 0
            node = site.node_at(0)
        leaf = site.leaf(place)
        if node is None:
            return leaf.name if leaf is not None and _is_name(leaf.name) else "a constant"
        return str(node.label) if _is_name(node.label) else self.at(node)._in_words()

    def _in_words(self) -> str:
        """The node's op, and the nearest names of what it reads."""
        of = [self._below(place) for place in range(len(self.node.sources)) if self.number(place) is not None]
        says, count = _OPS.get(self.node.op, (f"the {self.node.op.lower().replace('_', ' ')} of {{}}", 1))
        return says.format(" and ".join(dict.fromkeys(of[:count])))

    def _below(self, place: int) -> str:
        """The name of what is at a place, or of the first named thing that this is made of."""
        site = self
        while (node := site.node_at(place)) is not None and not _is_name(node.label):
            site, place = site.at(node), 0
        return site.named(place)

    @property
    def tap(self) -> str | None:
        """The first named tap that shows this node's result; None if that is the tap that is judged.

        A node whose name is none of the vocabulary's, as a norm before its weight, has that of the next, if that is.
        """
        after = [self.node, *self.sub.after({self.node.number})]
        named = [str(node.label) for node in after if node.label and "(" not in node.label] or [self.case.tap.name]
        first = next((name for name in named[:2] if taps.parse(name) is not None), named[0])
        return None if first == self.case.tap.name else first


def _is_name(label: str | None) -> bool:
    """Whether a label tells somebody what it is: not a number, nor another node's name with an op."""
    return label is not None and "(" not in label and _NUMBERED.match(label) is None


def _layer(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blk" else None
