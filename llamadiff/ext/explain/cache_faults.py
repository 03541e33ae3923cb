"""A KV cache that is wrong, as edits of a graph: where products read it, where the softmax sees it, where rows lie.

A fault is said once, of rows as they are put in (``bugs.cache`` has them all): what each batch reads of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps

import numpy as np

from llamadiff.ext.explain.alter import gives, with_source
from llamadiff.ext.explain.case import Array, NotRecordedError, Recording
from llamadiff.ext.explain.registry import Edit, at_nodes
from llamadiff.ext.explain.site import Site
from llamadiff.ext.explain.subgraph import as_rows, from_rows
from llamadiff.ext.graph.engine import Alter
from llamadiff.ext.graph.graph import GraphNode
from llamadiff.ext.graph.op import Op

States = Callable[[Array], Iterator[Array]]  # rows as they were put in [b, s, kv_head, dim] -> what each batch reads
K, V = "cache_k", "cache_v"


@dataclass(frozen=True)
class Fault:
    """A cache that is wrong: what its batches read, what the op does with it, and the change's variant."""

    states: States
    says: str
    variant: str


@dataclass(frozen=True)
class Slots:
    """A cache as an engine fills it: the slot that each token's row is put in, and how many slots each batch reads.

    What is put beyond its ends is lost.
    """

    run: Recording
    slots: Array
    reads: Sequence[int]

    def __call__(self, rows: Array) -> Iterator[Array]:
        kept = np.zeros_like(rows)
        for (start, stop), count in zip(self.run.batches, self.reads, strict=True):
            slots = self.slots[start:stop]
            there = (slots >= 0) & (slots < rows.shape[1])
            kept[:, slots[there]] = rows[:, start:stop][:, there]
            yield kept[:, :count]


@dataclass(frozen=True)
class KeptLayer:
    """The cache of K or of V (``side``) of a site's layer. Raises NotRecordedError for what is not there."""

    site: Site
    side: str

    @property
    def run(self) -> Recording:
        return self.site.case.run

    @property
    def layer(self) -> int:
        assert self.site.layer is not None
        return self.site.layer

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
        kept = self.site.case.carrier.store(self.side, x.reshape(len(x), tokens, -1))
        return kept.reshape(len(kept), tokens, heads, -1)

    def put_in(self, layer: int) -> Array:
        """The rows that go into a layer's cache: [b, s, kv_head, dim]."""
        label = str(self._writer.label)
        return self._rows(f"{label.rpartition('-')[0]}-{layer}")

    def _rotation(self) -> GraphNode:
        if self._writer.op != "ROPE":
            raise NotRecordedError(K)
        return self._writer

    def rotated(self, rows: Array) -> Array:
        """Rows of K through the layer's rotation, counted from position 0."""
        whole = np.zeros((len(rows), len(self.run.tokens), *rows.shape[2:]), rows.dtype)
        whole[:, : rows.shape[1]] = rows
        return self.site.computed(self._rotation(), whole[:, None])[:, 0, : rows.shape[1]]

    def unrotated(self) -> Array:
        """The rows of K before their rotation."""
        below = self.site.at(self._rotation()).source(0)
        if below is None or not below.label:
            raise NotRecordedError(K)
        return self._rows(below.label)

    def first_wrong(self) -> int | None:
        """The first token whose result is wrong; None where that is not known."""
        case, sub = self.site.case, self.site.sub
        if case.recorded is None or sub.is_span(case) or case.tap.name in self.site.engine.graph.kept:
            return None
        return case.first_wrong(replace(sub, altered={}).compute(case))


Faults = Callable[[KeptLayer], Iterator[Fault]]


def cache_bug(
    *caches: str, of: str = "", fix: str = "", source: str = "", lies: bool = False, unseen: bool = False
) -> Callable[[Faults], Faults]:
    """Register faults of these caches at the products that read them: as a new bug, or as more ways to have one.

    ``lies``: it shows in the rows that lie in the cache too; ``unseen``: what is not there is hidden from the softmax.
    """

    def register(faults: Faults) -> Faults:
        @wraps(faults)
        def in_products(site: Site) -> Iterator[Edit]:
            cache = side_read(site)
            for fault in faults(KeptLayer(site, cache)) if cache in caches else ():
                yield Edit(_reading(site, cache, fault.states), fault.says, fault.variant)

        name = of or faults.__name__.replace("_", "-")
        at_nodes("MUL_MAT", of=of, fix=fix, source=source)(in_products)
        if lies:
            at_nodes("VIEW", of=name)(partial(in_its_rows, faults, caches))
        if unseen:
            at_nodes("SOFT_MAX", of=name)(partial(in_the_softmax, faults))
        return faults

    return register


def side_read(site: Site) -> str:
    """The cache that a product reads; empty for a product that reads none."""
    return site.engine.read_from(site.node) if site.node.op == "MUL_MAT" and not site.weight(0) else ""


def axes_of(cache: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """From a product's operand [b, 1, kv_head, ...] to rows [b, 1, s, kv_head, dim], and back; V lies transposed."""
    unroll = (0, 1, 3, 2, 4) if cache == K else (0, 1, 4, 2, 3)
    return unroll, tuple(int(axis) for axis in np.argsort(unroll))


def _reading(site: Site, cache: str, states: States) -> Alter:
    """A product with what each batch reads of a faulty cache; slots that are not read give zero."""
    unroll, roll = axes_of(cache)

    def value(n: Op) -> Array:
        memory, x, tokens = n.x(), n.x(1), len(site.case.run.tokens)
        rows = memory.transpose(unroll)[:, 0, :tokens]
        parts = []
        for (start, stop), state in zip(site.case.run.batches, states(rows), strict=True):
            read = np.zeros((len(state), 1, memory.transpose(unroll).shape[2], *state.shape[2:]), memory.dtype)
            read[:, 0, : state.shape[1]] = state
            asked = x[..., start:stop, :]
            if cache == V:  # what a slot that is not read was seen with is lost
                asked = _first(asked, state.shape[1])
            part = _product(site, n, read.transpose(roll), asked, cache)
            parts.append(_first(part, state.shape[1]) if cache == K else part)
        return np.concatenate(parts, axis=-2)

    return value


def _first(x: Array, count: int) -> Array:
    """The first values of each row, and zeros for the others."""
    return np.where(np.arange(x.shape[-1]) < count, x, x.dtype.type(0))


def _product(site: Site, n: Op, memory: Array, x: Array, cache: str) -> Array:
    first, second = n.sources[:2]
    assert first is not None
    assert second is not None
    shape = (*n.shape[:-2], x.shape[-2], n.shape[-1])
    changed = replace(n, shape=shape, sources=(replace(first, values=memory), replace(second, values=x)))
    return site.engine.product(changed, cache, site.case.carrier)


def in_its_rows(faults: Faults, caches: Sequence[str], site: Site) -> Iterator[Edit]:
    """The rows as they lie in a faulty cache in the end, where they were recorded."""
    name = site.case.tap.name
    side = f"cache_{name[3]}" if site.engine.graph.kept.get(name) is site.node else ""
    for fault in faults(KeptLayer(site, side)) if side in caches else ():
        yield Edit(gives(partial(_in_the_end, site, fault.states)), fault.says, fault.variant)


def _in_the_end(site: Site, states: States, x: Array) -> Array:
    name, count = site.case.tap.name, len(site.case.run.tokens)
    *_, last = states(as_rows(x, name)[:, :count])
    return from_rows(last, site.node, name)


def in_the_softmax(faults: Faults, site: Site) -> Iterator[Edit]:
    """A softmax that does not see what a faulty cache does not give."""
    for fault in faults(KeptLayer(site, K)) if sees_a_cache(site) else ():
        hidden = _unread(fault.states, site.case.run)
        if hidden.any():
            yield Edit(hiding(hidden), fault.says, fault.variant)


def sees_a_cache(site: Site) -> bool:
    """Whether a softmax is of scores that were taken of a cache."""
    below = site.source(0)
    return site.number(1) is not None and below is not None and side_read(site.at(below)) == K


def _unread(states: States, run: Recording) -> Array:
    """Which slots [query, slot] a cache does not give a query, of those that it may see."""
    n = len(run.tokens)
    out = np.zeros((n, n), bool)
    for (start, stop), count in zip(
        run.batches, states.reads if isinstance(states, Slots) else run.edges[1:], strict=True
    ):
        out[start:stop, count:] = True
    return np.asarray(out & np.tri(n, dtype=bool))


def hiding(hidden: Array) -> Alter:
    """The mask with more keys hidden: [query, key]."""

    def change(n: Op) -> Array:
        mask = np.array(n.x(1))
        count = len(hidden)
        mask[..., :count, :count][..., hidden] = -np.inf
        return mask

    return with_source(1, change)
