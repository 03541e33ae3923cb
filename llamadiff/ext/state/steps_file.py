"""A list of steps that an engine carries out, as a server does: batches of several sequences, and what is between them.

``[{"tokens": [1, 403], "sequence": 0}, {"fork": 0, "to": 1}, {"drop": 1, "sequence": 1}, {"keep": 1, "as": 7},
{"restore": 7, "to": 0}, {"new": 1}]``
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamadiff.ext.state.history import END, History, Kept
from llamadiff.system.errors import UserError
from llamadiff.trace.metadata import MAX_ID
from llamadiff.trace.stated import brief, read_json

MAX_BYTES, MOST, SEQUENCES = 1 << 22, 1000, 64
TOKENS = "tokens"


@dataclass(frozen=True)
class FileStep:
    """One step: its ``number`` in the list, 1 being the first, and its ``words``; of tokens, these, and their places.

    ``sequences``: of each token, the one that it is put at the end of; ``rows``: their numbers in the history.
    """

    number: int
    words: str
    tokens: tuple[int, ...] = ()
    sequences: tuple[int, ...] = ()
    rows: range = range(0)


def read_steps(path: Path) -> tuple[tuple[FileStep, ...], History]:
    """The steps of a file, and what they come to. Raises UserError for a file that is none, or asks what cannot be."""
    data = read_json(path, MAX_BYTES, "a list of steps (docs/candidates.md)")
    if not isinstance(data, list) or not 0 < len(data) <= MOST:
        raise UserError(f"{path}: is {brief(data)}; it must be a list of 1 to {MOST} steps (docs/candidates.md)")
    made = _Made()
    for number, said in enumerate(data, 1):
        try:
            made.add(number, said)
        except ValueError as error:
            raise UserError(f"{path}: step {number}, {brief(said)}: {error}") from None
    if not made.history.rows:
        raise UserError(f'{path}: no step has tokens; give one such as {{"tokens": [1, 403], "sequence": 0}}')
    return tuple(made.steps), made.history


class _Made:
    """Steps, one after the other. Raises ValueError for one that cannot be."""

    def __init__(self) -> None:
        self.history, self.steps, self.kept = History(), list[FileStep](), dict[int, Kept]()
        self._does: Mapping[str, tuple[str, Callable[[int, int], None]]] = {
            "new": ("", self._new), "fork": ("to", self._fork), "drop": ("sequence", self._drop),
            "keep": ("as", self._keep), "restore": ("to", self._restore),
        }  # fmt: skip

    def add(self, number: int, said: Any) -> None:
        if isinstance(said, dict) and TOKENS in said:
            self.steps.append(self._fed(number, said))
            return
        what = next((word for word in self._does if isinstance(said, dict) and word in said), None)
        if what is None:
            raise ValueError(f"expected an object with {TOKENS}, {', '.join(self._does)}")
        other, do = self._does[what]
        _only(said, {what, other} - {""})
        one = _whole(said, what)
        second = _whole(said, other) if other else 0
        do(one, second)
        self.steps.append(FileStep(number, f"{what} {one}" + (f" {other} {second}" if other else "")))

    def _fed(self, number: int, said: Mapping[str, Any]) -> FileStep:
        tokens = _list(said[TOKENS], TOKENS)
        if "sequences" in said:
            _only(said, {TOKENS, "sequences"})
            sequences = _list(said["sequences"], "sequences")
        else:
            _only(said, {TOKENS, "sequence"})
            sequences = [_whole(said, "sequence") if "sequence" in said else 0] * len(tokens)
        if not tokens or len(sequences) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens of {len(sequences)} sequences; give one or more, and each its own")
        for sequence in sequences:
            _check_sequence(sequence)
        first = len(self.history.rows)
        for token, sequence in zip(tokens, sequences, strict=True):
            self.history.decode([token], [self.history.end(sequence)], [sequence])
        whose = ", ".join(map(str, dict.fromkeys(sequences)))
        words = f"{len(tokens)} token{'s' * (len(tokens) > 1)} of sequence {whose}"
        return FileStep(number, words, tuple(tokens), tuple(sequences), range(first, len(self.history.rows)))

    def _new(self, sequence: int, _: int) -> None:
        _check_sequence(sequence)
        self.history.remove(sequence, 0, END)

    def _fork(self, source: int, target: int) -> None:
        self._check_full(source)
        _check_sequence(target)
        if source == target:
            raise ValueError("a sequence is forked to another one")
        self.history.copy(source, target, 0, END)

    def _drop(self, count: int, sequence: int) -> None:
        end = self.history.end(sequence) - count
        if count < 1 or end < 0:
            raise ValueError(f"sequence {sequence} has {self.history.end(sequence)} tokens; give 1 to as many")
        self.history.remove(sequence, end, END)

    def _keep(self, sequence: int, place: int) -> None:
        self._check_full(sequence)
        self.kept[place] = self.history.of(sequence)

    def _restore(self, place: int, sequence: int) -> None:
        _check_sequence(sequence)
        if place not in self.kept:
            raise ValueError(f"no step before kept a sequence as {place}")
        self.history.restore(self.kept[place], sequence)

    def _check_full(self, sequence: int) -> None:
        if not self.history.end(sequence):
            raise ValueError(f"sequence {sequence} has no tokens")


def _check_sequence(sequence: int) -> None:
    if sequence >= SEQUENCES:
        raise ValueError(f"sequence {sequence}: there are {SEQUENCES}, 0 to {SEQUENCES - 1}")


def _only(said: Mapping[str, Any], names: set[str]) -> None:
    if other := [name for name in said if name not in names]:
        raise ValueError(f"{brief(other[0])} says nothing here; it takes {', '.join(sorted(names))}")


def _whole(said: Mapping[str, Any], name: str) -> int:
    if name not in said:
        raise ValueError(f"{name} is missing")
    [number] = _list([said[name]], name)
    return number


def _list(values: Any, name: str) -> Sequence[int]:
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < MAX_ID for value in values):
        raise ValueError(f"{name}: expected whole numbers from 0")
    return values
