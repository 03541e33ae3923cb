"""One saved op, as it was run again: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llamadiff.judge.verdict import of_node


@dataclass(frozen=True)
class OpRun:
    """One op: what it is, how far ``device`` is off now, how far the run was that saved it, and the limit of both.

    ``line`` is the op as ggml's own tests read it. The device is furthest off at ``index``, where it gave ``found``.
    ``problem``: why that cannot be judged, if it cannot.
    """

    path: Path
    name: str
    op: str
    inputs: str
    device: str
    error: float
    recorded: float
    limit: float
    line: str = ""
    index: tuple[int, ...] = ()
    found: float = 0.0
    right: float = 0.0
    problem: str = ""

    @property
    def verdict(self) -> str:
        return of_node(None if self.problem else self.error, self.limit).verdict
