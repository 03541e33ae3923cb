"""A stranger's llama that carries out steps as a server does. Run as a program it writes a trace for each step.

Nothing of llamadiff is used. A sequence is a list of slots of one cache; a query sees those of its sequence.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from proof.strangers import recording
from proof.strangers.arithmetic import Arithmetic
from proof.strangers.engine import Array, Engine
from proof.strangers.model import File, read

PLAIN = Arithmetic("float32", "scores, whose keys are of several sequences, are not recorded",
                   unrecorded=("kq", "kq_soft_max"))  # fmt: skip


class Stepping(Engine):
    """Steps over one cache. Its methods are what a mistake replaces."""

    def __init__(self, file: File) -> None:
        super().__init__(file, PLAIN)
        self.begin(0)
        self.slots_of: dict[int, list[int]] = {}
        self.states: dict[int, list[int]] = {}
        self.used = 0
        self.where, self.unseen = np.zeros(0, int), np.zeros((0, 0), bool)

    # -- what may go wrong -----------------------------------------------------------------------------------------

    def new(self, sequence: int) -> None:
        self.slots_of[sequence] = []

    def fork(self, source: int, target: int) -> None:
        self.slots_of[target] = list(self.slots_of[source])

    def drop(self, count: int, sequence: int) -> None:
        self.slots_of[sequence] = self.slots_of[sequence][:-count]

    def keep(self, sequence: int, place: int) -> None:
        self.states[place] = list(self.slots_of[sequence])

    def restore(self, place: int, sequence: int) -> None:
        self.slots_of[sequence] = list(self.states[place])

    def place(self, sequence: int, at: int) -> int:
        """The position of a token that is a sequence's ``at``-th."""
        return at

    def visible(self, sequence: int, slots: Sequence[int]) -> Sequence[int]:
        """What a token of a sequence sees, of the slots that are its own."""
        return slots

    # -- the run ---------------------------------------------------------------------------------------------------

    def fed_to(self, tokens: Sequence[int], sequences: Sequence[int]) -> None:
        """A batch of tokens, each at the end of its sequence."""
        self.recorded = {}
        where, seen = [], []
        for sequence in sequences:
            own = self.slots_of.setdefault(sequence, [])
            where.append(self.place(sequence, len(own)))
            own.append(self.used)
            self.used += 1
            seen.append(list(self.visible(sequence, own)))
        self.where, self.unseen = np.array(where), np.ones((len(tokens), self.used), bool)
        for query, slots in enumerate(seen):
            self.unseen[query, slots] = False
        self.step(tokens)

    @property
    def positions(self) -> Array:
        return self.where

    def hidden(self, queries: Array, keys: Array) -> Array:
        return self.unseen


class ForkShares(Stepping):
    """What a fork is given later goes into both."""

    def fork(self, source: int, target: int) -> None:
        self.slots_of[target] = self.slots_of[source]


class ForkWithoutLast(Stepping):
    """A fork lacks the last row."""

    def fork(self, source: int, target: int) -> None:
        super().fork(source, target)
        self.gone = self.slots_of[target][-1]

    def visible(self, sequence: int, slots: Sequence[int]) -> Sequence[int]:
        return [slot for slot in slots if sequence == 0 or slot != getattr(self, "gone", None)]


class DropForgotten(Stepping):
    """What was dropped is still seen."""

    def __init__(self, file: File) -> None:
        super().__init__(file)
        self.gone: dict[int, list[int]] = {}

    def drop(self, count: int, sequence: int) -> None:
        self.gone[sequence] = self.slots_of[sequence][-count:]
        super().drop(count, sequence)

    def visible(self, sequence: int, slots: Sequence[int]) -> Sequence[int]:
        return [*slots, *self.gone.get(sequence, [])]


class DropKeepsPosition(Stepping):
    """After something was dropped, positions go on as if it had not been."""

    def __init__(self, file: File) -> None:
        super().__init__(file)
        self.ahead: dict[int, int] = {}

    def drop(self, count: int, sequence: int) -> None:
        super().drop(count, sequence)
        self.ahead[sequence] = self.ahead.get(sequence, 0) + count

    def place(self, sequence: int, at: int) -> int:
        return at + self.ahead.get(sequence, 0)


class SeesOthers(Stepping):
    """A token of a batch of several sequences sees all of them."""

    def visible(self, sequence: int, slots: Sequence[int]) -> Sequence[int]:
        return [slot for own in self.slots_of.values() for slot in own]


class NewForgotten(Stepping):
    """A new sequence still sees what was there before."""

    def __init__(self, file: File) -> None:
        super().__init__(file)
        self.old: dict[int, list[int]] = {}

    def new(self, sequence: int) -> None:
        self.old[sequence] = self.slots_of.get(sequence, [])
        super().new(sequence)

    def visible(self, sequence: int, slots: Sequence[int]) -> Sequence[int]:
        return [*self.old.get(sequence, []), *slots]


class KeptByReference(Stepping):
    """What is kept goes on with the sequence."""

    def keep(self, sequence: int, place: int) -> None:
        self.states[place] = self.slots_of[sequence]


class PositionsOfAll(Stepping):
    """The position of a token is how many rows the cache has."""

    def place(self, sequence: int, at: int) -> int:
        return self.used


MISTAKES = {each.__name__: each for each in (
    Stepping, ForkShares, ForkWithoutLast, DropForgotten, DropKeepsPosition, SeesOthers, NewForgotten, KeptByReference,
    PositionsOfAll,
)}  # fmt: skip


def carry_out(engine: Stepping, steps: Sequence[dict[str, object]], out: Path) -> None:
    """All steps; of each that has tokens, a trace NUMBER.safetensors."""
    for number, step in enumerate(steps, 1):
        match step:
            case {"tokens": list(tokens), "sequences": list(sequences)}:
                engine.fed_to(tokens, sequences)
                _save(out / f"{number}.safetensors", engine, tokens)
            case {"tokens": list(tokens), **rest}:
                engine.fed_to(tokens, [int(str(rest.get("sequence", 0)))] * len(tokens))
                _save(out / f"{number}.safetensors", engine, tokens)
            case {"fork": int(source), "to": int(target)}:
                engine.fork(source, target)
            case {"drop": int(count), "sequence": int(sequence)}:
                engine.drop(count, sequence)
            case {"keep": int(sequence), "as": int(place)}:
                engine.keep(sequence, place)
            case {"restore": int(place), "to": int(sequence)}:
                engine.restore(place, sequence)
            case {"new": int(sequence)}:
                engine.new(sequence)


def _save(path: Path, engine: Stepping, tokens: Sequence[int]) -> None:
    recording.save(path, recording.without_cache(engine.taps()), tokens, name="mine", batches=[len(tokens)])


def main() -> None:
    """``--model FILE --steps FILE --out DIR --mistake NAME``."""
    parser = argparse.ArgumentParser()
    for name in ("--model", "--steps", "--out", "--mistake"):
        parser.add_argument(name, required=True)
    given = parser.parse_args()
    steps = json.loads(Path(given.steps).read_text(encoding="utf-8"))
    carry_out(MISTAKES[given.mistake](read(Path(given.model))), steps, Path(given.out))


if __name__ == "__main__":
    main()
