"""Several mistakes at once: the change that gives the most texts, then the one that does of those that are left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from llamadiff.ext.prompt.templates.changes import Change, together

MOST = 3  # mistakes
FEW, SAMPLE = 12, 48  # conversations of each kind on which a change is tried first; of those that are left
LEAST = 0.05  # of the conversations that part: a change that gives fewer is no mistake of its own
ENOUGH = 0.5  # of them: what gives fewer explains nothing
Text = Callable[[Change, Mapping[str, Any]], str | None]


@dataclass(frozen=True)
class Cases:
    """Conversations with the texts that are wanted, of which the first ``parted`` are not the template's.

    ``text``: what a change makes of one. ``is_over``: no more is tried.
    """

    conversations: Sequence[Mapping[str, Any]]
    wanted: Sequence[str | None]
    parted: int
    text: Text
    is_over: Callable[[], bool]

    def holds(self, change: Change, numbers: Sequence[int]) -> list[int]:
        """Those of some conversations of which a change gives the text."""
        return [n for n in numbers if self.text(change, self.conversations[n]) == self.wanted[n]]

    @property
    def few_right(self) -> list[int]:
        return spread(range(self.parted, len(self.conversations)), FEW)

    @property
    def few_parted(self) -> list[int]:
        return spread(range(self.parted), FEW)


def spread(numbers: Sequence[int], count: int) -> list[int]:
    """So many of them, from all over."""
    return [*numbers[:: max(1, len(numbers) // count)]][:count]


def several(cases: Cases, changes: Sequence[Change]) -> tuple[list[Change], list[int]]:
    """The mistakes, those that explain most first, and the conversations that they leave; none where nothing does."""
    taken, held = _one_by_one(cases, changes)
    if not taken:
        taken = next(_pairs(cases, changes), [])
        held = cases.holds(together(*taken), range(cases.parted)) if taken else []
    left = [n for n in range(cases.parted) if n not in set(held)]
    right = range(cases.parted, len(cases.conversations))
    if not taken or len(held) < ENOUGH * cases.parted or len(cases.holds(together(*taken), right)) < len(right):
        return [], []
    return sorted(taken, key=lambda each: -_needing(cases, taken, each, held)), left


def _one_by_one(cases: Cases, changes: Sequence[Change]) -> tuple[list[Change], list[int]]:
    """The change that gives the most texts, then the one beside it that gives the most of those that are left."""
    taken, held = list[Change](), list[int]()
    while len(taken) < MOST and len(held) < cases.parted:
        left = [n for n in range(cases.parted) if n not in set(held)]
        kept = [*cases.few_right, *spread(held, FEW)]
        best = max(changes, key=lambda change: _given(cases, [*taken, change], spread(left, SAMPLE), kept))
        every = cases.holds(together(*taken, best), range(cases.parted))
        if len(every) - len(held) < max(1.0, min(LEAST * cases.parted, ENOUGH * len(left))):
            break
        held = every
        taken.append(best)
    return taken, held


def _given(cases: Cases, changes: Sequence[Change], left: Sequence[int], kept: Sequence[int]) -> int:
    """Of how many conversations that are left some changes give the text; -1 where they take it from others."""
    change = together(*changes)
    if cases.is_over() or len(cases.holds(change, kept)) < len(kept):
        return -1
    return len(cases.holds(change, left))


def _pairs(cases: Cases, changes: Sequence[Change]) -> Iterator[list[Change]]:
    """Two changes that only together give the text of any."""
    few, right = cases.few_parted, cases.few_right
    usual = {n: cases.text(together(), cases.conversations[n]) for n in few}
    telling = [c for c in changes if any(cases.text(c, cases.conversations[n]) != usual[n] for n in few)]
    for pair in combinations(telling, 2):
        if cases.is_over():
            return
        change = together(*pair)
        if cases.holds(change, few[:1]) and len(cases.holds(change, [*few, *right])) == len(few) + len(right):
            yield [*pair]


def _needing(cases: Cases, taken: Sequence[Change], change: Change, held: Sequence[int]) -> int:
    """How many texts are not given without a change."""
    others = together(*(each for each in taken if each is not change))
    return len(held) - len(cases.holds(others, held))
