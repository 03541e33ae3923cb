"""The free run beside a replay: what its lanes compute is there for whoever judges the same tap."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.judge.in_step import EndedError
from llamadiff.judge.lanes import Lane, Source
from llamadiff.numerics.rounding_tap import RoundedOnce

Array = NDArray[Any]


class FreeRun(RoundedOnce):
    """A llamaref.Tap: carries lanes without a source through a pass, and keeps what they compute until it is judged."""

    def __init__(self, lanes: Sequence[Lane], baseline: Source, keep: Callable[[str, Array], None]) -> None:
        """``keep(name, x)`` receives what the first lane computes."""
        super().__init__([(lane.policy, lane.stored(baseline)) for lane in lanes])
        self.lanes, self.keep = tuple(lanes), keep
        self._computed: dict[str, Future[Array]] = {}
        self._ended = False

    def run(self, engine: Any, tokens: Sequence[int], positions: Sequence[int]) -> Array:
        """The engine's pass over the tokens -> the first lane's logits."""
        try:
            return np.asarray(engine.forward(tokens, positions, tap=self)[0])
        finally:
            self._ended = True
            for computed in [*self._computed.values()]:
                if not computed.done():
                    computed.set_exception(EndedError())

    def __call__(self, name: str, x: Array) -> Array:
        if x.shape[0] != len(self.lanes):
            x = np.broadcast_to(x, (len(self.lanes), *x.shape[1:]))
        self.keep(name, x[0])
        self._at(name).set_result(x)
        return x

    def at(self, name: str) -> Array:
        """What the lanes compute at a tap, [lane, ...]: as soon as they have. Raises EndedError if they never will."""
        computed = self._at(name)
        if self._ended and not computed.done():
            raise EndedError
        return computed.result()

    def forget(self, names: Iterable[str]) -> None:
        """Let go of taps that are judged."""
        for name in names:
            self._computed.pop(name, None)

    def _at(self, name: str) -> Future[Array]:
        return self._computed.get(name) or self._computed.setdefault(name, Future())
