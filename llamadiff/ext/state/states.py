"""Which token each recurrent state of a cache comes after: what passes clear, read, move and write is held against it.

A state is told apart by the number of the row that it comes after, in the history; what a saved state brings back is in
a cell that is not known, so one that was not written since is taken for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from llamadiff.ext.state.history import ROW, Kept, Row

NONE, STRANGE = -1, -2  # instead of a row: a state before any token; what is no sequence's state


def after(kept: Kept) -> int:
    """The row that a sequence's state comes after."""
    return next((of[0] for what, of in reversed(kept.life) if what == ROW), NONE)


@dataclass
class Wrong:
    """A token that begins with another state than it should, each said as the row that it comes after."""

    row: Row
    found: int
    right: int


@dataclass
class States:
    """The cells of one cache: the row that each comes after, and when that was written."""

    cells: dict[int, tuple[int, int]] = field(default_factory=dict)
    reading: int | None = None  # the first row of a pass that read, and did not write yet
    is_lost: bool = False  # a pass wrote by means that are not known here: nothing is said from then on

    def of(self, cell: int) -> tuple[int, int]:
        return self.cells.get(cell, (NONE, 0))

    def clear(self, start: int, count: int, now: int) -> None:
        self.cells.update((cell, (NONE, now)) for cell in range(start, start + count))

    def move(self, start: int, sources: Sequence[int]) -> None:
        """All at once."""
        moved = [self.of(source) for source in sources]
        self.cells.update(zip(range(start, start + len(moved)), moved, strict=True))

    def write(self, start: int, count: int, rows: Sequence[Row], now: int) -> None:
        """What a pass over these rows comes to, of each sequence one state."""
        last = {row.sequence: row.number for row in rows}
        self.reading = None
        made = [*last.values(), *[STRANGE] * max(0, count - len(last))]
        self.cells.update((start + place, (number, now)) for place, number in enumerate(made[:count]))

    def read(self, sources: Sequence[int], rows: Sequence[Row], back: Mapping[int, tuple[int, int]]) -> Iterator[Wrong]:
        """What the sequences of a pass begin with; ``back``: of a sequence the row that a saved state came after, and
        when it was brought back.
        """
        first = {row.sequence: row for row in reversed(rows)}
        order = dict.fromkeys(row.sequence for row in rows)
        self.is_lost |= self.reading not in (None, rows[0].number)
        self.reading = rows[0].number
        if self.is_lost or len(sources) != len(order):
            return
        for sequence, cell in zip(order, sources, strict=True):
            row = first[sequence]
            (found, when), right = self.of(cell), after(Kept({}, row.life[:-1]))
            brought, since = back.get(sequence, (STRANGE, 0))
            if found != right and not (brought == right and when < since):
                yield Wrong(row, found, right)
