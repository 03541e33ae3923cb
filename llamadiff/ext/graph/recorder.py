"""llama.cpp's graph as its process tells of it: structure, inputs, and which node is which tap."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from llamaref import Weights
from numpy.typing import NDArray

from llamadiff.ext.graph.graph import GRAPH, tap_axes
from llamadiff.ext.graph.node import Node
from llamadiff.trace import taps

Array = NDArray[Any]
UNNAMED = ("node_", "leaf_")
MOVES = ("VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", "CONT", "CPY", "SET_ROWS")  # what these give was there before


FROM_THE_PASS = ("q_decay_exp", "k_decay_exp", "diag_decay_exp")  # inputs that count tokens from the start of a pass


class GraphRecorder:
    """The nodes of one pass over ``rows`` tokens in order, and the leaves they read (``whole``: with their values).

    ``in_steps``: the run that the graph stands for has several passes.
    """

    def __init__(self, weights: Weights, rows: int, whole: bool, in_steps: bool) -> None:
        self.weights, self.rows, self.whole, self.in_steps = weights, rows, whole, in_steps
        self.numbers: dict[int, int] = {}  # address of a tensor -> its number
        self.nodes: list[dict[str, Any]] = []
        self.leaves: list[dict[str, Any]] = []
        self.given: dict[str, Array] = {}
        self._scans: dict[tuple[int, tuple[int, ...]], str | None] = {}  # a scan, and its input's shape -> its tap

    def asked(self, node: Node) -> None:
        """Before a node runs."""
        sources = [self._number(source) for source in node.sources]
        base = node.base
        view = None if base is None else [self._number(base), node.place.hex() if self.whole else ""]
        number = self.numbers.setdefault(node.address, len(self.numbers))
        self.nodes.append({
            "number": number, "name": node.name, "op": node.op, "kind": node.type, "shape": node.shape,
            "params": node.parameters.hex(), "sources": sources, "view": view,
            "tap": self._tap(node, number, sources),
        })  # fmt: skip

    def _tap(self, node: Node, number: int, sources: Sequence[int]) -> str | None:
        """The tap that a node is: of a scan, whose states follow what it puts out, the look at the first."""
        if node.op == "SSM_SCAN":
            self._scans[number, tuple(node.sources[1].shape)] = node.tap
            return None
        return self._scans.get((sources[0], tuple(node.shape))) or node.tap if sources else node.tap

    def _number(self, tensor: Node) -> int:
        address = tensor.address
        if address not in self.numbers:
            self.numbers[address] = number = len(self.numbers)
            self.leaves.append({"number": number, "name": tensor.name, "kind": tensor.type, "shape": tensor.shape})
            if self.whole and tensor.name not in self.weights:
                self.given[str(number)] = tensor.values()
        return self.numbers[address]

    def label(self) -> dict[int, str]:
        """The tap that each node is: the vocabulary's name, or llama.cpp's for the last node that has it.

        Nodes that compute something and have no name of their own are told by their op, so that each is judged alone.
        """
        labels: dict[int, str] = {}
        seen: Counter[str] = Counter()
        taps = {node["tap"]: node["number"] for node in self.nodes if node["tap"]}
        names = {node["name"]: node["number"] for node in self.nodes}
        hidden = self._before_the_mask() | self._from_the_pass()
        for node in self.nodes:
            if 0 in node["shape"] or node["number"] in hidden:
                continue
            number, name = node["number"], node["name"]
            plain = "(" not in name and not name.startswith(UNNAMED)
            if taps.get(node["tap"]) == number:
                labels[number] = node["tap"]
            elif plain and names[name] == number and name not in taps and node["kind"] == "f32":
                labels[number] = name
            elif node["op"] not in MOVES and node["kind"] == "f32":
                label = f"{name} ({node['op'].lower()})"
                seen[label] += 1
                labels[number] = label if seen[label] == 1 else f"{label} {seen[label]}"
        return labels

    def _before_the_mask(self) -> set[int]:
        """Nodes whose values of keys that the mask hides mean nothing, and are different in decode steps.

        They follow raw scores, or rows of a cache that the graph itself chose, and end where the mask is applied.
        """
        raw, scores = set[int](), {n["number"] for n in self.nodes if n["tap"] and n["tap"].startswith("kq-")}
        probabilities = {n["number"] for n in self.nodes if n["op"] == "SOFT_MAX"}
        chosen = self._chosen_from_caches()
        for node in self.nodes:
            follows = not (raw | scores).isdisjoint(node["sources"]) and probabilities.isdisjoint(node["sources"])
            if not node["tap"] and node["op"] != "SOFT_MAX" and (follows or node["number"] in chosen):
                raw.add(node["number"])
        return raw

    def _from_the_pass(self) -> set[int]:
        """Nodes that several passes compute otherwise than one does, up to where both come to the same."""
        if not self.in_steps:
            return set()
        found = {leaf["number"] for leaf in self.leaves if leaf["name"] in FROM_THE_PASS}
        for node in self.nodes:
            if not node["tap"] and not found.isdisjoint(node["sources"]):
                found.add(node["number"])
        return found

    @property
    def has_cache(self) -> bool:
        """Whether a pass leaves anything for the next one."""
        return any(leaf["name"].startswith("cache_") for leaf in self.leaves)

    def _chosen_from_caches(self) -> set[int]:
        """Lookups of a cache's rows by numbers that were computed."""
        bases = {node["number"]: node["view"][0] for node in self.nodes if node["view"] is not None}
        leaves = {leaf["number"]: leaf["name"] for leaf in self.leaves}
        chosen = set[int]()
        for node in self.nodes:
            if node["op"] == "GET_ROWS":
                rows, numbers = (bases.get(source, source) for source in node["sources"])
                if rows in leaves and leaves[rows] not in self.weights and numbers not in leaves:
                    chosen.add(node["number"])
        return chosen

    def keys(self) -> list[tuple[int, int]]:
        """What tells each node, whatever else is in the graph: op and name, or op and sources; and which of those."""
        made: dict[int, int] = {}
        for leaf in self.leaves:
            made[leaf["number"]] = hash("" if leaf["name"].startswith(UNNAMED) else leaf["name"])
        seen: Counter[int] = Counter()
        last = {node["tap"]: node["number"] for node in self.nodes}
        out = []
        for node in self.nodes:
            name, tap, sources = node["name"], node["tap"], tuple(made.get(source, 0) for source in node["sources"])
            unnamed = ("(" in name or name.startswith(UNNAMED)) and not tap
            whole = tap is not None and last[tap] == node["number"]  # whatever op it is: flash attention's are others
            key = hash(tap if whole else (node["op"], sources if unnamed else (name, tap)))
            made[node["number"]] = key
            seen[key] += 1
            out.append((key, seen[key]))
        return out

    def packed(self, tokens: list[int], rows: Mapping[int, int | None]) -> bytes:
        """The graph: leaves' values as tensors, all else in the metadata. ``rows``: node -> its tap's axis."""
        from safetensors.numpy import save

        labels = self.label()
        for node in self.nodes:
            node["label"], node["rows"] = labels.get(node["number"]), rows.get(node["number"])
        about = {"nodes": self.nodes, "leaves": self.leaves, "tokens": tokens}
        arrays = {name: np.ascontiguousarray(values) for name, values in self.given.items()}
        return save(arrays, {GRAPH: json.dumps(about)})


class Alignment:
    """Which node of each pass of a run is which tap of the graph of all its tokens.

    ``rows``: number of a tap's node in the graph -> the tap's axis that runs over tokens; ``places``: for each pass,
    the place of a node among all -> the tap, of those taps that every pass has its rows of.
    """

    def __init__(self, graph: GraphRecorder, passes: Sequence[GraphRecorder]) -> None:
        self.graph, self.passes, self.labels = graph, passes, graph.label()
        self._nodes = {node["number"]: node for node in graph.nodes}
        found = [self._found(one) for one in passes]
        everywhere = [number for number in self.labels if all(number in one for one in found)]
        shapes = {number: [tuple(one[number][1]["shape"]) for one in found] for number in everywhere}
        self.rows = {number: self._axis(number, shapes.get(number, ())) for number in self.labels}
        kept = [number for number in everywhere if self._is_kept(number, shapes[number])]
        self.places = [{one[number][0]: self.labels[number] for number in kept} for one in found]

    def shapes(self) -> dict[str, tuple[tuple[int, ...], int | None]]:
        """Tap -> its axes in the graph of all tokens, and which of them runs over tokens."""
        every = ((number, label, tuple(self._nodes[number]["shape"])) for number, label in self.labels.items())
        return {label: (tap_axes(label, shape, self.graph.rows), self.rows[number]) for number, label, shape in every}

    def _found(self, one: GraphRecorder) -> dict[int, tuple[int, dict[str, Any]]]:
        """The graph's taps that a pass has: number -> place and node in the pass."""
        known = dict(zip(self.graph.keys(), self.graph.nodes, strict=True))
        places = ((known.get(key), place) for place, key in enumerate(one.keys()))
        same = ((node["number"], place) for node, place in places if node is not None)
        return {number: (place, one.nodes[place]) for number, place in same if number in self.labels}

    def _axis(self, number: int, shapes: Sequence[tuple[int, ...]]) -> int | None:
        """The first of a tap's axes that has as many rows as each pass has tokens, where the others are the same."""
        label, whole = self.labels[number], tuple(self._nodes[number]["shape"])
        lead, causal = len(whole) - len(tap_axes(label, whole, self.graph.rows)), _causal(label)
        tap = taps.parse(label)
        likely = lead + (tap.row_axis if tap is not None else 0)
        for axis in (likely,) if causal else (likely, lead, lead + 1):
            wanted = [(*whole[:axis], one.rows, *whole[axis + 1 :]) for one in self.passes]
            same = all(_alike(want, have, causal) for want, have in zip(wanted, shapes, strict=False))
            if whole[axis] == self.graph.rows and same:
                return axis - lead
        return None

    def _is_kept(self, number: int, shapes: Sequence[tuple[int, ...]]) -> bool:
        """Whether the passes' rows together are the tap."""
        if len(self.passes) > 1:
            return self.rows[number] is not None
        return _alike(tuple(self._nodes[number]["shape"]), shapes[0], _causal(self.labels[number]))


def _causal(label: str) -> bool:
    tap = taps.parse(label)
    return tap is not None and tap.causal


def _alike(want: tuple[int, ...], have: tuple[int, ...], causal: bool) -> bool:
    """Whether shapes are the same; how many keys there is room for does not count."""
    return want[:-1] == have[:-1] if causal else want == have
