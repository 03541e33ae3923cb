"""The reference engine as a candidate: its run as a trace. With faulty maths, a candidate with a known bug."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from llamaref import Engine, Tap
from numpy.typing import NDArray

from llamadiff.trace.metadata import Info
from llamadiff.trace.reader import Trace

Array = NDArray[Any]


class Recorder(Tap):
    """Keeps what passes every tap."""

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}

    def __call__(self, name: str, x: Array) -> Array:
        self.arrays[name] = x[0].copy()
        return x

    def is_wanted(self, name: str) -> bool:
        return True


def record(
    engine: Engine,
    tokens: Sequence[int],
    name: str,
    positions: Sequence[int] = (),
    model: Mapping[str, Any] | None = None,
) -> Trace:
    """Run tokens through an engine and keep every tap, in memory."""
    recorder = Recorder()
    where = tuple(positions) or tuple(range(len(tokens)))
    engine.forward(tokens, where, tap=recorder)
    arrays = {
        tap: array.astype(np.float32) if array.dtype.kind == "f" else array for tap, array in recorder.arrays.items()
    }
    kinds = {tap: "F32" if array.dtype.kind == "f" else "I32" for tap, array in arrays.items()}
    info = Info(tuple(tokens), where, len(tokens), None, {"name": name}, dict(model or {}))
    return Trace(info, arrays, kinds)
