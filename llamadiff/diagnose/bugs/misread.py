"""Quantized weights at nodes of a graph, their blocks misread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from llamadiff.diagnose.bugs import quant_scales  # noqa: F401  (registers its misreadings)
from llamadiff.diagnose.bugs.quant_blocks import MISREADINGS, BlockBug, StoredWeight
from llamadiff.diagnose.registry import Bug, Edit, Edits, define, ways_to_have
from llamadiff.diagnose.site import Site
from llamadiff.ggml.engine import Alter
from llamadiff.ggml.op import Op
from llamadiff.ggml.streamed import STREAMED


def _edits(known: BlockBug) -> Edits:
    def edits(site: Site) -> Iterator[Edit]:
        name, w = site.weight(0), site.engine.w
        for reading in known.readings(StoredWeight(w, name)) if name else ():
            yield Edit(_reading(reading.weight, site), reading.says, f"{w.type(name)} {reading.variant}")

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


for _known in MISREADINGS.values():
    define(Bug(_known.name, _known.about, _known.fix, _known.source, "misread"))
    ways_to_have(_known.name, tuple(STREAMED), _edits(_known))
