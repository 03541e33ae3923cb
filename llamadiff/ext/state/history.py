"""Who sees whom: a model of a cache that knows the tokens' history alone, and nothing of cells.

A row is a token that was decoded once. A sequence holds rows, each at a position of its own there, which a shift moves.
What llama.cpp's calls mean is read from llama.h: decode, seq_rm, seq_cp, seq_add, and the state of one sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

END = -1  # of a range: to the last position
ROW, REMOVED, SHIFTED = "row", "removed", "shifted"
Event = tuple[str, tuple[int, ...]]  # of a life: a row's number; a range that was removed; a range that moved so far


@dataclass(frozen=True)
class Window:
    """How far back a layer's queries reach (``length`` positions, the own one included; 0: all), or, ``chunked``, to
    the last position that is a multiple of it (llama-hparams.h: is_masked_swa).
    """

    length: int = 0
    chunked: bool = False

    def hides(self, key: int, query: int) -> bool:
        """Whether a key's position is out of a query's reach."""
        if not self.length:
            return False
        return key < query // self.length * self.length if self.chunked else query - key >= self.length


@dataclass(frozen=True)
class Row:
    """A decoded token: what it ``sees``, itself included, are rows and their positions then; its ``life`` is all that
    its sequence consists of, up to itself.
    """

    number: int
    token: int
    sequence: int
    position: int
    sees: Mapping[int, int]
    life: tuple[Event, ...]

    def reaches(self, window: Window) -> dict[int, int]:
        """What it sees in a layer with such a window."""
        return {row: place for row, place in self.sees.items() if not window.hides(place, self.position)}


@dataclass(frozen=True)
class Kept:
    """A sequence as it was: its rows with their positions, and its life."""

    rows: Mapping[int, int]
    life: tuple[Event, ...]


NOTHING = Kept({}, ())


class History:
    """All that was done to a context."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.sequences: dict[int, Kept] = {}

    def of(self, sequence: int) -> Kept:
        return self.sequences.get(sequence, NOTHING)

    def end(self, sequence: int) -> int:
        """The position of a sequence's next token."""
        return max(self.of(sequence).rows.values(), default=-1) + 1

    def decode(self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int]) -> list[Row]:
        """A batch: a token sees what its sequence holds, and those of the batch, up to its own position."""
        made = []
        for token, position, sequence in zip(tokens, positions, sequences, strict=True):
            number, before = len(self.rows), self.of(sequence)
            held = {**before.rows, number: position}
            life = (*before.life, (ROW, (number,)))
            self.sequences[sequence] = Kept(held, life)
            sees = {row: place for row, place in held.items() if place <= position}
            self.rows.append(Row(number, token, sequence, position, sees, life))
            made.append(self.rows[-1])
        return made

    def remove(self, sequence: int, start: int, stop: int) -> None:
        """Rows at positions from ``start`` to before ``stop`` are gone; the last ones, as if they had never been."""
        before = self.of(sequence)
        gone = {row for row, place in before.rows.items() if _within(place, start, stop)}
        left = {row: place for row, place in before.rows.items() if row not in gone}
        life = list(before.life)
        while gone and life[-1][0] == ROW and life[-1][1][0] in gone:
            gone.discard(life.pop()[1][0])
        if gone:
            life = [*life, (REMOVED, (start, stop))] if left else []
        self.sequences[sequence] = Kept(left, tuple(life))

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """The target gets the source's rows of a range, and is what the source is without the others."""
        held = self.of(source)
        some = {row: place for row, place in held.rows.items() if _within(place, start, stop)}
        self.sequences[target] = held
        for row, place in held.rows.items():
            if row not in some:
                self.remove(target, place, place + 1)

    def shift(self, sequence: int, start: int, stop: int, by: int) -> None:
        """Rows of a range move: those of this sequence, and of no other."""
        before = self.of(sequence)
        moved = {row: place + by if _within(place, start, stop) else place for row, place in before.rows.items()}
        held = {row: place for row, place in moved.items() if place >= 0}
        if moved != before.rows:
            self.sequences[sequence] = Kept(held, (*before.life, (SHIFTED, (start, stop, by))))

    def restore(self, kept: Kept, sequence: int) -> None:
        """A sequence becomes what it, or another, was when its state was taken."""
        self.sequences[sequence] = kept

    def clear(self) -> None:
        """All sequences end."""
        self.sequences.clear()


def _within(place: int, start: int, stop: int) -> bool:
    return place >= start and (stop < 0 or place < stop)
