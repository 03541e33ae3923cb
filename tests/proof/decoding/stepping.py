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
from proof.strangers.engine import Array, Bug, Edit, Engine
from proof.strangers.model import File, read

PLAIN = Arithmetic("float32", "scores, whose keys are of several sequences, are not recorded",
                   unrecorded=("kq", "kq_soft_max"))  # fmt: skip


class Stepping(Engine):
    """Steps over one cache. Its methods are what a mistake replaces."""

    def __init__(self, file: File, mistake: str) -> None:
        super().__init__(file, PLAIN, Bug(mistake, MISTAKES[mistake]))
        self.begin(0)
        self.gone: dict[int, list[int]] = {}  # what a mistake remembers of a sequence
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


def shared(e: Stepping, right: Edit, source: int, target: int) -> None:
    """What a fork is given later goes into both."""
    e.slots_of[target] = e.slots_of[source]


def without_last(e: Stepping, right: Edit, source: int, target: int) -> None:
    """A fork lacks the last row."""
    right(source, target)
    e.gone[target] = e.slots_of[target][-1:]


def dropped(e: Stepping, right: Edit, count: int, sequence: int) -> None:
    e.gone[sequence] = e.slots_of[sequence][-count:]
    right(count, sequence)


def forgotten(e: Stepping, right: Edit, sequence: int) -> None:
    e.gone[sequence] = e.slots_of.get(sequence, [])
    right(sequence)


def kept_itself(e: Stepping, right: Edit, sequence: int, place: int) -> None:
    """What is kept goes on with the sequence."""
    e.states[place] = e.slots_of[sequence]


def gone_too(e: Stepping, right: Edit, sequence: int, slots: Sequence[int]) -> list[int]:
    """A token still sees what is gone."""
    return [*e.gone.get(sequence, []), *slots]


def but_gone(e: Stepping, right: Edit, sequence: int, slots: Sequence[int]) -> list[int]:
    return [slot for slot in slots if slot not in e.gone.get(sequence, [])]


def of_all(e: Stepping, right: Edit, sequence: int, slots: Sequence[int]) -> list[int]:
    """A token of a batch of several sequences sees all of them."""
    return [slot for own in e.slots_of.values() for slot in own]


def as_if_kept(e: Stepping, right: Edit, sequence: int, at: int) -> int:
    """After something was dropped, positions go on as if it had not been."""
    return at + len(e.gone.get(sequence, []))


MISTAKES: dict[str, dict[str, Edit]] = {
    "none": {},
    "fork shares": {"fork": shared},
    "fork without last": {"fork": without_last, "visible": but_gone},
    "drop forgotten": {"drop": dropped, "visible": gone_too},
    "drop keeps position": {"drop": dropped, "place": as_if_kept},
    "sees others": {"visible": of_all},
    "new forgotten": {"new": forgotten, "visible": gone_too},
    "kept by reference": {"keep": kept_itself},
    "positions of all": {"place": lambda e, right, sequence, at: e.used},
}


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
    carry_out(Stepping(read(Path(given.model)), given.mistake), steps, Path(given.out))


if __name__ == "__main__":
    main()
