"""Which token ids a program took, by what it computes of their embeddings alone."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
from llamaref import Tap as EngineTap
from numpy.typing import NDArray

from llamadiff.engines.model_file import Runnable
from llamadiff.ext.record.search import Search

Array = NDArray[Any]
AT_ONCE = 1 << 11  # ids
MOST = 1 << 12  # ids that are looked for in earnest


def ids_taken(model: Runnable, search: Search, limit: float) -> list[int]:
    """The ids of which the first op's result lies in a program's memory, in the order in which they came there.

    Those that it has generated follow those of its prompt. Empty if it cannot be told: no op has the embedding alone
    for its input, or its results are not stored. ``limit``: the NMSE of a row that is there.
    """
    first = next((tap for tap in model.taps if [*model.inputs(tap)] == ["embd"]), None)
    vocabulary = model.weights.shape("token_embd.weight")[0] if first is not None else 0
    found, tried = list[tuple[int, int, int]](), 0
    for start in range(0, vocabulary, AT_ONCE):
        ids = np.arange(start, min(vocabulary, start + AT_ONCE))
        rows = _Result(first.name).of(model, ids) if first is not None else np.zeros((0, 0))
        for row in np.flatnonzero(search.may_be_there(rows)).tolist():
            tried += 1
            each = search.find_close(rows[row]) if tried <= MOST else None
            if each is not None and each.nmse <= limit:
                found.append((each.place.stop, each.place.address, int(ids[row])))
    return [token for _, _, token in sorted(found)]


class _EnoughError(Exception):
    """The tap has been computed."""


class _Result(EngineTap):
    """A llamaref.Tap that keeps one tap's values, and stops the engine there."""

    def __init__(self, name: str) -> None:
        self._name, self._values = name, np.zeros((0, 0), np.float32)

    def __call__(self, name: str, x: Array) -> Array:
        if name == self._name:
            self._values = x[0].reshape(x.shape[1], -1)
            raise _EnoughError
        return x

    def of(self, model: Runnable, ids: Array) -> Array:
        """The values [token, channel] of these ids."""
        step, x = model.engine.step(ids.tolist(), tap=self), None
        with suppress(_EnoughError), np.errstate(all="ignore"):
            for part in model.parts(ids.tolist()):
                x = part.run(x, step)
        return self._values
