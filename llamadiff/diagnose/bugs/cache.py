"""The KV cache, batch by batch, and how people get it wrong: what each batch writes into it, and what it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.diagnose.bugs.attention import BOTH, PUT_IN, Scores, Values, as_cached
from llamadiff.diagnose.bugs.embedding import Lookup
from llamadiff.diagnose.bugs.norms import Same
from llamadiff.diagnose.bugs.rope import rope_on
from llamadiff.diagnose.bugs.softmax import Softmax
from llamadiff.diagnose.case import Case, NotRecordedError
from llamadiff.diagnose.registry import Change, Recipe, bug
from llamadiff.numerics.arithmetic import ROUNDINGS, fits_blocks
from llamadiff.numerics.types import CACHE_TYPES

Array = NDArray[Any]
KEPT, SEEN = ("kv_k", "kv_v"), ("kq_soft_max",)
FEW = 64  # batches, or sizes of a cache, that are gone through one by one
States = Callable[[Array], Iterator[Array]]  # rows as they were put in [b, s, kv_head, dim] -> what each batch reads
Writes = Callable[[int, int], tuple[Array, Array]]
Fault = tuple[States, str, str]  # the cache, what the op does with it, and the change's variant


@dataclass(frozen=True)
class Read:
    """An attention op on a cache that each batch reads in a state of its own; slots that are not read give zero."""

    op: Scores | Values
    states: States

    def compute(self, case: Case) -> Array:
        batches = zip(case.run.batches, self.states(self.op.rows), strict=True)
        if isinstance(self.op, Scores):
            return np.concatenate([self._scores(case, *batch, rows) for batch, rows in batches], axis=2)
        return np.concatenate([self._mixed(case, *batch, rows) for batch, rows in batches], axis=1)

    def _scores(self, case: Case, start: int, stop: int, rows: Array) -> Array:
        assert isinstance(self.op, Scores)
        scores = replace(self.op, q=self.op.q[:, start:stop], rows=rows).compute(case)
        return np.pad(scores, ((0, 0), (0, 0), (0, 0), (0, len(case.run.tokens) - rows.shape[1])))

    def _mixed(self, case: Case, start: int, stop: int, rows: Array) -> Array:
        assert isinstance(self.op, Values)
        return replace(self.op, probs=self.op.probs[:, :, start:stop, : rows.shape[1]], rows=rows).compute(case)


@dataclass(frozen=True)
class Slots:
    """A cache as an engine fills it.

    ``writes`` gives the slots that a batch (start, stop) writes, and the tokens whose rows go there; ``reads`` how many
    slots it reads then.
    """

    batches: Sequence[tuple[int, int]]
    writes: Writes
    reads: Callable[[int, int], int] = lambda start, stop: stop

    def __call__(self, rows: Array) -> Iterator[Array]:
        kept = np.zeros_like(rows)
        for start, stop in self.batches:
            slots, tokens = self.writes(start, stop)
            there = (slots >= 0) & (slots < rows.shape[1])
            kept[:, slots[there]] = rows[:, tokens[there]]
            yield kept[:, : self.reads(start, stop)]


def _faulty(r: Any, case: Case, faults: Iterable[Fault]) -> Iterator[Change]:
    """What caches with a fault make of a tap: scores, sums, which keys are seen, or the rows themselves."""
    for states, says, variant in faults:
        if isinstance(r, Softmax):
            unread = _unread(states, case)
            if unread.any():
                yield Change(replace(r, hidden=r.hidden | unread), says, variant)
        elif isinstance(r, Same):
            rows = _put_in(case)
            *_, last = states(rows)
            yield Change(Same(_padded(last, rows.shape[1])), says, variant)
        elif _agrees(states, case):
            yield Change(Read(replace(r, rows=_put_in(case)), states), says, variant)


def _unread(states: States, case: Case) -> Array:
    """Which slots [query, slot] a cache does not give a query, of those that it may see."""
    n = len(case.run.tokens)
    unread = np.zeros((n, n), bool)
    for start, stop in case.run.batches:
        unread[start:stop, states.reads(start, stop) if isinstance(states, Slots) else stop :] = True
    return np.asarray(unread & np.tri(n, dtype=bool))


def _agrees(states: States, case: Case) -> bool:
    """Whether no probability that was recorded belongs to a slot that is not read."""
    unread = _unread(states, case)
    if not unread.any():
        return True
    try:
        return not bool(np.asarray(case["kq_soft_max"])[..., unread].any())
    except NotRecordedError:
        return True


def _put_in(case: Case, layer: int | None = None) -> Array:
    """The rows that go into the cache, of this layer or another one: [b, s, kv_head, dim]."""
    side = "k" if case.tap.kind.word in ("kq", "kv_k") else "v"
    return as_cached(case, side, case.values(f"{PUT_IN[side]}-{case.layer if layer is None else layer}"))


def _padded(rows: Array, count: int) -> Array:
    return np.pad(rows, ((0, 0), (0, count - rows.shape[1]), (0, 0), (0, 0)))


def _all(case: Case, changed: Callable[[Array], Array]) -> States:
    """Rows that are other ones, whichever batch reads them."""

    def states(rows: Array) -> Iterator[Array]:
        other = changed(rows)
        yield from (other[:, :stop] for _, stop in case.run.batches)

    return states


def _earlier(
    case: Case, changed: Callable[[Array], Array], own: Callable[[Array], Array] = lambda rows: rows
) -> States:
    """Other rows of the batches before the one that reads, and its ``own``."""

    def states(rows: Array) -> Iterator[Array]:
        before, now = np.broadcast_arrays(changed(rows), own(rows))
        for start, stop in case.run.batches:
            yield np.concatenate([before[:, :start], now[:, start:stop]], axis=1)

    return states


def _after(case: Case) -> str:
    """Which tokens come after the first batch."""
    return "of decode steps" if case.run.edges[1] >= case.run.n_prefill else "after the first batch"


def _several(case: Case) -> bool:
    """Whether there are batches after the first."""
    return len(case.run.batches) > 1


@bug(*BOTH, *KEPT, fix="write K and V of a token into the slot that attention reads for it", source="tiny-llm#46")
def cache_row_off(r: Scores | Values | Same, case: Case) -> Iterator[Change]:
    """The cache's rows are off by one, or stale: a token reads the row of the one before it."""
    yield from _faulty(r, case, _rows_off(case))


def _rows_off(case: Case) -> Iterator[Fault]:
    order, first = np.arange(len(case.run.tokens)), case.run.edges[1]
    if len(order) > 1:
        behind, ahead, empty = (_all(case, partial(_taken, tokens=tokens))
                                for tokens in (np.maximum(order - 1, 0), order + 1, order - 1))  # fmt: skip
        yield behind, "reads each slot's row of the token before", "behind"
        yield ahead, "reads each slot's row of the token after", "ahead"
        yield empty, "writes each row one slot too far: slot 0 is empty", "empty"
    if not _several(case):
        return
    for by, where in ((1, "far"), (-1, "early")):
        says = f"writes the rows {_after(case)} one slot too {where}"
        yield Slots(case.run.batches, partial(_moved, first=first, by=by)), says, where
    stuck = _all(case, partial(_taken, tokens=np.minimum(order, first - 1)))
    yield stuck, f"reads the first batch's last row for all {_after(case)}", "stuck"
    unwritten = _all(case, partial(_taken, tokens=np.where(order < first, order, -1)))
    yield unwritten, f"does not write the rows {_after(case)} into the cache", "unwritten"
    yield partial(_before_it_is_written, case), f"reads the rows {_after(case)} before they are written", "own"


def _taken(rows: Array, tokens: Array) -> Array:
    """These tokens' rows, empty where there is no such token."""
    there = (tokens >= 0) & (tokens < rows.shape[1])
    out = rows[:, np.where(there, tokens, 0)]
    out[:, ~there] = 0
    return out


def _moved(start: int, stop: int, first: int, by: int) -> tuple[Array, Array]:
    """Batches from ``first`` on write so many slots further on."""
    order = np.arange(start, stop)
    return order + (by if start >= first else 0), order


def _before_it_is_written(case: Case, rows: Array) -> Iterator[Array]:
    for start, stop in case.run.batches:
        read = rows[:, :stop].copy()
        read[:, start:] = 0 if start else read[:, start:]
        yield read


@bug(*BOTH, *KEPT, *SEEN, fix="write each batch's rows behind those that are kept already")
def cache_overwritten(r: Scores | Values | Softmax | Same, case: Case) -> Iterator[Change]:
    """Each batch after the first writes its rows over the same slots."""
    first = case.run.edges[1]
    if not _several(case):
        return
    places = {first: "where the first batch ends", first - 1: "over the first batch's last row", 0: "from slot 0 on"}
    faults: list[Fault] = []
    for place, where in places.items():
        writes = partial(_over, first=first, place=place)
        says = f"writes the rows {_after(case)} always {where}"
        faults.append((Slots(case.run.batches, writes), says, str(place)))
        if place:
            short = Slots(case.run.batches, writes, partial(_so_far, writes=writes))
            faults.append((short, f"{says}, and reads no further", f"{place} short"))
    yield from _faulty(r, case, faults)


def _so_far(start: int, stop: int, writes: Writes) -> int:
    """The slots up to the last that a batch writes."""
    return int(writes(start, stop)[0][-1]) + 1


def _over(start: int, stop: int, first: int, place: int) -> tuple[Array, Array]:
    return np.arange(stop - start) + (place if start >= first else start), np.arange(start, stop)


@bug(*BOTH, *KEPT, *SEEN, fix="make room for as many rows as there are tokens, or for the context")
def cache_too_short(r: Scores | Values | Softmax | Same, case: Case) -> Iterator[Change]:
    """The cache has fewer rows than there are tokens: rows overwrite others, or are dropped."""
    for room in _rooms(r, case):
        ways: dict[str, tuple[str, Writes]] = {
            "around": ("then it begins again with the first", partial(_around, room=room)),
            "last": ("then each overwrites the last", partial(_at_the_end, room=room)),
            "dropped": ("further ones are not kept", _in_order),
        }
        for variant, (then, writes) in ways.items():
            says = f"has a cache of {room} rows; {then}"
            slots = Slots(case.run.batches, writes, partial(_no_more, room=room))
            yield from (replace(change, value=float(room)) for change in _faulty(r, case, [(slots, says, variant)]))


def _in_order(start: int, stop: int) -> tuple[Array, Array]:
    return np.arange(start, stop), np.arange(start, stop)


def _no_more(start: int, stop: int, room: int) -> int:
    return min(stop, room)


def _around(start: int, stop: int, room: int) -> tuple[Array, Array]:
    return np.arange(start, stop) % room, np.arange(start, stop)


def _at_the_end(start: int, stop: int, room: int) -> tuple[Array, Array]:
    return np.minimum(np.arange(start, stop), room - 1), np.arange(start, stop)


def _rooms(r: Recipe, case: Case) -> list[int]:
    """Sizes that a cache may have that is too short: up to what the first wrong batch needs."""
    count = len(case.run.tokens)
    if case.hint is not None:
        return [int(case.hint)]
    rooms: Sequence[int] = range(1, count)
    if case.recorded is not None and case.tap.kind.word not in KEPT:
        wrong = case.first_wrong(r.compute(case))
        rooms = next((range(max(a, 1), min(z, count)) for a, z in case.run.batches if a <= wrong < z), range(0))
    return [room for room in rooms if len(rooms) <= FEW or room & (room - 1) == 0]


@bug(*BOTH, *KEPT, "embd", fix="feed every row of a batch once")
def first_row_fed_twice(r: Scores | Values | Same | Lookup, case: Case) -> Iterator[Change]:
    """The first row of a batch is fed twice, so that those after it come one late."""
    first = case.run.edges[1]
    if not _several(case):
        return
    if isinstance(r, Lookup):
        tokens = np.concatenate([[a, *range(a, z - 1)] if a else np.arange(z) for a, z in case.run.batches])
        says = f"feeds the first token of each batch {_after(case)} twice, and the last not at all"
        yield Change(replace(r, ids=r.ids[tokens]), says)
        return
    says = f"puts the first row of each batch {_after(case)} into the cache twice"
    before = {start: max(number - 1, 0) for number, (start, _) in enumerate(case.run.batches)}
    slots = Slots(case.run.batches, partial(_twice, first=first, before=before))
    yield from _faulty(r, case, [(slots, says, "")])


def _twice(start: int, stop: int, first: int, before: Mapping[int, int]) -> tuple[Array, Array]:
    """A batch's rows behind all that were put in, those that were put in twice among them."""
    tokens = np.array([*[start] * (start >= first), *range(start, stop)])
    return np.arange(len(tokens)) + start + before[start], tokens


@bug(*BOTH, fix="read the layer's own cache")
def cache_of_another_layer(r: Scores | Values, case: Case) -> Iterator[Change]:
    """Rows of another layer are read: the layer's index is wrong, or all layers share one cache."""
    i, last = case.layer, case.run.model.n_layer - 1
    before, after = "reads the cache of the layer before", "reads the cache of the layer after"
    ways = {  # a layer, what is read of it, and of the batch's own rows
        "before": (i - 1 if i else last, before, None if i else np.zeros_like),
        "after": (i + 1 if i < last else 0, after, None if i == last else np.zeros_like),
        "first": (0, "reads the cache of layer 0", None),
        "shared": (last, "shares one cache among all layers", np.asarray),
    }
    for variant, (layer, says, own) in ways.items():
        if layer != i:
            with suppress(NotRecordedError):
                rows = partial(_instead, _put_in(case, layer))
                states = _all(case, rows) if own is None else _earlier(case, rows, own)
                yield from _faulty(r, case, [(states, says, variant)])


def _instead(other: Array, rows: Array) -> Array:
    return other


@bug(*BOTH, *SEEN, fix="count a step's own key in before its scores are taken", source="tiny-llm#46")
def decode_key_unseen(r: Scores | Values | Softmax, case: Case) -> Iterator[Change]:
    """Decode steps do not see their own key, or see nothing but it."""
    n, p = case.run.n_prefill, case.run.positions
    if not _several(case):
        return
    says = "does not see a decode step's own key" if case.run.edges[1] >= n else "does not see the last key of a batch"
    last = Slots(case.run.batches, _in_order, lambda start, stop: stop - (start > 0))
    yield from _faulty(r, case, [(last, says, "own")])
    if isinstance(r, Softmax) and 0 < n < len(p):
        alone = r.hidden.copy()
        alone[n:] = p[None, :] != p[n:, None]
        yield Change(replace(r, hidden=alone), "sees only its own key in decode steps: the cache is lost", "alone")
        recent = r.hidden.copy()
        recent[n:, :n] = True
        yield Change(replace(r, hidden=recent), "does not see the prompt in decode steps", "recent")


@bug("kq", fix="rotate K once: before it is put into the cache, or as it is read")
def cache_rotated_again(r: Scores, case: Case) -> Iterator[Change]:
    """K is rotated before it is cached, and again when it is read."""
    says = "rotates K again as it is read from the cache"
    faults: list[Fault] = [(_all(case, partial(_rotated, case)), says, "all")]
    if _several(case):
        faults.append((_earlier(case, partial(_rotated, case)), f"{says}, but for the newest rows", "earlier"))
    if 1 < len(case.run.batches) <= FEW:
        faults.append((partial(_rotated_in_place, case), "rotates the whole cache again with each batch", "in place"))
    yield from _faulty(r, case, faults)


def _rotated(case: Case, rows: Array) -> Array:
    turned = rope_on(case, rows)
    return replace(turned, positions=turned.positions[: rows.shape[1]]).compute(case)


def _rotated_in_place(case: Case, rows: Array) -> Iterator[Array]:
    kept = rows
    for start, stop in case.run.batches:
        if start:
            kept = np.concatenate([_rotated(case, kept[:, :start]), rows[:, start:]], axis=1)
        yield kept[:, :stop]


@bug("kq", "kv_k", fix="rotate K before it is put into the cache, or when it is read")
def cache_before_rope(r: Scores | Same, case: Case) -> Iterator[Change]:
    """The cache keeps K as it was before RoPE, and nothing rotates it."""
    i = case.tap.layer
    normed = f"Kcur_normed-{i}" in case.run.shapes
    unrotated = as_cached(case, "k", case["Kcur_normed" if normed else "Kcur_proj"])
    faults: list[Fault] = [(_all(case, partial(_instead, unrotated)), "takes K from before RoPE", "all")]
    if _several(case) and isinstance(r, Scores):
        faults.append(
            (_earlier(case, partial(_instead, unrotated)), "takes K from before RoPE for cached rows", "earlier")
        )
    yield from _faulty(r, case, faults)


@bug(*BOTH, fix="read the cache in the layout in which it was written: [token, head, dim]")
def cache_transposed(r: Scores | Values, case: Case) -> Iterator[Change]:
    """The cache is read in another layout than it was written in: tokens, heads and values of a head in disorder."""
    orders = {"head token dim": (0, 2, 1, 3), "head dim token": (0, 2, 3, 1), "token dim head": (0, 1, 3, 2)}
    yield from _faulty(
        r, case,
        ((partial(_as_if, case, axes, back), _LAYOUT[back].format(name.split()), f"{name} {back}")
         for name, axes in orders.items() for back in (False, True)),
    )  # fmt: skip


_LAYOUT = {
    False: "reads its cache as [token, head, dim], where it is written as [{0[0]}, {0[1]}, {0[2]}]",
    True: "reads its cache as [{0[0]}, {0[1]}, {0[2]}], where it is written as [token, head, dim]",
}


def _as_if(case: Case, axes: tuple[int, ...], back: bool, rows: Array) -> Iterator[Array]:
    """Rows that were written with their axes in this order and read in the right one; or the other way round."""
    for _, stop in case.run.batches:
        now = rows[:, :stop]
        if back:
            there = now.reshape([now.shape[axis] for axis in axes])
            yield np.ascontiguousarray(there.transpose(np.argsort(axes)))
        else:
            yield np.ascontiguousarray(now.transpose(axes)).reshape(now.shape)


@dataclass(frozen=True)
class StoredCache:
    """An attention op on a cache kept in another type."""

    op: Scores | Values
    kind: str

    def compute(self, case: Case) -> Array:
        return replace(self.op, rows=ROUNDINGS[self.kind](self.op.rows)).compute(case)


def _types(rows: Array) -> Iterator[str]:
    """The types of fewer bits that a cache of rows [..., dim] may have."""
    return (kind for kind in CACHE_TYPES[1:] if fits_blocks(rows.shape[-1], kind))


@bug(*BOTH, harmless=True, fix="nothing: a cache in fewer bits rounds; state it as producer.settings.type_k")
def cache_rounded(r: Scores | Values, case: Case) -> Iterator[Change]:
    """K and V are kept in a cache of fewer bits."""
    side = "K" if isinstance(r, Scores) else "V"
    for kind in _types(r.rows):
        yield Change(StoredCache(r, kind), f"reads {side} from a cache of type {kind}", kind)


@bug(*KEPT, harmless=True, fix="nothing: a cache in fewer bits rounds this much")
def cache_rows_rounded(r: Same, case: Case) -> Iterator[Change]:
    """The cache's rows are rounded as they are kept."""
    for kind in _types(r.x):
        yield Change(Same(ROUNDINGS[kind](r.x)), f"keeps its rows as {kind}", kind)
