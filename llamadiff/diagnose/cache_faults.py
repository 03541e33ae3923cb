"""How people get the KV cache wrong, batch by batch: what each batch writes into it, and what it reads.

A fault is said once here, of rows as they are put in; bugs.cache makes edits of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llamadiff.diagnose.case import NotRecordedError, Recording

Array = NDArray[Any]
FEW = 64  # batches, or sizes of a cache, that are gone through one by one
States = Callable[[Array], Iterator[Array]]  # rows as they were put in [b, s, kv_head, dim] -> what each batch reads
Writes = Callable[[int, int], tuple[Array, Array]]


@dataclass(frozen=True)
class Fault:
    """A cache that is wrong: what its batches read, what the op does with it, the change's variant and its constant."""

    states: States
    says: str
    variant: str
    value: float | None = None

    @property
    def key(self) -> str:
        """The variant with its constant: which one it is among all."""
        return self.variant if self.value is None else f"{self.variant} {self.value:g}"


class Kept(Protocol):
    """What a fault may ask of the layer whose cache it is in. Raises NotRecordedError for what is not there."""

    @property
    def run(self) -> Recording:
        """The run, with its batches."""

    @property
    def layer(self) -> int:
        """The number of the layer."""

    def put_in(self, layer: int) -> Array:
        """The rows that go into a layer's cache: [b, s, kv_head, dim]."""

    def rotated(self, rows: Array) -> Array:
        """Rows of K through the layer's rotation, counted from position 0."""

    def unrotated(self) -> Array:
        """The rows of K before their rotation."""

    def first_wrong(self) -> int | None:
        """The first token whose result is wrong; None where that is not known."""


Faults = Callable[[Kept], Iterator[Fault]]


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


def unread(states: States, run: Recording) -> Array:
    """Which slots [query, slot] a cache does not give a query, of those that it may see."""
    n = len(run.tokens)
    out = np.zeros((n, n), bool)
    for start, stop in run.batches:
        out[start:stop, states.reads(start, stop) if isinstance(states, Slots) else stop :] = True
    return np.asarray(out & np.tri(n, dtype=bool))


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


def _after(run: Recording) -> str:
    """Which tokens come after the first batch."""
    return "of decode steps" if run.edges[1] >= run.n_prefill else "after the first batch"


def several(run: Recording) -> bool:
    """Whether there are batches after the first."""
    return len(run.batches) > 1


def rows_off(kept: Kept) -> Iterator[Fault]:
    """Rows that are off by one, or stale."""
    run = kept.run
    order, first = np.arange(len(run.tokens)), run.edges[1]
    if len(order) > 1:
        behind, ahead, empty = (_all(run, partial(_taken, tokens=tokens))
                                for tokens in (np.maximum(order - 1, 0), order + 1, order - 1))  # fmt: skip
        yield Fault(behind, "reads each slot's row of the token before", "behind")
        yield Fault(ahead, "reads each slot's row of the token after", "ahead")
        yield Fault(empty, "writes each row one slot too far: slot 0 is empty", "empty")
    if not several(run):
        return
    for by, where in ((1, "far"), (-1, "early")):
        says = f"writes the rows {_after(run)} one slot too {where}"
        yield Fault(Slots(run.batches, partial(_moved, first=first, by=by)), says, where)
    stuck = _all(run, partial(_taken, tokens=np.minimum(order, first - 1)))
    yield Fault(stuck, f"reads the first batch's last row for all {_after(run)}", "stuck")
    unwritten = _all(run, partial(_taken, tokens=np.where(order < first, order, -1)))
    yield Fault(unwritten, f"does not write the rows {_after(run)} into the cache", "unwritten")
    yield Fault(partial(_before_it_is_written, run), f"reads the rows {_after(run)} before they are written", "own")


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


def _before_it_is_written(run: Recording, rows: Array) -> Iterator[Array]:
    for start, stop in run.batches:
        read = rows[:, :stop].copy()
        read[:, start:] = 0 if start else read[:, start:]
        yield read


def overwritten(kept: Kept) -> Iterator[Fault]:
    """Each batch after the first writes its rows over the same slots."""
    run, first = kept.run, kept.run.edges[1]
    if not several(run):
        return
    places = {first: "where the first batch ends", first - 1: "over the first batch's last row", 0: "from slot 0 on"}
    for place, where in places.items():
        writes = partial(_over, first=first, place=place)
        says = f"writes the rows {_after(run)} always {where}"
        yield Fault(Slots(run.batches, writes), says, str(place))
        if place:
            short = Slots(run.batches, writes, partial(_so_far, writes=writes))
            yield Fault(short, f"{says}, and reads no further", f"{place} short")


def _so_far(start: int, stop: int, writes: Writes) -> int:
    """The slots up to the last that a batch writes."""
    return int(writes(start, stop)[0][-1]) + 1


def _over(start: int, stop: int, first: int, place: int) -> tuple[Array, Array]:
    return np.arange(stop - start) + (place if start >= first else start), np.arange(start, stop)


def too_short(kept: Kept, rooms: Sequence[int] = ()) -> Iterator[Fault]:
    """A cache of fewer rows than there are tokens; ``rooms``: those that are known, where they are."""
    run = kept.run
    for room in rooms or _rooms(kept):
        ways: dict[str, tuple[str, Writes]] = {
            "around": ("then it begins again with the first", partial(_around, room=room)),
            "last": ("then each overwrites the last", partial(_at_the_end, room=room)),
            "dropped": ("further ones are not kept", in_order),
        }
        for variant, (then, writes) in ways.items():
            slots = Slots(run.batches, writes, partial(_no_more, room=room))
            yield Fault(slots, f"has a cache of {room} rows; {then}", variant, float(room))


def in_order(start: int, stop: int) -> tuple[Array, Array]:
    """Each token's row in the slot of its number."""
    return np.arange(start, stop), np.arange(start, stop)


def _no_more(start: int, stop: int, room: int) -> int:
    return min(stop, room)


def _around(start: int, stop: int, room: int) -> tuple[Array, Array]:
    return np.arange(start, stop) % room, np.arange(start, stop)


def _at_the_end(start: int, stop: int, room: int) -> tuple[Array, Array]:
    return np.minimum(np.arange(start, stop), room - 1), np.arange(start, stop)


def _rooms(kept: Kept) -> list[int]:
    """Sizes that a cache may have that is too short: up to what the first wrong batch needs."""
    count = len(kept.run.tokens)
    rooms: Sequence[int] = range(1, count)
    wrong = kept.first_wrong()
    if wrong is not None:
        rooms = next((range(max(a, 1), min(z, count)) for a, z in kept.run.batches if a <= wrong < z), range(0))
    return [room for room in rooms if len(rooms) <= FEW or room & (room - 1) == 0]


def first_row_twice(kept: Kept) -> Iterator[Fault]:
    """The first row of a batch is put in twice."""
    run, first = kept.run, kept.run.edges[1]
    if several(run):
        says = f"puts the first row of each batch {_after(run)} into the cache twice"
        before = {start: max(number - 1, 0) for number, (start, _) in enumerate(run.batches)}
        yield Fault(Slots(run.batches, partial(_twice, first=first, before=before)), says, "")


def first_token_twice(run: Recording) -> tuple[Array, str]:
    """The tokens that are fed where the first of each batch is fed twice, and what is said of it."""
    tokens = np.concatenate([[a, *range(a, z - 1)] if a else np.arange(z) for a, z in run.batches])
    return tokens, f"feeds the first token of each batch {_after(run)} twice, and the last not at all"


def _twice(start: int, stop: int, first: int, before: Mapping[int, int]) -> tuple[Array, Array]:
    """A batch's rows behind all that were put in, those that were put in twice among them."""
    tokens = np.array([*[start] * (start >= first), *range(start, stop)])
    return np.arange(len(tokens)) + start + before[start], tokens


def another_layer(kept: Kept) -> Iterator[Fault]:
    """Rows of another layer: its index is wrong, or all layers share one cache."""
    run, i, last = kept.run, kept.layer, kept.run.model.n_layer - 1
    before, later = "reads the cache of the layer before", "reads the cache of the layer after"
    ways = {  # a layer, what is read of it, and of the batch's own rows
        "before": (i - 1 if i else last, before, None if i else np.zeros_like),
        "after": (i + 1 if i < last else 0, later, None if i == last else np.zeros_like),
        "first": (0, "reads the cache of layer 0", None),
        "shared": (last, "shares one cache among all layers", np.asarray),
    }
    for variant, (layer, says, own) in ways.items():
        if layer != i:
            with suppress(NotRecordedError):
                rows = partial(_instead, kept.put_in(layer))
                yield Fault(_all(run, rows) if own is None else _earlier(run, rows, own), says, variant)


def _instead(other: Array, rows: Array) -> Array:
    return other


def own_key_unseen(kept: Kept) -> Iterator[Fault]:
    """The last key of each batch after the first is not seen."""
    run = kept.run
    if several(run):
        step = run.edges[1] >= run.n_prefill
        says = "does not see a decode step's own key" if step else "does not see the last key of a batch"
        yield Fault(Slots(run.batches, in_order, lambda start, stop: stop - (start > 0)), says, "own")


def rotated_again(kept: Kept) -> Iterator[Fault]:
    """K is rotated before it is cached, and again when it is read."""
    run, says = kept.run, "rotates K again as it is read from the cache"
    yield Fault(_all(run, kept.rotated), says, "all")
    if several(run):
        yield Fault(_earlier(run, kept.rotated), f"{says}, but for the newest rows", "earlier")
    if 1 < len(run.batches) <= FEW:
        yield Fault(partial(_rotated_in_place, kept), "rotates the whole cache again with each batch", "in place")


def _rotated_in_place(kept: Kept, rows: Array) -> Iterator[Array]:
    for start, stop in kept.run.batches:
        if start:
            rows = np.concatenate([kept.rotated(rows[:, :start]), rows[:, start:]], axis=1)
        yield rows[:, :stop]


def before_rotation(kept: Kept) -> Iterator[Fault]:
    """The cache keeps K as it was before RoPE, and nothing rotates it."""
    run, rows = kept.run, partial(_instead, kept.unrotated())
    yield Fault(_all(run, rows), "takes K from before RoPE", "all")
    if several(run):
        yield Fault(_earlier(run, rows), "takes K from before RoPE for cached rows", "earlier")


def transposed(kept: Kept) -> Iterator[Fault]:
    """The cache is read in another layout than it was written in."""
    orders = {"head token dim": (0, 2, 1, 3), "head dim token": (0, 2, 3, 1), "token dim head": (0, 1, 3, 2)}
    for name, axes in orders.items():
        for back in (False, True):
            says = _LAYOUT[back].format(name.split())
            yield Fault(partial(_as_if, kept.run, axes, back), says, f"{name} {back}")


_LAYOUT = {
    False: "reads its cache as [token, head, dim], where it is written as [{0[0]}, {0[1]}, {0[2]}]",
    True: "reads its cache as [{0[0]}, {0[1]}, {0[2]}], where it is written as [token, head, dim]",
}


def _as_if(run: Recording, axes: tuple[int, ...], back: bool, rows: Array) -> Iterator[Array]:
    """Rows that were written with their axes in this order and read in the right one; or the other way round."""
    for _, stop in run.batches:
        now = rows[:, :stop]
        if back:
            there = now.reshape([now.shape[axis] for axis in axes])
            yield np.ascontiguousarray(there.transpose(np.argsort(axes)))
        else:
            yield np.ascontiguousarray(now.transpose(axes)).reshape(now.shape)
