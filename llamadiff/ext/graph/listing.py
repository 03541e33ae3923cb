"""llama.cpp's graph of a model, as a tree or for Graphviz."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.text import Text
from rich.tree import Tree

from llamadiff.ext.graph.check import NodeCheck, layers_of
from llamadiff.report.terminal.escape import escape_line
from llamadiff.report.terminal.report import make_console
from llamadiff.system.errors import UserError


def print_tree(nodes: Sequence[NodeCheck]) -> None:
    """Every node under its layer: op, name, shape, type, and what it reads."""
    console = make_console()
    tree, branches = Tree(Text(f"{len(nodes)} nodes")), dict[str, Tree]()
    for place, node in zip(_places(nodes), nodes, strict=True):
        if place not in branches:
            branches[place] = tree.add(Text(place, "bold"))
        branches[place].add(_line(node))
    console.print(tree)


def of_layer(nodes: Sequence[NodeCheck], layer: int | None) -> list[NodeCheck]:
    """The nodes of one layer; all where none is asked for. Raises UserError for a layer that is not there."""
    if layer is None:
        return list(nodes)
    found = [node for node, own in zip(nodes, layers_of(nodes), strict=True) if own == layer]
    if not found:
        last = max((own for own in layers_of(nodes) if own is not None), default=-1)
        raise UserError(f"--layer {layer}: the graph has the layers 0 to {last}")
    return found


def _places(nodes: Sequence[NodeCheck]) -> list[str]:
    return ["outside the layers" if layer is None else f"layer {layer}" for layer in layers_of(nodes)]


def _line(node: NodeCheck) -> Text:
    sources = ", ".join(escape_line(name, 40) for name in node.sources)
    tap = f"  tap {escape_line(node.tap, 60)}" if node.tap is not None and node.tap != node.name else ""
    name = (escape_line(node.name, 60), "bold" if node.tap is not None else "")
    return Text.assemble(f"{node.op} ", name, f"{tap}  {_sizes(node)} {node.kind}  <- {sources}")


def _sizes(node: NodeCheck) -> str:
    """The shape without ones at the outer end."""
    first = next((i for i, size in enumerate(node.shape) if size != 1), len(node.shape) - 1)
    return "x".join(map(str, node.shape[first:]))


def as_dot(nodes: Sequence[NodeCheck]) -> str:
    """Graphviz: nodes in boxes, weights in ellipses, an edge from each source."""
    lines = ["digraph model {", "  rankdir=TB; node [shape=box, fontname=monospace];"]
    known = {node.name for node in nodes}
    for node in nodes:
        label = "\n".join((node.op, node.name, f"{_sizes(node)} {node.kind}"))
        lines.append(f"  {json.dumps(node.name)} [label={json.dumps(label)}];")
        for source in node.sources:
            if source not in known:
                lines.append(f"  {json.dumps(source)} [shape=ellipse];")
            lines.append(f"  {json.dumps(source)} -> {json.dumps(node.name)};")
    return "\n".join([*dict.fromkeys(lines), "}"]) + "\n"
