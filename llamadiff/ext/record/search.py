"""Where in a program's memory a row of values lay, and when: by the values, in any dtype that engines keep them in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.record.log import Log
from llamadiff.ext.record.memory import Words

Array = NDArray[Any]
Indices = NDArray[np.int64]
TOLERANCES = 1e-4, 2e-2  # of a row's RMS: what may part it from the one that is sought, at first and then
SAME = 1e-6  # and the same, of float32's rounding
LEAST = 4  # values of a row: fewer are found everywhere
LIKE = 1e-3  # NMSE of a row that is taken for the one that is sought
ANCHORS = 6  # values of a row, the largest, that are looked at before all others
BESIDE = (1, -1, 2, -2, 3, -3, 4, -4)  # and those that lie beside the largest
LARGER = 1e3  # times or part of the RMS that is right: what a program may have in its place
LATER = 64  # stops at which more of a row may have been written
READ = 32  # places that are read whole
ENOUGH = 64  # rows that show all dtypes of a program's values
_PAGE, _WORDS = 1 << 12, 1 << 10
_KEPT = 256 << 20  # bytes of pages in all their versions
_SIGN = np.uint32(1 << 31)


@dataclass(frozen=True)
class Place:
    """Where a row lay: an address, the stop at which it was seen there, and the dtype of its values."""

    address: int
    stop: int
    dtype: str


@dataclass(frozen=True)
class Found:
    """A row that was found: its place, its values [value], and their NMSE against what was sought."""

    place: Place
    values: Array
    nmse: float

    @property
    def extent(self) -> range:
        """Its addresses."""
        return range(self.place.address, self.place.address + self.values.size * DTYPES[self.place.dtype].size)


class Dtype(NamedTuple):
    """How values lie in memory.

    ``size`` in bytes; ``decode`` makes floats of raw bytes, and ``bits`` integers of floats.
    """

    name: str
    size: int
    decode: Callable[[bytes], Array]
    bits: Callable[[Array], Array]

    def words(self, values: Array, margin: float) -> tuple[Words, Words]:
        """The least and the greatest word [value], in the order of floats, with a value in its upper part, or near."""
        ends = self.bits(np.stack([values - margin, values + margin])).astype(np.int64)
        if self.size == 2:  # with anything in the lower part, and its own rounding
            ends = np.concatenate([ends - 1, ends, ends + 1]).clip(0, 0xFFFF) << 16
            ends = np.concatenate([ends, ends | 0xFFFF])
        else:
            ends >>= 8 * self.size - 32
        ordered = _ordered(ends.astype(np.uint32))
        return ordered.min(axis=0), ordered.max(axis=0)

    def place_of(self, index: int) -> int:
        """Bytes from a row's start to the word whose upper part has a value."""
        return index * self.size + self.size - 4


def _bf16(raw: bytes) -> Array:
    return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)


DTYPES = {
    each.name: each
    for each in (
        Dtype("f32", 4, lambda raw: np.frombuffer(raw, "<f4"), lambda x: x.astype("<f4").view("<u4")),
        Dtype("f64", 8, lambda raw: np.frombuffer(raw, "<f8"), lambda x: x.astype("<f8").view("<u8")),
        Dtype("f16", 2, lambda raw: np.frombuffer(raw, "<f2").astype(np.float32),
              lambda x: x.astype("<f2").view("<u2")),
        Dtype("bf16", 2, _bf16, lambda x: x.astype("<f4").view("<u4") >> 16),
    )
}  # fmt: skip


class Memory:
    """What was in a program's memory at each stop, and all words that were written, by value."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self._kept: dict[int, tuple[Indices, Words]] = {}

    @cached_property
    def ordered(self) -> Words:
        """The logged words as numbers that are in the order of floats."""
        return _ordered(self.log.words)

    @cached_property
    def _order(self) -> Indices:
        return np.argsort(self.ordered, kind="stable")

    @cached_property
    def _sorted(self) -> Words:
        return self.ordered[self._order]

    def between(self, low: np.uint32, high: np.uint32) -> Indices:
        """Numbers of the logged words from ``low`` up to ``high``, in the order of floats."""
        return self._order[np.searchsorted(self._sorted, low) : np.searchsorted(self._sorted, high, "right")]

    def count(self, low: Words, high: Words) -> Indices:
        """How many of the logged words are in each range."""
        return np.searchsorted(self._sorted, high, "right") - np.searchsorted(self._sorted, low)

    def at(self, words: Indices) -> tuple[Indices, Indices]:
        """The addresses of logged words, and the numbers of their spans."""
        spans = np.searchsorted(self.log.starts, words, "right") - 1
        return self._starts[spans] + 4 * (words - self.log.starts[spans]), spans

    def read(self, address: int, size: int, stop: int) -> bytes:
        """What lay at an address when the program had come to a stop; zeros where nothing was ever written."""
        out = bytearray()
        for page in range(address // _PAGE, (address + size - 1) // _PAGE + 1):
            stops, words = self._versions(page)
            version = int(np.searchsorted(stops, stop, "right")) - 1
            out += words[version].tobytes() if version >= 0 else bytes(_PAGE)
        return bytes(out[address % _PAGE :][:size])

    def stops_that_wrote(self, address: int, size: int) -> Indices:
        """The stops at which something of this had changed, in order."""
        found = [np.zeros(0, np.int64)]
        for page in range(address // _PAGE, (address + size - 1) // _PAGE + 1):
            stops, words = self._versions(page)
            part = words[:, max(0, address // 4 - page * _WORDS) : max(0, -(-(address + size) // 4) - page * _WORDS)]
            before = np.concatenate([np.zeros((1, part.shape[1]), np.uint32), part[:-1]]) if len(part) else part
            found.append(stops[(part != before).any(axis=1)])
        return np.unique(np.concatenate(found))

    def _versions(self, page: int) -> tuple[Indices, Words]:
        """The stops at which a page was written, and all of its words after each."""
        if page not in self._kept:
            numbers = self._by_page.get(page, np.zeros(0, np.int64))
            stops, first = np.unique(self.log.spans["stop"][numbers].astype(np.int64), return_index=True)
            words, now = np.empty((len(stops), _WORDS), np.uint32), np.zeros(_WORDS, np.uint32)
            for version, some in enumerate(np.split(numbers, first[1:]) if len(first) else ()):
                for number in some.tolist():
                    start = int(self._starts[number]) // 4 - page * _WORDS
                    begin, end = max(0, start), min(_WORDS, start + int(self.log.spans["words"][number]))
                    offset = int(self.log.starts[number]) - start
                    now[begin:end] = self.log.words[offset + begin : offset + end]
                words[version] = now
            if sum(each.nbytes for _, each in self._kept.values()) > _KEPT:
                self._kept.clear()
            self._kept[page] = stops, words
        return self._kept[page]

    @cached_property
    def _starts(self) -> Indices:
        return self.log.spans["address"].astype(np.int64)

    @cached_property
    def _ends(self) -> Indices:
        return self._starts + 4 * self.log.spans["words"].astype(np.int64)

    @cached_property
    def _by_page(self) -> dict[int, Indices]:
        first, last = self._starts // _PAGE, (self._ends - 1) // _PAGE
        counts = last - first + 1
        numbers = np.repeat(np.arange(len(first)), counts)
        pages = first[numbers] + np.arange(len(numbers)) - np.repeat(np.cumsum(counts) - counts, counts)
        order = np.argsort(pages, kind="stable")
        edges = np.flatnonzero(np.diff(pages[order], prepend=-1))
        return {
            int(pages[order[edge]]): numbers[order[edge:end]]
            for edge, end in zip(edges, [*edges[1:], len(order)], strict=True)
        }


def _ordered(words: Words) -> Words:
    """Bits of floats as numbers in the same order: the negative ones turned around."""
    words = np.asarray(words, np.uint32)
    return np.where(words & _SIGN, ~words, words | _SIGN)


class Search:
    """Finds rows in a memory, in the dtypes first in which others were found.

    ``order``: the number of the order of RoPE's pairs in which others were (orders.py).
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.dtypes, self.order = list(DTYPES), 0
        self._counts = Counter[str]()
        self._known: dict[bytes, Found | None] = {}

    def find(self, row: Array) -> Found | None:
        """The place that is most like a row [value]; None if it is nowhere, or cannot be told from others."""
        key = row.tobytes()
        if key not in self._known:
            self._known[key] = self._find(row)
        return self._known[key]

    def find_close(self, row: Array) -> Found | None:
        """As ``find``, in the dtype in which others were found, and no further off than rounding."""
        key = row.tobytes()
        if key in self._known:
            return self._known[key]
        return self._find_as(row, DTYPES[self.dtypes[0]], _rms(row) * TOLERANCES[0]) if _can_be_told(row) else None

    def copies(self, found: Found) -> list[Place]:
        """All places that have the values of one, by when they had them first."""
        dtype = DTYPES[found.place.dtype]
        margin = _rms(found.values) * SAME
        places = {each for anchors in _anchors(found.values, dtype)
                  for each in self._places(found.values, anchors, dtype, margin)}  # fmt: skip
        read = (
            (place, self.read(found.values, dtype.name, *place)) for place in sorted(places, key=lambda one: one[1])
        )
        return [each.place for _, each in read if each is not None and each.nmse <= SAME**2]

    def may_be_there(self, rows: Array) -> NDArray[np.bool_]:
        """Of rows [row, value] those whose largest value is there; of two-byte values, which lie anywhere, all."""
        dtype = DTYPES[self.dtypes[0]]
        if dtype.size == 2:
            return np.ones(len(rows), np.bool_)
        values = np.take_along_axis(rows, np.abs(rows).argmax(axis=1)[:, None], axis=1)[:, 0]
        low, high = dtype.words(values, float(np.abs(rows).max(initial=0)) * SAME)
        return self.memory.count(low, high) > 0

    def read(self, row: Array, dtype: str, address: int, stop: int) -> Found | None:
        """What lay at an address when the program had come to a stop, in place of a row [value], if it is as large."""
        values = DTYPES[dtype].decode(self.memory.read(address, len(row) * DTYPES[dtype].size, stop))
        if not np.isfinite(values).all() or not _rms(row) / LARGER <= _rms(values) <= _rms(row) * LARGER:
            return None
        return Found(Place(address, stop, dtype), values, _nmse(values, row))

    def _find(self, row: Array) -> Found | None:
        if not _can_be_told(row):
            return None
        rms = _rms(row)
        for margin in (rms * tolerance for tolerance in TOLERANCES):
            for name in self.dtypes:
                found = self._find_as(row, DTYPES[name], margin)
                if found is not None:
                    self._counts[name] += 1
                    known = self._counts if self._counts.total() > ENOUGH else self.dtypes
                    self.dtypes = [name, *(each for each in self.dtypes if each != name and each in known)]
                    return found
        return None

    def _find_as(self, row: Array, dtype: Dtype, margin: float) -> Found | None:
        places = [place for anchors in _anchors(row, dtype) for place in self._places(row, anchors, dtype, margin)]
        best: Found | None = None
        for address, stop in sorted(set(places), key=lambda place: place[1])[:READ]:
            found = self._read(row, dtype, address, stop)
            if found is not None and (best is None or found.nmse < 0.1 * best.nmse):
                best = found
        return best

    def _places(self, row: Array, anchors: Sequence[int], dtype: Dtype, margin: float) -> Iterator[tuple[int, int]]:
        """Addresses and stops at which a row may begin: all anchors that are in the span of the first one agree."""
        log = self.memory.log
        low, high = dtype.words(row[np.asarray(anchors)], margin)
        words = self.memory.between(low[0], high[0])
        addresses, spans = self.memory.at(words)
        ends, agree = log.starts[spans + 1], np.ones(len(words), np.bool_)
        shared = np.zeros(len(words), np.int64)
        for number, anchor in enumerate(anchors[1:], 1):
            other = words + (dtype.place_of(anchor) - dtype.place_of(anchors[0])) // 4
            inside = (other >= log.starts[spans]) & (other < ends)
            value = self.memory.ordered[np.where(inside, other, 0)]
            agree &= ~inside | ((value >= low[number]) & (value <= high[number]))
            shared += inside
        agree &= shared > 0
        starts = addresses[agree] - dtype.place_of(anchors[0])
        yield from zip(starts.tolist(), log.spans["stop"][spans[agree]].tolist(), strict=True)

    def _read(self, row: Array, dtype: Dtype, address: int, stop: int) -> Found | None:
        """What lay at an address at a stop or when more of it had been written, whatever is most like the row."""
        size = len(row) * dtype.size
        later = self.memory.stops_that_wrote(address, size)
        best: Found | None = None
        for when in (stop, *later[later > stop][:LATER].tolist()):
            values = dtype.decode(self.memory.read(address, size, when))
            nmse = _nmse(values, row)
            if nmse <= LIKE and (best is None or nmse < 0.1 * best.nmse):
                best = Found(Place(address, when, dtype.name), values, nmse)
        return best


def _rms(row: Array) -> float:
    values = row.astype(np.float64)
    return float(np.sqrt(values @ values / max(1, len(values))))


def _can_be_told(row: Array) -> bool:
    """Whether a row is not too short, nor too even, to be told from others."""
    return len(row) >= LEAST and bool(np.isfinite(row).all()) and float(np.ptp(row)) > 0


def _nmse(values: Array, row: Array) -> float:
    with np.errstate(all="ignore"):
        return float(np.square(values - row).sum() / np.square(row).sum())


def _anchors(row: Array, dtype: Dtype) -> list[list[int]]:
    """The largest values of a row, and some beside the largest of all: what is written at once has several of these.

    Of two bytes each, those that are the upper half of a word, wherever it begins.
    """
    order = np.argsort(-np.abs(row)).tolist()
    found = []
    for kind in [order] if dtype.size != 2 else [[each for each in order if each % 2 == odd] for odd in (1, 0)]:
        may = set(kind)
        beside = [kind[0] + step for step in BESIDE if kind[0] + step in may]
        found.append([*dict.fromkeys([kind[0], *beside, *kind[1:ANCHORS]])])
    return found
