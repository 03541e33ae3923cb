"""What a process has written since its memory was last looked at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.record.memory import PAGE, Kind, ProcessMemory, Words

Indices = NDArray[np.int64]
BLOCK = PAGE  # bytes that are compared, or not
WORDS = BLOCK // 4
AWAKE = 128  # stops for which a block that has changed is compared at each
HOT = 1 << 12  # blocks (16 MiB) that are compared at each stop, at most
WARM = 1 << 7  # and at least, those that changed last
COLD = 1 << 6  # blocks besides, in turn
MAPS = 16  # stops, at most, after which the memory map is read again
FEW = 1 << 7  # blocks (512 KiB), of which all are compared
GAP = 16  # words (a cache line): changes that are no further apart are one


class Span(NamedTuple):
    """Words that were written: from this address on; ``stack``: among a thread's calls."""

    address: int
    words: Words
    stack: bool = False


class Changes:
    """A copy of a process's memory, and what in it was found changed when.

    At each stop those blocks are compared that changed lately, and of all others some in turn: a large file that was
    read into memory is compared seldom, a buffer that is used again and again always.
    """

    def __init__(self, memory: ProcessMemory) -> None:
        self._memory = memory
        self._addresses, self._is_stack = np.zeros(0, np.int64), np.zeros(0, np.bool_)  # of blocks
        self._changed = np.zeros(0, np.int64)  # the stop at which each last had
        self._copies, self._slots = np.zeros((0, WORDS), np.uint32), np.zeros(0, np.int64)  # and where each one's is
        self._absent = np.zeros(0, np.bool_)  # blocks that were never written
        self._turn = self._stops = self._size = 0

    def look(self, everything: bool = False) -> list[Span]:
        """What has changed since, by address; ``everything``: of all blocks, and not of those that are due."""
        size = self._memory.size()
        if size != self._size or self._stops % MAPS == 0:
            self._follow()
        self._stops, self._size = self._stops + 1, size
        due = np.arange(len(self._addresses)) if everything else self._due()
        slots, addresses = self._slots[due], self._addresses[due]
        old = self._copies[slots]
        new = old.copy()
        self._memory.read(addresses, new)
        rows = np.flatnonzero((new != old).any(axis=1))
        self._changed[due[rows]] = self._stops
        self._copies[slots[rows]] = new[rows]
        spans = list[Span]()
        for row in rows.tolist():
            for span in _spans(int(addresses[row]), new[row], old[row], bool(self._is_stack[due[row]])):
                spans[-1:] = _join(spans[-1], span) if spans else [span]
        return spans

    def _follow(self) -> None:
        """Regions grow, shrink, come and go; what is known of a block stays."""
        regions = self._memory.regions()
        blocks = [np.arange(region.start, region.end, BLOCK) for region in regions]
        addresses = np.concatenate(blocks) if blocks else np.zeros(0, np.int64)
        if np.array_equal(addresses, self._addresses):
            return
        where = np.searchsorted(self._addresses, addresses)
        known = where < len(self._addresses)
        known[known] = self._addresses[where[known]] == addresses[known]
        changed, slots = np.full(len(addresses), -AWAKE), np.zeros(len(addresses), np.int64)
        absent = np.ones(len(addresses), np.bool_)
        absent[known] = self._absent[where[known]]
        changed[known], slots[known] = self._changed[where[known]], self._slots[where[known]]
        slots[~known] = self._free_slots(slots[known], int((~known).sum()))
        self._addresses, self._changed, self._slots, self._absent = addresses, changed, slots, absent
        self._is_stack = np.repeat([region.kind is Kind.STACK for region in regions], [len(each) for each in blocks])

    def _free_slots(self, taken: Indices, count: int) -> Indices:
        """Places of so many copies, zeros, that nobody has."""
        is_free = np.ones(len(self._copies), np.bool_)
        is_free[taken] = False
        free = np.flatnonzero(is_free)[:count]
        self._copies[free] = 0
        if len(free) < count:
            first, more = len(self._copies), max(count - len(free), len(self._copies) // 2)
            self._copies = np.concatenate([self._copies, np.zeros((more, WORDS), np.uint32)])
            free = np.concatenate([free, np.arange(first, first + count - len(free))])
        return free

    def _due(self) -> Indices:
        """The blocks that are to be compared now."""
        count = len(self._addresses)
        if count <= FEW:
            return np.arange(count)
        awake = int((self._changed > self._stops - AWAKE).sum())
        most = min(count, max(WARM, min(HOT, awake)))
        hot = np.argpartition(-self._changed, most - 1)[:most]
        waiting = np.flatnonzero(self._absent)
        came = waiting[self._memory.present(self._addresses[waiting])]
        self._absent[came] = False
        cold = np.flatnonzero(~self._absent)
        cold = cold[np.arange(self._turn, self._turn + min(COLD, len(cold))) % max(1, len(cold))]
        self._turn += COLD
        return np.unique(np.concatenate([hot, came, cold]))


def _spans(address: int, new: Words, old: Words, stack: bool) -> Iterator[Span]:
    differing = np.flatnonzero(new != old)
    for run in np.split(differing, np.flatnonzero(np.diff(differing) > GAP) + 1):
        yield Span(address + 4 * int(run[0]), new[run[0] : run[-1] + 1].copy(), stack)


def _join(before: Span, span: Span) -> list[Span]:
    """Two that touch, as one."""
    if before.address + 4 * len(before.words) != span.address or before.stack != span.stack:
        return [before, span]
    return [Span(before.address, np.concatenate([before.words, span.words]), span.stack)]
