"""Two passes of the engine in step: a weight by which both multiply is decoded once.

Each pass runs in a thread of its own and sees the file's weights as a Side. At a weight where the other has not been
yet a side waits for it; what the other has done already, or does not need, it multiplies alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from functools import partial
from threading import Condition
from typing import Any, NamedTuple, TypeVar

import numpy as np
from llamaref.weights import Decode, Factor, Weights
from numpy.typing import NDArray

Array = NDArray[Any]
Here = TypeVar("Here")
Beside = TypeVar("Beside")


class _Spot(NamedTuple):
    """Where a pass is: at a tensor, and an expert of it (None: there are none)."""

    name: str
    expert: int | None

    def precedes(self, other: _Spot) -> bool:
        """Whether it is a smaller expert of the same tensor: these come in their order, and each pass has its own."""
        return self.name == other.name and (self.expert or 0) < (other.expert or 0)


class _Wait(NamedTuple):
    """A side that waits: ``products`` gets its products, or None if it is to multiply alone."""

    place: _Spot
    factors: Sequence[Factor]
    products: Future[list[Array] | None]


class EndedError(Exception):
    """The other pass failed, and there is no use in going on."""


class _Meeting:
    """Where the two sides of a file's weights, 0 and 1, wait for each other: one of them at most."""

    def __init__(self) -> None:
        self._turn = Condition()
        self._waits: list[_Wait | None] = [None, None]
        self._been: tuple[set[_Spot], set[_Spot]] = set(), set()
        self._gone = [False, False]
        self._failed = False

    def come(self, side: int, place: _Spot, factors: Sequence[Factor]) -> tuple[_Wait | None, _Wait | None]:
        """A side comes to a place -> the other, if that waits there for it; or else its own wait, if it is to wait."""
        with self._turn:
            if self._failed:
                raise EndedError
            other = self._waits[1 - side]
            self._been[side].add(place)
            if other is not None and other.place == place:
                self._waits[1 - side] = None
                return other, None
            passed = self._gone[1 - side] or place in self._been[1 - side]
            if passed or (other is not None and place.precedes(other.place)):
                return None, None
            self._release(1 - side)  # it waits where this side will not come
            self._waits[side] = _Wait(place, factors, Future())
            return None, self._waits[side]

    def leave(self, side: int, failed: bool) -> None:
        """A side has ended: nobody waits for it."""
        with self._turn:
            self._gone[side] = True
            self._failed = self._failed or failed
            self._release(1 - side)

    def _release(self, side: int) -> None:
        wait, self._waits[side] = self._waits[side], None
        if wait is not None:
            wait.products.set_result(None)


class Side(Weights):
    """A file's weights, as one of two passes sees them."""

    def __init__(self, weights: Weights, meeting: _Meeting, number: int) -> None:
        self.__dict__.update(vars(weights))
        self._weights, self._meeting, self._number = weights, meeting, number

    def products(
        self,
        name: str,
        factors: Sequence[Factor],
        *,
        expert: int | None = None,
        rows: Any = slice(None),
        decode: Decode | None = None,
        joined: bool = False,
    ) -> list[Array]:
        """As ``Weights.products``, together with the other side's where it is at the same place."""
        alone = partial(self._weights.products, name, expert=expert, rows=rows, decode=decode, joined=joined)
        if decode is not None or rows != slice(None):
            return alone(factors)
        other, own = self._meeting.come(self._number, _Spot(name, expert), factors)
        if own is not None:
            found = own.products.result()
            return alone(factors) if found is None else found
        if other is None:
            return alone(factors)
        try:
            mine, others = self._both(alone, factors, other.factors, expert)
        except BaseException as error:
            other.products.set_exception(error)
            raise
        other.products.set_result(others)
        return mine

    def _both(
        self,
        alone: Callable[..., list[Array]],
        mine: Sequence[Factor],
        others: Sequence[Factor],
        expert: int | None,
    ) -> tuple[list[Array], list[Array]]:
        """What both sides have, multiplied, in the order of the sides.

        A side that gathers something has few rows, of which any last digits do: it is joined. Experts are not: whether
        sides meet there depends on which comes first, and last digits must not.
        """
        first = self._number == 0
        every = [*mine, *others] if first else [*others, *mine]
        gathers = sum(factor.across is not None for factor in every) == 1
        found = alone(every, joined=expert is None and gathers)
        if first:
            return found[: len(mine)], found[len(mine) :]
        return found[len(others) :], found[: len(others)]

    def leave(self, failed: bool) -> None:
        """This side's pass has ended."""
        self._meeting.leave(self._number, failed)


def in_step(engine: Any, here: Callable[[Any], Here], beside: Callable[[Any], Beside]) -> tuple[Here, Beside]:
    """What two passes of an engine give, the second in another thread; where one fails, its error is raised."""
    meeting = _Meeting()
    engines = [copy(engine), copy(engine)]
    for number, each in enumerate(engines):
        each.w = Side(engine.w, meeting, number)
    with ThreadPoolExecutor(1, initializer=partial(np.seterr, all="ignore")) as thread:
        second = thread.submit(_ran, beside, engines[1])
        try:
            first = _ran(here, engines[0])
        except EndedError:
            second.result()  # raises what it was
            raise
        return first, second.result()


def _ran(run: Callable[[Any], Here], engine: Any) -> Here:
    """A pass, whose side is left however it ends."""
    failed = True
    try:
        found = run(engine)
        failed = False
    finally:
        engine.w.leave(failed)
    return found
