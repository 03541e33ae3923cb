"""What the file has otherwise than its checkpoint, in the words of ``weights``, and at which places that shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.file.against import compare_weights
from llamadiff.ext.file.architectures import TABLES
from llamadiff.ext.file.checkpoint import Checkpoint
from llamadiff.ext.file.decides import module_oddities, routing_oddities
from llamadiff.ext.graph.graph import Graph, GraphNode
from llamadiff.ext.port.places import Apart
from llamadiff.ext.port.sides import FILE, other_keys, shows_at
from llamadiff.ext.port.tensors import read_by_nodes
from llamadiff.result.oddity import Oddity
from llamadiff.system.errors import UserError


def faults_of(file: ModelFile, checkpoint: str, config: Mapping[str, Any]) -> list[Oddity]:
    """All that is certain: of architectures without a table of tensors the keys alone, and so of a module of one's own;
    the tokenizer's is no part of a graph.
    """
    folder = Path(checkpoint)
    if folder.is_dir() and file.architecture in TABLES:
        try:
            found = compare_weights(file, Checkpoint(file, folder, tokenizer=False)).findings
            return [each for each in found if not each.where.startswith("tokenizer")]
        except UserError:  # it is none of this architecture by its config.json
            pass
    return [*other_keys(file, config), *routing_oddities(file, config), *module_oddities(file, folder)]


def said(faults: Iterable[Oddity]) -> list[str]:
    """Each as ``weights`` says it."""
    return [f"{each.where}: {each.says}" for each in faults]


def with_faults(places: Iterable[Apart], faults: Sequence[Oddity], graph: Graph, tensors: Iterable[str]) -> list[Apart]:
    """Places with what of the file shows there; those of one op that show the same are one. ``tensors``: the file's."""
    known, found = {*tensors}, dict[Any, Apart]()
    for place in places:
        own = [each for each in faults if _shows(each, place, graph, known)]
        if not own:
            found[id(place)] = place
            continue
        more = f" (and {len(own) - 1} more such)" if len(own) > 1 else ""
        fault = f"{said(own)[0]}{more}"
        same = found.get((place.op, fault))
        found[place.op, fault] = replace(place, fault=fault, side=FILE) if same is None else _both(same, place)
    return [*found.values()]


def _both(one: Apart, other: Apart) -> Apart:
    layers = tuple(sorted({*one.layers, *other.layers}))
    return replace(one, nodes=(*one.nodes, *other.nodes), layers=layers)


def _shows(fault: Oddity, place: Apart, graph: Graph, tensors: set[str]) -> bool:
    if fault.where not in tensors and shows_at(fault.where, place.name):
        return True
    read = {name for node in place.nodes for name in nearest(node, graph, tensors)}
    return fault.where in read or any(name in fault.says for name in read if fault.where not in tensors)


def nearest(node: GraphNode, graph: Graph, tensors: set[str]) -> Iterator[str]:
    """The tensors that a node reads; of one that reads none, those that what it computes from does."""
    left, seen = [node], set[int]()
    while left:
        here = left.pop()
        names = [name for name in read_by_nodes([here], graph) if name in tensors]
        yield from names
        if not names or here.op == "ROPE":  # whose factors are no more than a part
            before = [graph.by_number[n] for n in graph.reads(here) if n in graph.by_number and n not in seen]
            seen |= {each.number for each in before}
            left += before
