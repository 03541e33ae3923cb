"""Steps of which a number is another: the number is searched for, by what it leaves of a dump."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamadiff.ext.preprocess.changes import Change, merged

Request = Mapping[str, Any]
Left = Callable[[Change], float]  # what a change leaves of a dump, rms
GOLDEN = (5**0.5 - 1) / 2
STEPS = 18  # of a golden section: to a 6,000th of where it begins
BETTER = 0.97  # of what nothing leaves, what a number must come below to be looked at
WHOLES = 2  # of a whole number, the places that are looked at: one that is a little off may be no better than any
TURNS = 2  # of two numbers, which are searched for one beside the other
DIGITS = (1, 2, 3, 4)


@dataclass(frozen=True)
class Dial:
    """``tries``: where the search begins, in order; ``whole``: a whole number. ``at``: what says and request are given
    the number as."""

    step: str
    says: Callable[[float], str]
    request: Callable[[float], Request]
    tries: Sequence[float]
    whole: bool = False

    def change(self, number: float) -> Change:
        """The step with a number."""
        return Change(self.step, self.says(number), self.request(number))


def turned(dials: Sequence[Dial], left: Left, nothing: float, most: int) -> Iterator[tuple[Dial, Change]]:
    """Of each of some dials the change that leaves least, the nearest first; ``most`` of them are looked at closely."""
    found = list[tuple[float, int, Dial, float]]()
    for place, dial in enumerate(dials):
        best = sorted((left(dial.change(each)), each) for each in dial.tries)[: WHOLES if dial.whole else 1]
        found += [(error, place, dial, number) for error, number in best if error < BETTER * nothing]
    for error, _, dial, number in sorted(found, key=lambda each: each[:2])[:most]:
        yield dial, dial.change(_closer(dial, number, error, left))


def in_turn(dial: Dial, change: Change, dials: Sequence[Dial], left: Left) -> tuple[Change, Change] | None:
    """Two steps with a number, one of which is known about: each number is searched for beside the other's."""
    others = [each for each in dials if each is not dial]
    found = next(turned(others, lambda each: left(with_both(change, each)), left(change), 1), None)
    if found is None:
        return None
    other, second = found
    for _ in range(TURNS):
        change = next((each for _, each in turned([dial], _beside(second, left), np.inf, 1)), change)
        second = next((each for _, each in turned([other], _beside(change, left), np.inf, 1)), second)
    return change, second


def _beside(change: Change, left: Left) -> Left:
    return lambda each: left(with_both(change, each))


def with_both(first: Change, second: Change) -> Change:
    """Two changes as one."""
    return Change(second.step, second.says, merged(first.request, second.request))


def _closer(dial: Dial, number: float, error: float, left: Left) -> float:
    """The number near one that leaves least, in as few digits as leave no more."""
    tries, place = sorted(dial.tries), sorted(dial.tries).index(number)
    low, high = tries[max(place - 1, 0)], tries[min(place + 1, len(tries) - 1)]
    if low == high:
        return number

    def of(each: float) -> float:
        return left(dial.change(each))

    best = _whole(of, low, number, high, error) if dial.whole else _section(of, low, high, number, error)
    if dial.whole:
        return best
    least = of(best)
    for digits in DIGITS:
        rounded = float(f"{best:.{digits}g}")
        if low <= rounded <= high and of(rounded) <= least * 1.02 + 1e-9:
            return rounded
    return best


def _section(of: Callable[[float], float], low: float, high: float, number: float, error: float) -> float:
    """A golden section."""
    a, b = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_a, at_b = of(a), of(b)
    best = min((error, number), (at_a, a), (at_b, b))
    for _ in range(STEPS):
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - GOLDEN * (high - low)
            at_a = of(a)
            best = min(best, (at_a, a))
        else:
            low, a, at_a = a, b, at_b
            b = low + GOLDEN * (high - low)
            at_b = of(b)
            best = min(best, (at_b, b))
    return best[1]


def _whole(of: Callable[[float], float], low: float, number: float, high: float, error: float) -> float:
    """Whole numbers, nearer and nearer: what is best of a dozen, then of those between its neighbours."""
    while high - low > 2:
        tries = np.unique(np.rint(np.linspace(low, high, 13)))
        found = {float(each): of(float(each)) for each in tries if each != number}
        found[number] = error
        number = min(found, key=lambda each: (found[each], each))
        error = found[number]
        nearer = sorted(found)
        place = nearer.index(number)
        low, high = nearer[max(place - 1, 0)], nearer[min(place + 1, len(nearer) - 1)]
    return number
