"""Which tokens each step of a dump is of: by its ids where they were dumped, else by how many rows its tensors have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from numpy.typing import NDArray

from llamadiff.candidates.pieces import Unread
from llamadiff.ext.dumps.labels import Step
from llamadiff.system.errors import UserError

Array = NDArray[Any]
Parts = dict[str, dict[Step, dict[int, Unread]]]  # name -> step -> rank -> tensor


@dataclass(frozen=True)
class Steps:
    """The steps of one run, in order, and how many tokens each has; ``tokens`` of all, where they are known.

    ``others``: how many steps the dump has of other runs; ``has_ranks``: its names say which rank is whose.
    """

    names: tuple[Step, ...]
    rows: tuple[int, ...]
    tokens: tuple[int, ...] = ()
    others: int = 0
    has_ranks: bool = False

    @property
    def starts(self) -> tuple[int, ...]:
        return tuple(accumulate(self.rows, initial=0))[:-1]

    def within(self, where: str, tokens: Sequence[int]) -> Steps:
        """Those that ran these tokens. Raises UserError where none of them did."""
        whole, count = tuple(self.tokens), len(tokens)
        if self.rows == (0,) and not whole:
            return replace(self, rows=(count,), tokens=tuple(tokens))  # no tensor has rows that tell
        for first, last in self._spans(count):
            begin = sum(self.rows[:first])
            if not whole or whole[begin : begin + count] == tuple(tokens):
                left = len(self.names) - (last - first)
                names, rows = self.names[first:last], self.rows[first:last]
                return replace(self, names=names, rows=rows, tokens=tuple(tokens), others=self.others + left)
        ran = ", ".join(map(str, self.rows[:8])) + (", ..." if len(self.rows) > 8 else "")
        ids = f", with the ids {', '.join(map(str, whole[:8]))}{', ...' if len(whole) > 8 else ''}" if whole else ""
        raise UserError(
            f"{where}: its steps are of {ran} tokens{ids}, and {count} tokens from {tokens[0]} on were to be run; "
            "give those with --tokens, or leave out the prompt if the dump has input_ids"
        )

    def _spans(self, count: int) -> Iterator[tuple[int, int]]:
        """Steps in a row that have so many tokens together, the earliest first."""
        for first in range(len(self.rows)):
            for last, total in enumerate(accumulate(self.rows[first:]), first + 1):
                if total == count:
                    yield first, last


def rows_of(parts: Parts) -> Mapping[Step, int]:
    """How many tokens each step has: as many rows as most of its tensors."""
    found: dict[Step, Counter[int]] = {}
    for by_step in parts.values():
        for step, by_rank in by_step.items():
            count = found.setdefault(step, Counter())
            shape = next(iter(by_rank.values())).shape
            if shape is not None and len(shape) > 1:
                count[shape[1] if shape[0] == 1 and len(shape) > 2 else shape[0]] += 1
    return {step: count.most_common(1)[0][0] if count else 0 for step, count in found.items()}


def request_of(ids: Mapping[Step, Array], positions: Mapping[Step, Array], rows: Mapping[Step, int]) -> Steps:
    """The steps of the longest run in a dump: engines warm up, and serve more than one request."""
    names = sorted(ids.keys() | rows.keys())
    sizes = {step: int(ids[step].size) if step in ids else rows[step] for step in names}
    names = [step for step in names if sizes[step] or len(names) == 1]
    runs: list[list[Step]] = []
    for step in names:
        begins = step in positions and positions[step].size and int(positions[step][0]) == 0
        decoded = bool(runs) and sizes[runs[-1][-1]] == 1
        if not runs or begins or (step not in positions and decoded and sizes[step] > 1):
            runs.append([])
        runs[-1].append(step)
    if not runs:
        return Steps((), ())
    run = max(reversed(runs), key=lambda some: sum(sizes[step] for step in some)) if ids else names
    tokens = tuple(int(each) for step in run for each in ids[step]) if all(step in ids for step in run) else ()
    return Steps(tuple(run), tuple(sizes[step] for step in run), tokens, len(names) - len(run))
