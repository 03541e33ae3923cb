"""How ggml holds a node's op and sources, and the line that ggml's own tests describe it with."""

from __future__ import annotations

from collections.abc import Iterable

from llamadiff.ggml.repro import Memory
from llamadiff.llamacpp.tensors import Node


def memory_of(node: Node) -> Memory:
    """What is saved of a node beside its values."""
    found = {place: Node(node.ggml, source.contents) for place, source in enumerate(node.tensor.src) if source}
    sources = [*found.values()]
    return Memory(
        node.ggml.op_name(node.tensor.op), _line(node, sources), tuple(found), tuple(source.type for source in sources),
        tuple(tuple(source.tensor.ne) for source in sources), tuple(tuple(source.tensor.nb) for source in sources),
    )  # fmt: skip


def _line(node: Node, sources: Iterable[Node]) -> str:
    """Numbers as tests/test-backend-ops.cpp reads them: op, type, sizes, parameters, sources; then a name."""
    tensor, given = node.tensor, list(sources)
    parameters = list(tensor.op_params)
    numbers = [tensor.op, tensor.type, *tensor.ne, len(parameters), *parameters, len(given)]
    for source in given:
        numbers += [source.tensor.type, *source.tensor.ne, *source.tensor.nb]
    return " ".join([*map(str, numbers), node.name.replace(" ", "_") or "-"]) + "\n"
