"""Where the values of a tap that is wrong may lie: where it lay in other tokens or layers, or what was written then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.record.orders import back
from llamadiff.ext.record.rows import Rows
from llamadiff.ext.record.search import DTYPES, Found, Place, Search
from llamadiff.trace.taps import Tap

Array = NDArray[Any]
Hypothesis = Mapping[int, Found]  # what each row that was not found would be
Rule = Callable[[int], tuple[int, int] | None]  # a row -> its address and stop
When = Callable[[int, int, int], int | None]  # an address, the stop of its input, bytes -> its stop
AFTER, LAYERS = 64, 2  # stops after its input's in which a value is written, at least; and in this many layers' stops
FEW, LONG = 4, 8  # times at which one address was left alone; and stops
TRIED = 32  # of what may be the values: the likest, and as many of the first that were written, in turn


def hypotheses(
    name: str,
    missing: Sequence[int],
    rows: Mapping[str, Rows],
    inputs: Mapping[str, Sequence[str]],
    search: Search,
    layers: int,
) -> Iterator[Hypothesis]:
    """What the ``missing`` rows of a tap may be, the likest first; ``inputs``: what lies in memory of each tap's."""
    yield from _Places(name, missing, rows, inputs, search, layers).likely()


class _Places:
    def __init__(
        self,
        name: str,
        missing: Sequence[int],
        rows: Mapping[str, Rows],
        inputs: Mapping[str, Sequence[str]],
        search: Search,
        layers: int,
    ) -> None:
        self._rows, self._search, self._of = rows, search, inputs
        self._sought = rows[name]
        self._inputs = self._inputs_of(self._sought.tap)
        self._missing = missing
        self._taken: dict[int, Place] = {}
        self._dtype = search.dtypes[0]
        steps = len(self._sought.values) * max(1, layers)
        self._after = max(AFTER, LAYERS * search.memory.log.stops // steps)

    def likely(self) -> Iterator[Hypothesis]:
        """Those whose rows are as large as the right ones and not all the same, the likest first."""
        near = self._sought.near
        if near:
            yield {row: near[row] for row in self._missing if row in near}
        seen = set[tuple[tuple[int, int], ...]]()
        for rules in (self._by_analogy(), self._by_rest(), self._by_time()):  # other layers are enough, as a rule
            found = list[tuple[float, Hypothesis]]()
            for rule in rules:
                places = {row: place for row in self._missing if (place := rule(row)) is not None}
                key = tuple(places.values())
                if not key or key in seen:
                    continue
                seen.add(key)
                read = {row: each for row, place in places.items() if (each := self._read(row, *place)) is not None}
                hypothesis = self._apart(read)
                if hypothesis:
                    found.append((float(np.median([each.nmse for each in hypothesis.values()])), hypothesis))
            found.sort(key=lambda each: (-len(each[1]) // 2, each[0]))
            soonest = sorted(range(len(found)), key=lambda one: min(row.place.stop for row in found[one][1].values()))
            likest = range(len(found))
            for number in dict.fromkeys(chain.from_iterable(islice(zip(likest, soonest, strict=True), TRIED))):
                yield found[number][1]

    def _apart(self, read: Hypothesis) -> Hypothesis:
        """Without rows that are the same write as another one, of other inputs: a place is one row's."""
        every = {**self._sought.places, **read}
        counts = Counter(each.values.tobytes() for each in every.values())
        writes = {row: self._write_of(row, found) for row, found in every.items() if counts[found.values.tobytes()] > 1}
        owners: dict[tuple[int, int], set[bytes]] = {}
        for row, write in writes.items():  # the same inputs are those of a token that comes twice
            inputs = b"".join(rows.values[row].tobytes() for rows in self._inputs)
            owners.setdefault(write, set()).add(inputs or str(row).encode())
        return {row: each for row, each in read.items() if row not in writes or len(owners[writes[row]]) == 1}

    def _write_of(self, row: int, found: Found) -> tuple[int, int]:
        """The address of what was found for a row, and the stop at which it was last written until it was seen."""
        stops = self._search.memory.stops_that_wrote(found.place.address, self._size(row))
        seen = int(np.searchsorted(stops, found.place.stop, "right"))
        return found.place.address, int(stops[seen - 1]) if seen else -1

    def _inputs_of(self, tap: Tap) -> list[Rows]:
        return [self._rows[name] for name in self._of[tap.name]]

    def _since(self, row: int) -> tuple[int, int] | None:
        """The address and the stop at which the last input of a row was seen."""
        there = [self._seen(each, row) for each in self._inputs if row in each.places]
        last = max(there, key=lambda place: place.stop, default=None)
        return None if last is None else (last.address, last.stop)

    def _seen(self, rows: Rows, row: int) -> Place:
        """Where an input was seen; an embedding that lies among weights, where it was copied to in its turn."""
        place = rows.places[row].place
        if rows.tap.name != "embd" or len({each.place.stop for each in rows.places.values()}) > 1:
            return place
        if row not in self._taken:
            values = [rows.values[each].tobytes() for each in range(row + 1)]
            later = [each for each in self._search.copies(rows.places[row]) if each.stop > place.stop]
            self._taken[row] = later[min(values.count(values[row]), len(later)) - 1] if later else place
        return self._taken[row]

    def _by_analogy(self) -> Iterator[Rule]:
        """As far from its input as in other tokens or layers, in place and in time; or when that was left alone."""
        seen = set[tuple[int, int]]()
        for rows in self._rows.values():
            if rows.tap.kind.word != self._sought.tap.kind.word:
                continue
            inputs = self._inputs_of(rows.tap)
            for row, each in rows.places.items():
                there = [other.places[row].place for other in inputs if row in other.places]
                last = max(there, key=lambda place: place.stop, default=None)
                if last is None or (each.place.address, each.place.stop - last.stop) in seen:
                    continue
                seen.add((each.place.address, each.place.stop - last.stop))
                whens: list[When] = [partial(self._rest, number=number) for number in range(FEW)]
                for when in (_later(each.place.stop - last.stop), *whens):
                    yield from self._rules(row, each.place.address, when, last.address)

    def _by_rest(self) -> Iterator[Rule]:
        """What was left alone for a time, as what a loop has filled is, however long it ran."""
        return self._at_times(
            lambda address, since, size: [
                partial(self._rest, number=number) for number in range(min(FEW, len(self._rests(address, since, size))))
            ]
        )

    def _by_time(self) -> Iterator[Rule]:
        """What was written so many stops after the last input was."""
        return self._at_times(
            lambda address, since, size: [
                _later(stop - since) for stop in self._search.memory.stops_that_wrote(address, size).tolist()
                if since <= stop <= since + self._after
            ]
        )  # fmt: skip

    def _at_times(self, times: Callable[[int, int, int], Iterable[When]]) -> Iterator[Rule]:
        """Each address that the last of the missing rows may have, at the ``times`` of an address."""
        row = self._missing[-1]
        since = self._since(row)
        if since is not None:
            for address in self._addresses(row, since[1]):
                for when in times(address, since[1], self._size(row)):
                    yield from self._rules(row, address, when, since[0])

    def _rest(self, address: int, since: int, size: int, number: int) -> int | None:
        rests = self._rests(address, since, size)
        return rests[number] if number < len(rests) else None

    def _rests(self, address: int, since: int, size: int) -> list[int]:
        """The stops at which this was written and then left alone for longer than is usual of it, and those before.

        The one before is the end of a loop whose last turn is followed by another value at once.
        """
        stops = self._search.memory.stops_that_wrote(address, size)
        first, last = np.searchsorted(stops, [since, since + self._after])
        rests = np.diff(np.append(stops[first : last + 1], since + 2 * self._after))[: last - first]
        long = rests >= min(LONG, rests.max(initial=0) / 2)
        return [int(stop) for stop in stops[first:last][long | np.append(long[1:], False)]]

    def _addresses(self, row: int, since: int) -> list[int]:
        """Those that are known, or where rows of a write begin soon after a stop."""
        spans, size = self._search.memory.log.spans, self._size(row)
        first, last = np.searchsorted(spans["stop"], [since, since + self._after])
        known = {each.place.address for rows in self._rows.values() for each in rows.places.values()}
        some = spans[int(first) : int(last)]
        starts, ends = some["address"].astype(np.int64), (some["address"] + 4 * some["words"]).astype(np.int64)
        written = {start + size * number for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
                   for number in range(min(row + 2, (end - start) // size))}  # fmt: skip
        return sorted(known | written)

    def _rules(self, known: int, address: int, when: When, beside: int) -> Iterator[Rule]:
        """Where the other rows are if one is at an address, at a time after its input, which is ``beside`` it."""
        size = self._size(known)

        def at(row: int, there: Callable[[int, int], int]) -> tuple[int, int] | None:
            since = self._since(row)
            place = there(row, since[0]) if since is not None else 0
            stop = when(place, since[1], size) if since is not None else None
            return None if stop is None else (place, stop)

        yield partial(at, there=lambda row, _: address)  # a buffer that is used for each token
        yield partial(at, there=lambda row, _: address + (row - known) * size)  # all tokens' one after the other
        yield partial(at, there=lambda _, its: its + address - beside)  # as far from its input

    def _size(self, row: int) -> int:
        return int(self._sought.values[row].size) * DTYPES[self._dtype].size

    def _read(self, row: int, address: int, stop: int) -> Found | None:
        order = self._sought.order
        sought = self._sought.values[row].reshape(-1)
        found = self._search.read(sought if order is None else sought[order], self._dtype, address, stop)
        return found if found is None or order is None else replace(found, values=back(found.values, order))


def _later(stops: int) -> When:
    return lambda _address, since, _size: since + stops
