"""Records llama.cpp's graph as it runs, in the child process: structure, inputs, and every tap's values."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from llamaref import Weights
from numpy.typing import NDArray

from llamadiff.llamacpp.ggml import Node
from llamadiff.llamacpp.names import tap_name

Array = NDArray[Any]
UNNAMED = ("node_", "leaf_")
MOVES = ("VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", "CONT", "CPY", "SET_ROWS")  # what these give was there before


class GraphRecorder:
    """The nodes of one pass in order, and the leaves they read."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.numbers: dict[int, int] = {}  # address of a tensor -> its number
        self.nodes: list[dict[str, Any]] = []
        self.leaves: list[dict[str, Any]] = []
        self.given: dict[str, Array] = {}

    def asked(self, node: Node) -> None:
        """Before a node runs."""
        sources = [self._number(source) for source in node.sources]
        base = node.base
        view = None if base is None else [self._number(base), node.place.hex()]
        number = self.numbers.setdefault(node.address, len(self.numbers))
        tap = tap_name(node.name, node.op, [source.name for source in node.sources])
        self.nodes.append({
            "number": number, "name": node.name, "op": node.op, "kind": node.type, "shape": node.shape,
            "params": node.parameters.hex(), "sources": sources, "view": view,
            "tap": None if node.op == "SSM_SCAN" else tap,  # its states follow what it puts out
        })  # fmt: skip

    def _number(self, tensor: Node) -> int:
        address = tensor.address
        if address not in self.numbers:
            self.numbers[address] = number = len(self.numbers)
            self.leaves.append({"number": number, "name": tensor.name, "kind": tensor.type, "shape": tensor.shape})
            if tensor.name not in self.weights:
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
        for node in self.nodes:
            if 0 in node["shape"]:
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

    def write(self, path: Path, tokens: list[int]) -> None:
        """Write the graph: leaves' values as tensors, everything else in the metadata."""
        from safetensors.numpy import save_file

        labels = self.label()
        for node in self.nodes:
            node["label"] = labels.get(node["number"])
        about = {"nodes": self.nodes, "leaves": self.leaves, "tokens": tokens}
        arrays = {name: np.ascontiguousarray(values) for name, values in self.given.items()}
        save_file(arrays, path, {"llamadiff.graph": json.dumps(about)})
