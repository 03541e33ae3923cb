"""The file's tensors against a model's parameters: the same numbers, in another order, elsewhere, or others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from llamaref import Weights
from llamaref.known_tensors import usual_names
from numpy.typing import NDArray

from llamadiff.ext.graph.graph import Graph, GraphNode
from llamadiff.ext.port.alignment import distance, profile

Array = NDArray[Any]
SAME = 1e-11  # NMSE of a parameter that only went through float32
OTHER = 1e-6  # and of one that has other values
SAMPLE, MOST = 512, 0.9  # numbers that are sought, and how large a share is found
ALIKE = 1e-5  # relative, of numbers that are one
# What converters make of a parameter, besides another order.
MADE: tuple[tuple[str, Callable[[Array], Array]], ...] = (
    ("{}", lambda x: x), ("{} + 1", lambda x: x + 1), ("-exp({})", lambda x: -np.exp(x)), ("-{}", lambda x: -x),
)  # fmt: skip


class Tensors:
    """``parameters``: the model's, by name; ``layers``: the names that those of each layer begin with."""

    def __init__(
        self, weights: Weights, architecture: str, parameters: Mapping[str, Array], layers: Sequence[str]
    ) -> None:
        self.weights, self.architecture, self.parameters = weights, architecture, parameters
        self.layers = layers

    def of_layer(self, layer: int | None) -> dict[str, Array]:
        """The parameters of a layer; of none (None), those outside of them."""
        wanted = None if layer is None or layer >= len(self.layers) else f"{self.layers[layer]}."
        return {
            name: x
            for name, x in self.parameters.items()
            if (wanted is None and not any(name.startswith(f"{each}.") for each in self.layers))
            or (wanted is not None and name.startswith(wanted))
        }

    def holding(self, parameter: Array) -> list[str]:
        """The file's tensors that have the values of a parameter, or what converters make of it."""
        mine = [make(parameter).astype(np.float64).ravel() for _, make in MADE]
        sums = [float(x @ x) for x in mine]
        found = []
        for name in self._sizes:
            if self._sizes[name] != parameter.size:
                continue
            alike = [x for x, s in zip(mine, sums, strict=True) if abs(self._square(name) - s) <= ALIKE * s]
            if alike:
                own = profile(self.weights.whole(name))
                found += [name] if any(distance(own, profile(x)) <= SAME for x in alike) else []
        return found

    def _square(self, name: str) -> float:
        """The sum of a tensor's squares."""
        if name not in self._squares:
            own = self.weights.whole(name).astype(np.float64).ravel()
            self._squares[name] = float(own @ own)
        return self._squares[name]

    @cached_property
    def _squares(self) -> dict[str, float]:
        return {}  # of tensors that were asked for

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return {name: int(np.prod(self.weights.shape(name))) for name in self.weights}

    def misplaced(self, layer: int | None) -> Iterator[str]:
        """What the file has under another name than llama.cpp's converters give it, of a layer's parameters."""
        for name, x in self.of_layer(layer).items():
            usual = self.usual_name(name)
            if usual is None or usual not in self._sizes or self._sizes[usual] != x.size:
                continue
            there = self.holding(x)
            if there and usual not in there:
                yield f"the file's {there[0]} has the values of {name}, which is {usual}"

    def usual_name(self, parameter: str) -> str | None:
        """What llama.cpp's converters call a parameter."""
        whole = parameter.replace("vision_tower.", "vision_tower.vision_model.")  # as checkpoints have it
        return self._usual_names(parameter) or self._usual_names(whole)

    @cached_property
    def _usual_names(self) -> Callable[[str], str | None]:
        return usual_names(self.architecture, len(self.layers))

    def is_kept(self, parameter: Array) -> bool:
        """Whether a parameter's numbers are in the file, in one tensor or in two or three parts."""
        cuts = [np.split(parameter, count, axis) for count in (2, 3) for axis in range(parameter.ndim)
                if parameter.shape[axis] == count or (axis == 0 and parameter.shape[0] % count == 0)]  # fmt: skip
        return bool(self.holding(parameter)) or any(all(self.holding(part) for part in parts) for parts in cuts)

    def differing(self, nodes: Sequence[GraphNode], graph: Graph, layer: int | None) -> str | None:
        """What the file has otherwise than the model, of the tensors that some nodes read; None where none is seen.

        Nothing is said of a tensor that is a part of a parameter, or made of several.
        """
        own = self.of_layer(layer)
        for name in self._read_by(nodes, graph):
            values = self.weights.whole(name)
            alike = {other: x for other, x in own.items() if x.size == values.size}
            if alike and not self._is_made(values, own):
                one = f"has other values in {next(iter(alike))} than the file in {name}" if len(alike) == 1 else None
                return one or f"has no parameter with the values of the file's {name}"
        return None

    def as_it_is(self, parameter: Array) -> bool:
        """Whether a tensor of the file is a parameter, in its order."""
        for name in self.holding(parameter):
            values = self.weights.whole(name).squeeze()
            for x in (parameter.squeeze(), parameter.squeeze().T):
                if x.shape == values.shape and any(distance(values, make(x)) <= SAME for _, make in MADE):
                    return True
        return False

    def are_others(self, nodes: Sequence[GraphNode], graph: Graph) -> bool:
        """Whether nodes read a tensor whose values the model has not, or that experts have in another order."""
        for node in nodes:
            for name in self._read_by([node], graph):
                values, own = self.weights.whole(name), self.of_layer(_layer_of(name))
                if any(x.size == values.size for x in own.values()) and not self._is_made(values, own):
                    return True
                if node.op == "MUL" and not _hold(list(own.values()), values):
                    return True  # one more than the parameter, where the model takes it as it is
                if node.op == "MUL_MAT_ID" and not any(_is_part(values, x) for x in own.values()):
                    return True
        return False

    def _read_by(self, nodes: Sequence[GraphNode], graph: Graph) -> Iterator[str]:
        return (name for name in read_by_nodes(nodes, graph) if name in self.weights)

    def _is_made(self, values: Array, own: Mapping[str, Array]) -> bool:
        """Whether a tensor has the numbers of parameters, or what converters make of them."""
        return any(_hold([make(x) for x in own.values()], values) for _, make in MADE)


def _layer_of(tensor: str) -> int | None:
    """3 of ``blk.3.ffn_up.weight``."""
    found = re.match(r"(?:[av]\.)?blk\.([0-9]{1,9})\.", tensor)
    return int(found[1]) if found else None


def _is_part(tensor: Array, parameter: Array) -> bool:
    """Whether a tensor of experts is a parameter, or a part of one, expert by expert."""
    if tensor.ndim != 3 or parameter.ndim != 3 or len(tensor) != len(parameter):
        return False
    return all(_hold([theirs], mine) for mine, theirs in zip(tensor, parameter, strict=True))


def have(tensors: Sequence[Array], parameter: Array) -> bool:
    """Whether tensors have the numbers of a parameter, or what converters make of it, all of them together."""
    return any(_hold(tensors, make(parameter)) for _, make in MADE)


def _hold(tensors: Sequence[Array], values: Array) -> bool:
    few = values.ravel()[:: max(1, values.size // SAMPLE)]
    there = np.zeros(len(few), bool)
    for tensor in tensors:
        own = np.sort(tensor.ravel())
        for place in np.searchsorted(own, few) + np.array([[-1], [0]]):
            near = own[np.clip(place, 0, len(own) - 1)]
            there |= np.abs(near - few) <= ALIKE * np.abs(few)
    return bool(there.mean() > MOST)


def read_by_nodes(nodes: Sequence[GraphNode], graph: Graph) -> Iterator[str]:
    """The leaves that nodes read, themselves or through a lookup of rows: tensors of the file, and inputs."""
    for number in (number for node in nodes for number in node.sources if number is not None):
        looked = graph.by_number.get(number)
        leaf = graph.leaves.get(number if looked is None or looked.op != "GET_ROWS" else looked.sources[0] or -1)
        if leaf is not None:
            yield leaf.name
