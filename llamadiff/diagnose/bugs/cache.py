"""The KV cache at nodes of a graph: its faults where products read it, where the softmax sees it, where rows lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.diagnose import cache_faults
from llamadiff.diagnose.alter import gives, with_source
from llamadiff.diagnose.cache_faults import Fault, Faults, States, several, unread
from llamadiff.diagnose.case import NotRecordedError, Recording
from llamadiff.diagnose.edit import Edit, Edits, at_nodes, ways_to_have
from llamadiff.diagnose.registry import Bug, define
from llamadiff.diagnose.site import Site
from llamadiff.diagnose.subgraph import as_rows, from_rows
from llamadiff.ggml.engine import Alter
from llamadiff.ggml.graph import GraphNode
from llamadiff.ggml.op import Op
from llamadiff.numerics.arithmetic import ROUNDINGS, fits_blocks
from llamadiff.numerics.types import CACHE_TYPES

Array = NDArray[Any]
K, V = "cache_k", "cache_v"
BOTH = f"{K} {V}"


def _side(site: Site) -> str:
    """The cache that a product reads; empty for a product that reads none."""
    return site.engine.read_from(site.node) if site.node.op == "MUL_MAT" and not site.weight(0) else ""


@dataclass(frozen=True)
class _AtSite:
    """The run and the layer of a site."""

    site: Site

    @property
    def run(self) -> Recording:
        return self.site.case.run

    @property
    def layer(self) -> int:
        assert self.site.layer is not None
        return self.site.layer


@dataclass(frozen=True)
class NodeLayer(_AtSite):
    """A cache_faults.Kept: the layer of a product that reads a cache (``side``), or of the view that it reads."""

    side: str

    @property
    def _writer(self) -> GraphNode:
        """The named node whose rows are put into the cache."""
        found = self.site.writer(self.side)
        if found is None or not found.label:
            raise NotRecordedError(self.side)
        return found

    def _rows(self, label: str) -> Array:
        """A named node's values of a layer as rows of the cache: [b, s, kv_head, dim]."""
        view = self.site.engine.graph.kept[f"kv_{self.side[-1]}-{self.layer}"]
        heads, tokens = view.shape[-2], len(self.run.tokens)
        x = self.site.case.values(label)
        kept = self.site.case.carrier.stored(self.side, x.reshape(len(x), tokens, -1))
        return kept.reshape(len(kept), tokens, heads, -1)

    def put_in(self, layer: int) -> Array:
        label = str(self._writer.label)
        return self._rows(f"{label.rpartition('-')[0]}-{layer}")

    def _rotation(self) -> GraphNode:
        if self._writer.op != "ROPE":
            raise NotRecordedError(K)
        return self._writer

    def rotated(self, rows: Array) -> Array:
        whole = np.zeros((len(rows), len(self.run.tokens), *rows.shape[2:]), rows.dtype)
        whole[:, : rows.shape[1]] = rows
        return self.site.computed(self._rotation(), whole[:, None])[:, 0, : rows.shape[1]]

    def unrotated(self) -> Array:
        below = self.site.at(self._rotation()).source(0)
        if below is None or not below.label:
            raise NotRecordedError(K)
        return self._rows(below.label)

    def first_wrong(self) -> int | None:
        case, sub = self.site.case, self.site.sub
        if case.recorded is None or sub.is_span(case) or case.tap.name in self.site.engine.graph.kept:
            return None
        return case.first_wrong(replace(sub, altered={}).compute(case))


def _read(site: Site, faults: Iterable[Fault]) -> Iterator[Edit]:
    """A product with what each batch reads of a faulty cache; slots that are not read give zero."""
    for fault in faults:
        yield Edit(_reading(site, fault.states), fault.says, fault.key)


def _reading(site: Site, states: States) -> Alter:
    cache = _side(site)
    unroll, roll = _axes(cache)

    def value(n: Op) -> Array:
        memory, x, tokens = n.x(), n.x(1), len(site.case.run.tokens)
        rows = memory.transpose(unroll)[:, 0, :tokens]
        parts = []
        for (start, stop), state in zip(site.case.run.batches, states(rows), strict=True):
            read = np.zeros((len(state), 1, memory.transpose(unroll).shape[2], *state.shape[2:]), memory.dtype)
            read[:, 0, : state.shape[1]] = state
            asked = x[..., start:stop, :]
            if cache == V:  # what a slot that is not read was seen with is lost
                asked = np.where(np.arange(asked.shape[-1]) < state.shape[1], asked, asked.dtype.type(0))
            part = _product(site, n, read.transpose(roll), asked, cache)
            if cache == K:
                part = np.where(np.arange(part.shape[-1]) < state.shape[1], part, part.dtype.type(0))
            parts.append(part)
        return np.concatenate(parts, axis=-2)

    return value


def _lies(site: Site, faults: Faults, *caches: str) -> Iterator[Edit]:
    """The rows as they lie in a faulty cache in the end, where they were recorded."""
    node, name = site.node, site.case.tap.name
    side = f"cache_{name[3]}" if site.engine.graph.kept.get(name) is node else ""
    if side in caches:
        for fault in faults(NodeLayer(site, side)):
            yield Edit(gives(partial(_in_the_end, site, fault.states)), fault.says, fault.key)


def _in_the_end(site: Site, states: States, x: Array) -> Array:
    name, count = site.case.tap.name, len(site.case.run.tokens)
    *_, last = states(as_rows(x, name)[:, :count])
    return from_rows(last, site.node, name)


def _axes(cache: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """From a product's operand [b, 1, kv_head, ...] to rows [b, 1, s, kv_head, dim], and back; V lies transposed."""
    unroll = (0, 1, 3, 2, 4) if cache == K else (0, 1, 4, 2, 3)
    return unroll, tuple(int(axis) for axis in np.argsort(unroll))


def _product(site: Site, n: Op, memory: Array, x: Array, cache: str) -> Array:
    first, second = n.sources[:2]
    assert first is not None
    assert second is not None
    shape = (*n.shape[:-2], x.shape[-2], n.shape[-1])
    changed = replace(n, shape=shape, sources=(replace(first, values=memory), replace(second, values=x)))
    return site.engine.product(changed, cache, site.case.carrier)


def _faulty(site: Site, faults: Faults, *caches: str) -> Iterator[Edit]:
    """The faults of a product that reads one of these caches."""
    if _side(site) in caches:
        yield from _read(site, faults(NodeLayer(site, _side(site))))


def _unseen(site: Site, faults: Iterator[Fault]) -> Iterator[Edit]:
    """A softmax that does not see what a faulty cache does not give."""
    for fault in faults:
        hidden = unread(fault.states, site.case.run)
        if hidden.any():
            yield Edit(hiding(hidden), fault.says, fault.key)


def hiding(hidden: Array) -> Alter:
    """The mask with more keys hidden: [query, key]."""

    def change(n: Op) -> Array:
        mask = np.array(n.x(1))
        count = len(hidden)
        mask[..., :count, :count][..., hidden] = -np.inf
        return mask

    return with_source(1, change)


@dataclass(frozen=True)
class Seen(_AtSite):
    """A cache_faults.Kept of what a softmax sees: the run alone."""

    def put_in(self, layer: int) -> Array:
        raise NotRecordedError(K)

    def rotated(self, rows: Array) -> Array:
        raise NotRecordedError(K)

    def unrotated(self) -> Array:
        raise NotRecordedError(K)

    def first_wrong(self) -> int | None:
        return NodeLayer(self.site, K).first_wrong()


def _sees_a_cache(site: Site) -> bool:
    below = site.source(0)
    return site.number(1) is not None and below is not None and _side(site.at(below)) == K


@at_nodes("VIEW", fix="rotate K before it is put into the cache, or when it is read")
def cache_before_rope(site: Site) -> Iterator[Edit]:
    """The cache keeps K as it was before RoPE, and nothing rotates it."""
    for edit in _lies(site, cache_faults.before_rotation, K):
        if edit.variant == "all":
            yield edit


@dataclass(frozen=True)
class _Read:
    """A bug of rows that a product reads from these ``caches``: what is wrong with them, and what to do about it.

    ``lies``: it shows in the rows that lie in the cache too; ``unseen``: what is not there is hidden from the softmax.
    Without a ``fix``, it is one more way to have a bug that is defined elsewhere.
    """

    name: str
    faults: Faults
    caches: str
    lies: bool = False
    unseen: bool = False
    about: str = ""
    fix: str = ""
    source: str = ""


READ = (
    _Read(
        "cache-row-off",
        cache_faults.rows_off,
        BOTH,
        lies=True,
        about="The cache's rows are off by one, or stale: a token reads the row of the one before it.",
        fix="write K and V of a token into the slot that attention reads for it",
        source="tiny-llm#46",
    ),
    _Read(
        "cache-overwritten",
        cache_faults.overwritten,
        BOTH,
        lies=True,
        unseen=True,
        about="Each batch after the first writes its rows over the same slots.",
        fix="write each batch's rows behind those that are kept already",
    ),
    _Read(
        "cache-too-short",
        cache_faults.too_short,
        BOTH,
        lies=True,
        unseen=True,
        about="The cache has fewer rows than there are tokens: rows overwrite others, or are dropped.",
        fix="make room for as many rows as there are tokens, or for the context",
    ),
    _Read(
        "cache-of-another-layer",
        cache_faults.another_layer,
        BOTH,
        about="Rows of another layer are read: the layer's index is wrong, or all layers share one cache.",
        fix="read the layer's own cache",
    ),
    _Read(
        "cache-rotated-again",
        cache_faults.rotated_again,
        K,
        about="K is rotated before it is cached, and again when it is read.",
        fix="rotate K once: before it is put into the cache, or as it is read",
    ),
    _Read(
        "cache-transposed",
        cache_faults.transposed,
        BOTH,
        about="The cache is read in another layout than it was written in: tokens, heads and values of a head in "
        "disorder.",
        fix="read the cache in the layout in which it was written: [token, head, dim]",
    ),
    _Read("first-row-fed-twice", cache_faults.first_row_twice, BOTH, lies=True),
    _Read("decode-key-unseen", cache_faults.own_key_unseen, BOTH),
    _Read("cache-before-rope", cache_faults.before_rotation, K),
)


def _of_product(faults: Faults, caches: str) -> Edits:
    return lambda site: _faulty(site, faults, *caches.split())


def _of_rows(faults: Faults, caches: str) -> Edits:
    return lambda site: _lies(site, faults, *caches.split())


def _of_softmax(faults: Faults) -> Edits:
    return lambda site: _unseen(site, faults(Seen(site))) if _sees_a_cache(site) else iter(())


for _read_so in READ:
    if _read_so.fix:
        define(Bug(_read_so.name, _read_so.about, _read_so.fix, _read_so.source, "cache"))
    ways_to_have(_read_so.name, ("MUL_MAT",), _of_product(_read_so.faults, _read_so.caches))
    if _read_so.lies:
        ways_to_have(_read_so.name, ("VIEW",), _of_rows(_read_so.faults, _read_so.caches))
    if _read_so.unseen:
        ways_to_have(_read_so.name, ("SOFT_MAX",), _of_softmax(_read_so.faults))


@at_nodes("VIEW", fix="nothing: a cache in fewer bits rounds this much", harmless=True)
def cache_rows_rounded(site: Site) -> Iterator[Edit]:
    """The cache's rows are rounded as they are kept."""
    name = site.case.tap.name
    if site.engine.graph.kept.get(name) is site.node:
        dim = as_rows(np.empty((1, *site.node.shape), bool), name).shape[-1]
        for kind in CACHE_TYPES[1:]:
            if fits_blocks(dim, kind):
                kept = gives(partial(_kept_as, kind, site))
                yield Edit(kept, f"keeps its rows as {kind}", kind)


def _kept_as(kind: str, site: Site, x: Array) -> Array:
    name = site.case.tap.name
    return from_rows(ROUNDINGS[kind](np.ascontiguousarray(as_rows(x, name))), site.node, name)


@at_nodes("GET_ROWS", fix="feed every row of a batch once")
def first_row_fed_twice(site: Site) -> Iterator[Edit]:
    """The first row of a batch is fed twice, so that those after it come one late."""
    if site.weight(0) and several(site.case.run):
        tokens, says = cache_faults.first_token_twice(site.case.run)
        yield Edit(with_source(1, lambda n: n.x(1)[..., tokens]), says)


@at_nodes("SOFT_MAX", fix="count a step's own key in before its scores are taken", source="tiny-llm#46")
def decode_key_unseen(site: Site) -> Iterator[Edit]:
    """Decode steps do not see their own key, or see nothing but it."""
    run = site.case.run
    n, p = run.n_prefill, run.positions
    if not _sees_a_cache(site) or not several(run):
        return
    yield from _unseen(site, cache_faults.own_key_unseen(Seen(site)))
    if 0 < n < len(p):
        steps = np.arange(len(p))[:, None] >= n
        alone, recent = steps & (p[None, :] != p[:, None]), steps & (np.arange(len(p)) < n)
        yield Edit(hiding(alone), "sees only its own key in decode steps: the cache is lost", "alone")
        yield Edit(hiding(recent), "does not see the prompt in decode steps", "recent")


@at_nodes("MUL_MAT", fix="nothing: a cache in fewer bits rounds; state it as producer.settings.type_k", harmless=True)
def cache_rounded(site: Site) -> Iterator[Edit]:
    """K and V are kept in a cache of fewer bits."""
    cache = _side(site)
    if not cache:
        return
    dim = site.shape(0)[-1] if cache == K else site.shape(0)[-2]
    for kind in CACHE_TYPES[1:]:
        if fits_blocks(dim, kind):
            says = f"reads {cache[-1].upper()} from a cache of type {kind}"
            yield Edit(with_source(0, _rounding(kind, cache)), says, kind)


def _rounding(kind: str, cache: str) -> Callable[[Op], Array]:
    unroll, roll = _axes(cache)
    return lambda n: ROUNDINGS[kind](np.ascontiguousarray(n.x().transpose(unroll))).transpose(roll)
