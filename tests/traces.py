"""Traces as several tests need them: changed, cut, of mixed arithmetic, written to a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llamadiff.numerics.rounding_tap import Carrier
from llamadiff.trace.reader import Trace
from llamadiff.trace.writer import TraceWriter

TOKENS = (1, 17, 5, 80)


def save(trace: Trace, path: Path) -> Path:
    """Write a trace to a file; its folder is made."""
    path.parent.mkdir(exist_ok=True)
    with TraceWriter(path) as writer:
        for name in trace:
            writer.add(name, trace[name])
        writer.finish(trace.info)
    return path


def changed(trace: Trace, **arrays) -> Trace:
    """A copy of a trace with some taps replaced; None removes one. Names with _ for -."""
    new = {name: arrays.get(name.replace("-", "_"), trace[name]) for name in trace}
    kept = {name: np.asarray(array) for name, array in new.items() if array is not None}
    return Trace(trace.info, kept, dict.fromkeys(kept, "F32"))


def only(trace: Trace, *patterns: str) -> Trace:
    """A copy of a trace with the taps alone whose names begin so."""
    kept = {name: trace[name] for name in trace if name.startswith(patterns)}
    return Trace(trace.info, kept, dict.fromkeys(kept, "F32"))


class Mixed(Carrier):
    """Records a run whose arithmetic differs from layer to layer."""

    def __init__(self, policies: Sequence[str]) -> None:
        self.policies, self.arrays, self.layer = policies, dict[str, Any](), 0
        super().__init__([(policies[0], {})])

    def __call__(self, name: str, x: Any) -> Any:
        self.arrays[name] = x[0].copy()
        if name.startswith("l_out-"):
            self.layer += 1
            super().__init__([(self.policies[min(self.layer, len(self.policies) - 1)], {})])
        return x
