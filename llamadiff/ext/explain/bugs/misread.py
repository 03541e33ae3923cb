"""Quantized weights at nodes of a graph, their blocks misread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from llamaref import Weights
from llamaref.weights import block_sizes
from numpy.typing import NDArray

from llamadiff.ext.explain.registry import Bug, Edit, Edits, at_nodes, define, ways_to_have
from llamadiff.ext.explain.site import Site
from llamadiff.ext.file.blocks.known import KNOWN
from llamadiff.ext.file.blocks.misreading import BlockBug, Misreading, displaced
from llamadiff.ext.graph.engine import Alter
from llamadiff.ext.graph.op import Op
from llamadiff.ext.graph.streamed import STREAMED

Array = NDArray[Any]


def _edits(known: BlockBug) -> Edits:
    def edits(site: Site) -> Iterator[Edit]:
        name, w = site.weight(0), site.engine.w
        if name in w:
            kind, per_row = w.type(name), w.shape(name)[-1] // w.block_size(name)
            for misreading in known.of(kind, per_row):
                yield Edit(
                    _misread(misreading, w, name), misreading.says, f"{kind} {misreading.variant}", fix=misreading.fix
                )

    return edits


def _misread(misreading: Misreading, w: Weights, name: str) -> Alter:
    def decode(rows: Array) -> Array:
        blocks = np.ascontiguousarray(rows).reshape(-1, size)
        values = misreading.read(blocks, lambda some: w.decode_rows(name, some))
        return np.asarray(values, np.float32).reshape(len(rows), -1)

    _, size = block_sizes(w.type(name))
    return lambda n: _with_weight(n, decode=decode)


def _with_weight(n: Op, **changes: Any) -> Op:
    """A product whose weight is read, or is, something else."""
    weight = n.sources[0]
    assert weight is not None
    return replace(n, sources=(replace(weight, **changes), *n.sources[1:]))


for _known in KNOWN:
    define(Bug(_known.name, _known.about, _known.fix, _known.source, "misread"))
    ways_to_have(_known.name, tuple(STREAMED), _edits(_known))


@at_nodes(
    *STREAMED,
    fix="a tensor starts at data offset + its own offset; the data starts at a multiple of general.alignment",
    source="1bit-MONSTER#1234",
)
def tensor_offset_wrong(site: Site) -> Iterator[Edit]:
    """The tensor is read from the wrong place: off by a block, or by the alignment."""
    name, w = site.weight(0), site.engine.w
    for says, shift, rows in displaced(w, name) if name in w else ():
        yield Edit(_elsewhere(w, name, rows, site.shape(0)), says, f"{w.type(name)} {shift:+d}")


def _elsewhere(w: Weights, name: str, rows: Array, shape: tuple[int, ...]) -> Alter:
    return lambda n: _with_weight(n, values=w.decode_rows(name, rows).reshape(shape), decode=None)
