"""What llama.cpp gave a head beside hidden states, held against the run: ids, positions, which keys a token sees.

An engine computes a graph with what that was given. So a wrong input would make no op wrong, and all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from llamadiff.ext.graph.graph import Graph, GraphNode
from llamadiff.ext.graph.op import Array

_MASKS = {"SOFT_MAX": 1, "FLASH_ATTN_EXT": 3}  # op -> which of its sources the mask is


def faults(graph: Graph, first: int) -> list[str]:
    """What the nodes from number ``first`` on were given that is not what was run, a line each."""
    nodes = [node for node in graph.nodes if node.number >= first]
    return list(dict.fromkeys(said for node in nodes for said in _of_node(graph, node)))


def _of_node(graph: Graph, node: GraphNode) -> Iterator[str]:
    n, name = len(graph.tokens), node.label or node.name
    ids = _leaf(graph, node, 1)
    if node.op == "GET_ROWS" and node.sources[0] in graph.leaves and ids is not None:
        yield from _apart(f"{name}: the head was given token ids", ids.reshape(-1)[:n], graph.tokens)
    if node.op == "ROPE" and ids is not None:
        yield from _apart(f"{name}: the head was given positions", ids.reshape(-1)[:n], range(n))
    mask = _leaf(graph, node, _MASKS[node.op]) if len(node.sources) > _MASKS.get(node.op, 9) else None
    if mask is not None:
        yield from _unmasked(name, mask.reshape(-1, mask.shape[-1])[:n])


def _leaf(graph: Graph, node: GraphNode, place: int) -> Array | None:
    """The values of an input at a place, where there is one."""
    number = node.sources[place] if place < len(node.sources) else None
    return None if number is None else graph.given.get(number)


def _apart(says: str, found: Sequence[int] | Array, right: Sequence[int]) -> Iterator[str]:
    """The first place where numbers are not those that are right."""
    places = np.flatnonzero(np.asarray(found) != np.asarray(right))
    if len(places):
        at = int(places[0])
        yield f"{says} {int(found[at])} in place {at}, where {right[at]} is right"


def _unmasked(name: str, mask: Array) -> Iterator[str]:
    """The first token that sees a later one, or does not see itself; further back a window may hide what it likes."""
    for token, row in enumerate(np.isfinite(np.asarray(mask, np.float32))):
        if row[token + 1 :].any():
            yield f"{name}: the head's mask lets token {token} see key {token + 1 + int(row[token + 1 :].argmax())}"
            return
        if not row[token]:
            yield f"{name}: the head's mask hides token {token} from itself"
            return
