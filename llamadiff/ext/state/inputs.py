"""Whether llama.cpp gave the passes over its graph what the tokens' history says: who sees whom, at which positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.state import graph_inputs as given
from llamadiff.ext.state.graph_inputs import MASK, POSITIONS, ROWS
from llamadiff.ext.state.graph_inputs import SHIFT as MOVED
from llamadiff.ext.state.history import History, Kept, Row, Window
from llamadiff.ext.state.states import NONE, States, Wrong, after
from llamadiff.llamacpp.sent_tensor import SentTensor
from llamadiff.llamacpp.steps import CLEAR, COPY, DECODE, GET, LOAD, NEW, REMOVE, SAVE, SET, SHIFT, Step

Array = NDArray[Any]
MOST = 20  # faults that are told
NO_WINDOWS = "this llama.cpp does not say how far layers with a window see"


@dataclass
class Cells:
    """Which cells of one cache hold a sequence's rows, as far as that is known; windows that its masks fit."""

    windows: list[Window]
    held: dict[int, dict[int, int]] = field(default_factory=dict)  # sequence -> row -> cell
    kept: dict[int, list[int]] = field(default_factory=dict)  # state -> its rows, in the order of cells
    back: dict[int, list[int]] = field(default_factory=dict)  # sequence -> rows that a state gave it, in that order
    written: dict[int, Row] = field(default_factory=dict)  # cell -> what was written to it last

    def of(self, sequence: int) -> dict[int, int]:
        return self.held.setdefault(sequence, {})

    def rows_in(self, cells: set[int]) -> dict[tuple[int, int], list[int]]:
        """By sequence and cell, the rows that are held in these."""
        found = dict[tuple[int, int], list[int]]()
        for sequence, held in self.held.items():
            for row, cell in held.items():
                if cell in cells:
                    found.setdefault((sequence, cell), []).append(row)
        return found


@dataclass(frozen=True)
class _Right:
    """A mask in which all ``rows`` see what they should, in a cache with these ``windows`` and rows ``held``; those
    that it ``fits``.
    """

    mask: Array
    rows: list[int]
    held: dict[int, dict[int, int]]
    windows: list[Window]
    fits: list[Window]


class Inputs:
    """What was done to a context, and the ``faults`` in what its passes were given."""

    def __init__(self) -> None:
        self.windows, self.knows_windows = [Window()], True
        self.faults, self.unsure = list[str](), list[str]()
        self.history, self.batch = History(), 0
        self.caches: dict[str, Cells] = {}
        self.states: dict[int, Kept] = {}
        self.rows: list[Row] = []  # of the batch
        self.current: list[Row] = []  # of those, the ones of the pass
        self.right: _Right | None = None  # the last mask that was
        self.values: dict[int, Array] = {}  # address -> what was told of it last
        self.shifts: dict[tuple[int, int], int] = {}  # sequence, row -> how far it moved and was not turned yet
        self.is_turned, self.has_turned = False, False  # whether positions are RoPE's; whether rows were turned since
        self.recurrent: dict[str, States] = {}
        self.now, self.back = 0, dict[int, tuple[int, int]]()  # sequence -> the row its state came after, and when
        self._does: Mapping[str, Callable[..., None]] = {
            NEW: self._renew, CLEAR: self._clear, REMOVE: self._remove, COPY: self._copy, SHIFT: self._shift,
            GET: self._get, SAVE: self._get, SET: self._set, LOAD: self._set,
        }  # fmt: skip
        self._reads: Mapping[str, Callable[[str, Array, Mapping[str, Any]], Iterator[str]]] = {
            MASK: self._mask, ROWS: self._written, POSITIONS: self._positions, MOVED: self._moved,
            **dict.fromkeys((given.CLEARED, given.READ, given.MOVED, given.WRITTEN), self._states),
        }  # fmt: skip

    def set_window(self, length: int | None) -> None:
        """Some of the model's layers may have a window of this length, of either kind; None: llama.cpp does not say."""
        self.knows_windows = length is not None
        self.windows = [Window(), Window(length), Window(length, chunked=True)] if length else [Window()]

    # -- what is done --------------------------------------------------------------------------------------------------

    def do(self, step: Step) -> None:
        """A step, before what comes of it is told."""
        self.now += 1
        if step.call == DECODE:
            self.batch += 1
            self.current.clear()
            self.rows[:] = self.history.decode(step.tokens, step.positions, step.sequences)
        else:
            self._does[step.call](*step.of)

    def run(self, places: Sequence[int]) -> None:
        """These tokens of the batch are run together; what was to be moved was moved before."""
        self.current[:] = [self.rows[place] for place in places]
        if self.is_turned and not self.has_turned:
            self._find(self._unmoved())
        self.shifts.clear()
        self.has_turned = False

    def _renew(self, *_: int) -> None:
        self.history, self.batch = History(), 0
        for held in (self.caches, self.states, self.values, self.shifts, self.recurrent, self.back):
            held.clear()
        self.rows.clear()

    def _clear(self) -> None:
        self.history.clear()
        self.shifts.clear()
        for cells in self.caches.values():
            cells.held.clear()
            cells.back.clear()

    def _remove(self, sequence: int, start: int, stop: int) -> None:
        self.history.remove(sequence, start, stop)
        left = self.history.of(sequence).rows
        for cells in self.caches.values():
            cells.held[sequence] = {row: cell for row, cell in cells.of(sequence).items() if row in left}

    def _copy(self, source: int, target: int, start: int, stop: int) -> None:
        self.history.copy(source, target, start, stop)
        if source in self.back:
            self.back[target] = self.back[source]
        left = self.history.of(target).rows
        for cells in self.caches.values():
            cells.held[target] = {row: cell for row, cell in cells.of(source).items() if row in left}
            cells.back[target] = cells.back.get(source, [])
        for row in left:
            if (source, row) in self.shifts:
                self.shifts[target, row] = self.shifts[source, row]

    def _shift(self, sequence: int, start: int, stop: int, by: int) -> None:
        before = self.history.of(sequence).rows
        self.history.shift(sequence, start, stop, by)
        after = self.history.of(sequence).rows
        for row, place in before.items():
            if after.get(row, place) != place:
                self.shifts[sequence, row] = self.shifts.get((sequence, row), 0) + by

    def _get(self, sequence: int, place: int) -> None:
        self.states[place] = self.history.of(sequence)
        for cells in self.caches.values():
            held = cells.of(sequence)
            known = sorted(held, key=lambda row: held[row])
            cells.kept[place] = [*(row for row in cells.back.get(sequence, []) if row not in held), *known]

    def _set(self, sequence: int, place: int) -> None:
        self.history.restore(self.states[place], sequence)
        self.back[sequence] = after(self.states[place]), self.now
        for cells in self.caches.values():
            cells.held[sequence], cells.back[sequence] = {}, list(cells.kept.get(place, []))

    # -- what passes were given ----------------------------------------------------------------------------------------

    def check_node(self, answer: Mapping[str, Any], data: Sequence[Any], order: str) -> None:
        """One thing that nodes of a pass read."""
        self.now += 1
        values = np.array(answer.get("ids", []))
        if "tensor" in answer:
            address = int(answer["tensor"]["at"])
            if data:
                self.values[address] = SentTensor(answer["tensor"], data=data[0], order=order).values()
            values = self.values[address]
        self._find(self._reads[answer["given"]](str(answer["cache"]), values, answer))

    def refused(self, said: str, sequence: int | None) -> None:
        """llama.cpp would not run the batch: for a sequence, as far as it says that."""
        row = next((row for row in self.rows if row.sequence == sequence), self.rows[0])
        self._find([f"{self._name(row)} is refused: {said}"])

    def _find(self, faults: Iterable[str]) -> None:
        for fault in faults:
            said = f"in the {ordinal(self.batch)} batch {fault}"
            if said not in self.faults and len(self.faults) < MOST:
                self.faults.append(said)

    def _states(self, cache: str, ids: Array, answer: Mapping[str, Any]) -> Iterator[str]:
        """Recurrent states: who begins with which."""
        held, (start, count) = self.recurrent.setdefault(cache, States()), answer["place"]
        match answer["given"]:
            case given.CLEARED:
                held.clear(start, count, self.now)
            case given.MOVED:
                held.move(start, ids.tolist())
            case given.WRITTEN:
                held.write(start, count, self.current, self.now)
            case _:
                for wrong in held.read(ids.tolist(), self.current, self.back):
                    yield self._begins(wrong, cache)

    def _begins(self, wrong: Wrong, cache: str) -> str:
        found, right = (self._state(number) for number in (wrong.found, wrong.right))
        return f"{self._name(wrong.row)} begins with {found} in {cache}, not with {right}"

    def _state(self, number: int) -> str:
        if number < 0:
            return "no state" if number == NONE else "what is no state"
        return (
            f"the state after position {self.history.rows[number].position} of sequence "
            f"{self.history.rows[number].sequence}"
        )

    def _unmoved(self) -> Iterator[str]:
        """Rows whose positions moved, and that were not turned."""
        for sequence in dict.fromkeys(row.sequence for row in self.current):
            held = self.history.of(sequence).rows
            row = next(row for row in self.current if row.sequence == sequence)
            for (owner, number), by in self.shifts.items():
                if owner == sequence and by and number in held and number in row.sees:
                    yield f"{self._name(row)} sees position {held[number]}, which moved by {by} and was not turned"
                    break

    def _positions(self, cache: str, values: Array, _: Mapping[str, Any]) -> Iterator[str]:
        self.is_turned = True
        found, count = values.reshape(-1), len(self.current)
        if not count or found.size % count:
            return
        for place, row in enumerate(self.current):
            parts = found[place::count]  # of M-RoPE: time, height and width alike, and nothing
            if not (parts[:3] == row.position).all() or parts[3:].any():
                yield f"{self._name(row)} has position {int(parts[0])}, not {row.position}"

    def _written(self, cache: str, values: Array, answer: Mapping[str, Any]) -> Iterator[str]:
        """The cells that rows are written to; of V, one for each value, with the cells side by side."""
        count, width = len(self.current), answer["shape"][-2]
        if not count:
            return
        wide = values.reshape(count, -1)
        written = wide[:, 0] % width if wide.shape[1] > 1 else wide[:, 0]
        if (wide != written[:, None] + width * np.arange(wide.shape[1])).any() and wide.shape[1] > 1:
            yield f"a row of {cache} is written to several cells"
        cells = self.caches.setdefault(cache, Cells(list(self.windows)))
        over = cells.rows_in(set(map(int, written)))
        for row, cell in zip(self.current, map(int, written), strict=True):
            for sequence, held in cells.held.items():
                for other in [other for other in over.get((sequence, cell), ()) if held.get(other) == cell]:
                    if not self._is_hidden(cells, sequence, other):
                        yield (f"{self._name(row)} is written over {self._place_of(sequence, other)} in {cache}, which "
                               f"sequence {sequence} still sees")  # fmt: skip
                    del held[other]
            cells.of(row.sequence)[row.number] = cell
            over.setdefault((row.sequence, cell), []).append(row.number)
            cells.written[cell] = row

    def _is_hidden(self, cells: Cells, sequence: int, row: int) -> bool:
        """Whether the next token of a sequence does not see a row any more, in a layer with any window that fits."""
        held = self.history.of(sequence).rows
        end = max(held.values(), default=-1)  # a token of this batch may be the one that hides it
        return any(window.hides(held[row], end + 1) for window in cells.windows) if row in held else True

    def _mask(self, cache: str, values: Array, _: Mapping[str, Any]) -> Iterator[str]:
        seen = values.reshape(-1, values.shape[-1]) > -np.inf
        if cache not in self.caches or len(seen) < len(self.current) or not self.current:
            return
        cells, now = self.caches[cache], [row.number for row in self.current]
        last = self.right
        held = now, cells.held, cells.windows
        if last is not None and last.mask is values and (last.rows, last.held, last.windows) == held:
            cells.windows = last.fits  # another layer's cache, with the same rows in it
            return
        before, faults = Cells(list(cells.windows), {each: dict(held) for each, held in cells.held.items()}), False
        for row, line in zip(self.current, seen, strict=False):
            for fault in self._looked(cells, row, [int(cell) for cell in np.flatnonzero(line)]):
                faults = True
                yield fault
        same = not faults and before.held == cells.held
        self.right = _Right(values, now, before.held, before.windows, cells.windows) if same else None

    def _looked(self, cells: Cells, row: Row, seen: Sequence[int]) -> Iterator[str]:
        """What is wrong with the cells that a token sees."""
        known = {cell: number for number, cell in cells.of(row.sequence).items()}
        rows = {known[cell] for cell in seen if cell in known}
        unknown = [cell for cell in seen if cell not in known]
        fits = [window for window in cells.windows if self._matches(cells, row, window, rows, unknown)]
        if fits:
            cells.windows = fits
            return
        right = set(row.reaches(cells.windows[0]))
        own = rows - right
        if unknown:
            whose = self._whose(cells, row, unknown, len(right - rows))
            yield f"{self._name(row)} sees {whose}"
        if own:
            yield f"{self._name(row)} sees positions of its own that are hidden: {self._places(row, own)}"
        missing = right - rows
        if missing and not unknown:
            said = f"{self._name(row)} does not see positions {self._places(row, missing)}"
            if self.knows_windows:
                yield said
            elif not self.unsure:
                self.unsure.append(f"in the {ordinal(self.batch)} batch {said}; {NO_WINDOWS}")

    @staticmethod
    def _whose(cells: Cells, row: Row, unknown: Sequence[int], missing: int) -> str:
        """Of whom rows are that a token sees, and that are none that its sequence is known to have."""
        if cells.back.get(row.sequence) and len(unknown) < missing:
            return f"{len(unknown)} of {missing} rows that a state had"
        others = sorted({sequence for sequence, held in cells.held.items() for cell in unknown
                         if sequence != row.sequence and cell in held.values()})  # fmt: skip
        if others:
            return f"rows of sequence {', '.join(map(str, others))}"
        gone = next((cells.written[cell] for cell in unknown if cell in cells.written), None)
        if gone is None:
            return "rows that nobody wrote"
        return f"a row that it has no more, which was position {gone.position} of sequence {gone.sequence}"

    def _matches(self, cells: Cells, row: Row, window: Window, rows: set[int], unknown: Sequence[int]) -> bool:
        """Whether it sees what it should; where a state brought rows back, their cells are learned from that."""
        right = set(row.reaches(window))
        missing = right - rows
        if rows - right or len(missing) != len(unknown):
            return False
        shared = {number: cell for cell in unknown for held in cells.held.values()
                  for number, place in held.items() if place == cell and number in missing}  # fmt: skip
        return any(self._learned(cells, row, missing, unknown, known) for known in ({}, shared))

    def _learned(
        self, cells: Cells, row: Row, missing: set[int], unknown: Sequence[int], shared: Mapping[int, int]
    ) -> bool:
        """Whether a state brought back what it does not know the cells of: they are learned, in their order; some are
        ``shared`` with a sequence that knows them. What was in these cells before must be hidden.
        """
        lost = [number for number in cells.back.get(row.sequence, []) if number in missing and number not in shared]
        new = [cell for cell in unknown if cell not in shared.values()]
        over = [(sequence, number) for sequence, held in cells.held.items()
                for number, cell in held.items() if cell in new]  # fmt: skip
        if len(lost) != len(new) or not all(self._is_hidden(cells, *each) for each in over):
            return False
        for sequence, number in over:
            del cells.held[sequence][number]
        cells.of(row.sequence).update({**shared, **dict(zip(lost, new, strict=True))})
        return True

    def _moved(self, cache: str, values: Array, _: Mapping[str, Any]) -> Iterator[str]:
        self.has_turned = True
        if cache not in self.caches:
            return
        moved, held = values.reshape(-1), self.caches[cache].held
        for sequence, rows in held.items():
            for row, cell in rows.items():
                right = self.shifts.get((sequence, row), 0)
                if moved[cell] != right and not self._is_hidden(self.caches[cache], sequence, row):
                    yield (f"the token at {self._place_of(sequence, row)} of sequence {sequence} is moved by "
                           f"{int(moved[cell])} in {cache}, not by {right}")  # fmt: skip

    # -- words ---------------------------------------------------------------------------------------------------------

    def _name(self, row: Row) -> str:
        before = sum(other.sequence == row.sequence and other.number < row.number for other in self.rows)
        return f"token {before} of sequence {row.sequence}"

    def _place_of(self, sequence: int, row: int) -> str:
        return f"position {self.history.of(sequence).rows.get(row, -1)}"

    def _places(self, row: Row, numbers: set[int]) -> str:
        places = sorted(row.sees.get(number, self.history.rows[number].position) for number in numbers)
        return ", ".join(map(str, places[:5])) + (", ..." if len(places) > 5 else "")


def ordinal(number: int) -> str:
    """1st, 2nd, ..."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
