"""Quantized weights at nodes of a graph, their blocks misread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from llamadiff.diagnose.bugs.quant_blocks import StoredWeight
from llamadiff.diagnose.graph_bugs.edit import Edit, Edits, Site, at_nodes
from llamadiff.diagnose.registry import BUGS, Bug, reads_blocks
from llamadiff.ggml.engine import Alter
from llamadiff.ggml.op import Op
from llamadiff.ggml.streamed import STREAMED


def _edits(known: Bug) -> Edits:
    def edits(site: Site) -> Iterator[Edit]:
        name = site.weight(0)
        for change in known.changes(StoredWeight(name), site.case) if name else ():
            assert isinstance(change.recipe, StoredWeight)
            yield Edit(_reading(change.recipe, site), change.says, f"{site.engine.w.type(name)} {change.variant}")

    return edits


def _reading(stored: StoredWeight, site: Site) -> Alter:
    def alter(n: Op) -> Op:
        weight = n.sources[0]
        assert weight is not None
        if stored.beside is not None:
            values = site.engine.w.decoded(stored.name, stored.beside)
            weight = replace(weight, values=values.reshape(site.shape(0)))
        return replace(n, sources=(replace(weight, decode=stored.read), *n.sources[1:]))

    return alter


for _known in [known for known in BUGS.values() if reads_blocks(known)]:
    at_nodes(*STREAMED, of=_known.name)(_edits(_known))
