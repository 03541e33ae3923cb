"""The KV cache: how people get it wrong, batch by batch, what each writes into it and what it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from llamadiff.ext.explain.alter import gives, with_source
from llamadiff.ext.explain.cache_faults import (
    Fault,
    K,
    KeptLayer,
    Slots,
    States,
    V,
    axes_of,
    cache_bug,
    hiding,
    in_its_rows,
    in_the_softmax,
    sees_a_cache,
    side_read,
)
from llamadiff.ext.explain.case import Array, NotRecordedError, Recording
from llamadiff.ext.explain.registry import Edit, at_nodes
from llamadiff.ext.explain.site import Site
from llamadiff.ext.explain.subgraph import as_rows, from_rows
from llamadiff.ext.graph.op import Op
from llamadiff.numerics.arithmetic import ROUNDINGS, fits_blocks
from llamadiff.numerics.types import CACHE_TYPES

FEW = 64  # batches, or sizes of a cache, that are gone through one by one


def _all(run: Recording, changed: Callable[[Array], Array]) -> States:
    """Rows that are other ones, whichever batch reads them."""

    def states(rows: Array) -> Iterator[Array]:
        other = changed(rows)
        yield from (other[:, :stop] for _, stop in run.batches)

    return states


def _earlier(
    run: Recording, changed: Callable[[Array], Array], own: Callable[[Array], Array] = lambda rows: rows
) -> States:
    """Other rows of the batches before the one that reads, and its ``own``."""

    def states(rows: Array) -> Iterator[Array]:
        before, now = np.broadcast_arrays(changed(rows), own(rows))
        for start, stop in run.batches:
            yield np.concatenate([before[:, :start], now[:, start:stop]], axis=1)

    return states


def _of_tokens(run: Recording, tokens: Array) -> States:
    """These tokens' rows, empty where there is no such token."""

    def taken(rows: Array) -> Array:
        there = (tokens >= 0) & (tokens < rows.shape[1])
        out = rows[:, np.where(there, tokens, 0)]
        out[:, ~there] = 0
        return out

    return _all(run, taken)


def _after(run: Recording) -> str:
    """Which tokens come after the first batch."""
    return "of decode steps" if run.edges[1] >= run.n_prefill else "after the first batch"


def _several(run: Recording) -> bool:
    """Whether there are batches after the first."""
    return len(run.batches) > 1


@at_nodes("VIEW", fix="rotate K before it is put into the cache, or when it is read")
def cache_before_rope(site: Site) -> Iterator[Edit]:
    """The cache keeps K as it was before RoPE, and nothing rotates it."""
    yield from (edit for edit in in_its_rows(before_rotation, (K,), site) if edit.variant == "all")


@cache_bug(
    K, V, lies=True, fix="write K and V of a token into the slot that attention reads for it", source="tiny-llm#46"
)
def cache_row_off(kept: KeptLayer) -> Iterator[Fault]:
    """The cache's rows are off by one, or stale: a token reads the row of the one before it."""
    run = kept.run
    order, first = np.arange(len(run.tokens)), run.edges[1]
    if len(order) > 1:
        behind, ahead, empty = (_of_tokens(run, tokens) for tokens in (np.maximum(order - 1, 0), order + 1, order - 1))
        yield Fault(behind, "reads each slot's row of the token before", "behind")
        yield Fault(ahead, "reads each slot's row of the token after", "ahead")
        yield Fault(empty, "writes each row one slot too far: slot 0 is empty", "empty")
    if not _several(run):
        return
    for by, where in ((1, "far"), (-1, "early")):
        says = f"writes the rows {_after(run)} one slot too {where}"
        yield Fault(Slots(run, order + by * (order >= first), run.edges[1:]), says, where)
    stuck = _of_tokens(run, np.minimum(order, first - 1))
    yield Fault(stuck, f"reads the first batch's last row for all {_after(run)}", "stuck")
    unwritten = _of_tokens(run, np.where(order < first, order, -1))
    yield Fault(unwritten, f"does not write the rows {_after(run)} into the cache", "unwritten")
    yield Fault(partial(_before_it_is_written, run), f"reads the rows {_after(run)} before they are written", "own")


def _before_it_is_written(run: Recording, rows: Array) -> Iterator[Array]:
    for start, stop in run.batches:
        read = rows[:, :stop].copy()
        read[:, start:] = 0 if start else read[:, start:]
        yield read


@cache_bug(K, V, lies=True, unseen=True, fix="write each batch's rows behind those that are kept already")
def cache_overwritten(kept: KeptLayer) -> Iterator[Fault]:
    """Each batch after the first writes its rows over the same slots."""
    run, first = kept.run, kept.run.edges[1]
    if not _several(run):
        return
    order, within = np.arange(len(run.tokens)), np.concatenate([np.arange(stop - start) for start, stop in run.batches])
    places = {first: "where the first batch ends", first - 1: "over the first batch's last row", 0: "from slot 0 on"}
    for place, where in places.items():
        slots = np.where(order >= first, within + place, order)
        says = f"writes the rows {_after(run)} always {where}"
        yield Fault(Slots(run, slots, run.edges[1:]), says, str(place))
        if place:
            last = [int(slots[stop - 1]) + 1 for stop in run.edges[1:]]
            yield Fault(Slots(run, slots, last), f"{says}, and reads no further", f"{place} short")


@cache_bug(K, V, lies=True, unseen=True, fix="make room for as many rows as there are tokens, or for the context")
def cache_too_short(kept: KeptLayer) -> Iterator[Fault]:
    """The cache has fewer rows than there are tokens: rows overwrite others, or are dropped."""
    order = np.arange(len(kept.run.tokens))
    for room in _rooms(kept):
        reads = [min(stop, room) for stop in kept.run.edges[1:]]
        for variant, then, slots in (
            ("around", "then it begins again with the first", order % room),
            ("last", "then each overwrites the last", np.minimum(order, room - 1)),
            ("dropped", "further ones are not kept", order),
        ):
            yield Fault(Slots(kept.run, slots, reads), f"has a cache of {room} rows; {then}", f"{variant} {room:g}")


def _rooms(kept: KeptLayer) -> list[int]:
    """Sizes that a cache may have that is too short: up to what the first wrong batch needs."""
    count = len(kept.run.tokens)
    rooms: Sequence[int] = range(1, count)
    wrong = kept.first_wrong()
    if wrong is not None:
        rooms = next((range(max(a, 1), min(z, count)) for a, z in kept.run.batches if a <= wrong < z), range(0))
    return [room for room in rooms if len(rooms) <= FEW or room & (room - 1) == 0]


@cache_bug(K, V, fix="read the layer's own cache")
def cache_of_another_layer(kept: KeptLayer) -> Iterator[Fault]:
    """Rows of another layer are read: the layer's index is wrong, or all layers share one cache."""
    run, i, last = kept.run, kept.layer, kept.run.model.n_layer - 1
    before, later = "reads the cache of the layer before", "reads the cache of the layer after"
    ways = {  # a layer, what is read of it, and of the batch's own rows
        "before": (i - 1 if i else last, before, None if i else np.zeros_like),
        "after": (i + 1 if i < last else 0, later, None if i == last else np.zeros_like),
        "first": (0, "reads the cache of layer 0", None),
        "shared": (last, "shares one cache among all layers", np.asarray),
    }
    for variant, (layer, says, own) in ways.items():
        unwritten = own is np.zeros_like and not _several(run)  # all zeros: of whatever layer, nobody wrote them
        if layer != i and not unwritten:
            with suppress(NotRecordedError):
                rows = partial(_instead, kept.put_in(layer))
                yield Fault(_all(run, rows) if own is None else _earlier(run, rows, own), says, variant)


def _instead(other: Array, rows: Array) -> Array:
    return other


@cache_bug(K, fix="rotate K once: before it is put into the cache, or as it is read")
def cache_rotated_again(kept: KeptLayer) -> Iterator[Fault]:
    """K is rotated before it is cached, and again when it is read."""
    run, says = kept.run, "rotates K again as it is read from the cache"
    yield Fault(_all(run, kept.rotated), says, "all")
    if _several(run):
        yield Fault(_earlier(run, kept.rotated), f"{says}, but for the newest rows", "earlier")
    if 1 < len(run.batches) <= FEW:
        yield Fault(partial(_rotated_in_place, kept), "rotates the whole cache again with each batch", "in place")


def _rotated_in_place(kept: KeptLayer, rows: Array) -> Iterator[Array]:
    for start, stop in kept.run.batches:
        if start:
            rows = np.concatenate([kept.rotated(rows[:, :start]), rows[:, start:]], axis=1)
        yield rows[:, :stop]


_LAYOUT = {
    False: "reads its cache as [token, head, dim], where it is written as [{0[0]}, {0[1]}, {0[2]}]",
    True: "reads its cache as [{0[0]}, {0[1]}, {0[2]}], where it is written as [token, head, dim]",
}


@cache_bug(K, V, fix="read the cache in the layout in which it was written: [token, head, dim]")
def cache_transposed(kept: KeptLayer) -> Iterator[Fault]:
    """The cache is read in another layout than it was written in: tokens, heads and values of a head in disorder."""
    orders = {"head token dim": (0, 2, 1, 3), "head dim token": (0, 2, 3, 1), "token dim head": (0, 1, 3, 2)}
    for name, axes in orders.items():
        for back, says in _LAYOUT.items():
            yield Fault(partial(_as_if, kept.run, axes, back), says.format(name.split()), f"{name} {back}")


def _as_if(run: Recording, axes: tuple[int, ...], back: bool, rows: Array) -> Iterator[Array]:
    """Rows that were written with their axes in this order and read in the right one; or the other way round."""
    for _, stop in run.batches:
        now = rows[:, :stop]
        if back:
            there = now.reshape([now.shape[axis] for axis in axes])
            yield np.ascontiguousarray(there.transpose(np.argsort(axes)))
        else:
            yield np.ascontiguousarray(now.transpose(axes)).reshape(now.shape)


@cache_bug(K, V, of="first-row-fed-twice", lies=True)
def first_row_twice(kept: KeptLayer) -> Iterator[Fault]:
    """The first row of a batch is put in twice, and those behind it lie one slot further on."""
    run = kept.run
    if _several(run):
        put_in = np.concatenate([[*[start] * (start > 0), *range(start, stop)] for start, stop in run.batches])
        says = f"puts the first row of each batch {_after(run)} into the cache twice"
        yield Fault(_of_tokens(run, put_in[: len(run.tokens)]), says, "")


@cache_bug(K, V, of="decode-key-unseen")
def own_key_unseen(kept: KeptLayer) -> Iterator[Fault]:
    """The last key of each batch after the first is not seen."""
    run = kept.run
    if _several(run):
        step = run.edges[1] >= run.n_prefill
        says = "does not see a decode step's own key" if step else "does not see the last key of a batch"
        reads = [stop - (start > 0) for start, stop in run.batches]
        yield Fault(Slots(run, np.arange(len(run.tokens)), reads), says, "own")


@cache_bug(K, of="cache-before-rope")
def before_rotation(kept: KeptLayer) -> Iterator[Fault]:
    """The cache keeps K as it was before RoPE, and nothing rotates it."""
    run, rows = kept.run, partial(_instead, kept.unrotated())
    yield Fault(_all(run, rows), "takes K from before RoPE", "all")
    if _several(run):
        yield Fault(_earlier(run, rows), "takes K from before RoPE for cached rows", "earlier")


@at_nodes("VIEW", fix="nothing: a cache in fewer bits rounds this much", harmless=True)
def cache_rows_rounded(site: Site) -> Iterator[Edit]:
    """The cache's rows are rounded as they are kept."""
    name = site.case.tap.name
    if site.engine.graph.kept.get(name) is site.node:
        dim = as_rows(np.empty((1, *site.node.shape), bool), name).shape[-1]
        for kind in CACHE_TYPES[1:]:
            if fits_blocks(dim, kind):
                yield Edit(gives(partial(_kept_as, kind, site)), f"keeps its rows as {kind}", kind)


def _kept_as(kind: str, site: Site, x: Array) -> Array:
    name = site.case.tap.name
    return from_rows(ROUNDINGS[kind](np.ascontiguousarray(as_rows(x, name))), site.node, name)


@at_nodes("GET_ROWS", fix="feed every row of a batch once")
def first_row_fed_twice(site: Site) -> Iterator[Edit]:
    """The first row of a batch is fed twice, so that those after it come one late."""
    run = site.case.run
    if site.weight(0) and _several(run):
        tokens = np.concatenate([[a, *range(a, z - 1)] if a else np.arange(z) for a, z in run.batches])
        says = f"feeds the first token of each batch {_after(run)} twice, and the last not at all"
        yield Edit(with_source(1, lambda n: n.x(1)[..., tokens]), says)


@at_nodes("SOFT_MAX", fix="count a step's own key in before its scores are taken", source="tiny-llm#46")
def decode_key_unseen(site: Site) -> Iterator[Edit]:
    """Decode steps do not see their own key, or see nothing but it."""
    run = site.case.run
    n, p = run.n_prefill, run.positions
    if not sees_a_cache(site) or not _several(run):
        return
    yield from in_the_softmax(own_key_unseen, site)
    if 0 < n < len(p):
        steps = np.arange(len(p))[:, None] >= n
        alone, recent = steps & (p[None, :] != p[:, None]), steps & (np.arange(len(p)) < n)
        yield Edit(hiding(alone), "sees only its own key in decode steps: the cache is lost", "alone")
        yield Edit(hiding(recent), "does not see the prompt in decode steps", "recent")


@at_nodes("MUL_MAT", fix="nothing: a cache in fewer bits rounds; state it as producer.settings.type_k", harmless=True)
def cache_rounded(site: Site) -> Iterator[Edit]:
    """K and V are kept in a cache of fewer bits."""
    cache = side_read(site)
    if not cache:
        return
    dim = site.shape(0)[-1] if cache == K else site.shape(0)[-2]
    for kind in CACHE_TYPES[1:]:
        if fits_blocks(dim, kind):
            says = f"reads {cache[-1].upper()} from a cache of type {kind}"
            yield Edit(with_source(0, _rounding(kind, cache)), says, kind)


def _rounding(kind: str, cache: str) -> Callable[[Op], Array]:
    unroll, roll = axes_of(cache)
    return lambda n: ROUNDINGS[kind](np.ascontiguousarray(n.x().transpose(unroll))).transpose(roll)
