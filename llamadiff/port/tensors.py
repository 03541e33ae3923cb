"""The file's tensors against a model's parameters, where the two part: the same numbers, another order, or others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from llamaref import Weights
from numpy.typing import NDArray

from llamadiff.ggml.graph import Graph, GraphNode
from llamadiff.port.alignment import distance, profile

Array = NDArray[Any]
SAME = 1e-12  # NMSE of a parameter that only went through float32
OTHER = 1e-6  # and of one that has other values
SAMPLE, MOST = 4096, 0.9  # numbers of a tensor that are sought, and how large a share is found
# What converters make of a parameter, besides another order.
MADE: tuple[Callable[[Array], Array], ...] = (lambda x: x, lambda x: x + 1, lambda x: -np.exp(x), lambda x: -x)


def parameters_of(model: Any, layers: Sequence[str]) -> dict[int | None, dict[str, Array]]:
    """By layer (None: outside of them), a model's parameters by name."""
    found: dict[int | None, dict[str, Array]] = {}
    for name, values in model.named_parameters():
        layer = next((i for i, prefix in enumerate(layers) if name.startswith(f"{prefix}.")), None)
        found.setdefault(layer, {})[name] = values.detach().float().numpy()
    return found


def differing(nodes: Sequence[GraphNode], graph: Graph, weights: Weights, own: Mapping[str, Array]) -> str | None:
    """What the file has otherwise than the model, of the tensors that some nodes read; None where nothing is seen.

    ``own``: the parameters that may be meant. Nothing is said of a tensor that is a part of one, or made of several.
    """
    for name in _read_by(nodes, graph, weights):
        values = weights.whole(name)
        alike = {other: x for other, x in own.items() if x.size == values.size}
        if not alike:
            continue
        mine = profile(values)
        same = [
            (other, made(x)) for other, x in alike.items() for made in MADE if distance(profile(made(x)), mine) < SAME
        ]
        if not same and not _holds(own, values) and min(distance(profile(x), mine) for x in alike.values()) > OTHER:
            one = f"has other values in {next(iter(alike))} than the file in {name}" if len(alike) == 1 else None
            return one or f"has no parameter with the values of the file's {name}"
    return None


def _holds(own: Mapping[str, Array], values: Array) -> bool:
    """Whether the numbers of a tensor are among those of all parameters."""
    every = np.unique(np.concatenate([x.ravel() for x in own.values()]))
    some = values.ravel()[:: max(1, values.size // SAMPLE)]
    return any(bool(np.isin(some.astype(np.float32), made(every).astype(np.float32)).mean() > MOST) for made in MADE)


def _read_by(nodes: Sequence[GraphNode], graph: Graph, weights: Weights) -> Iterator[str]:
    """The tensors that nodes read, themselves or through a lookup of rows."""
    for number in (number for node in nodes for number in node.sources if number is not None):
        looked = graph.by_number.get(number)
        leaf = graph.leaves.get(number if looked is None or looked.op != "GET_ROWS" else looked.sources[0] or -1)
        if leaf is not None and leaf.name in weights:
            yield leaf.name
