"""What was found of a model's weights: a row for each tensor, findings with reasons, one verdict, one sentence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from llamaref import Weights

from llamadiff.ext.file.distance import Distance
from llamadiff.ext.file.statistics import TensorStats
from llamadiff.judge.verdict import MATCH, NOISE, UNCHECKED, of_check, of_tensors
from llamadiff.result.oddity import Oddity

NAMED = 3  # findings that the sentence tells


@dataclass(frozen=True)
class TensorRow:
    """One tensor of the file: what it holds, and where there is another side, how far it is from that.

    ``decoders`` says how gguf-py's and ggml's decoding compare. ``made`` says what of the other side it was compared
    with, ``cost`` is the NMSE that the types ``priced`` leave on such values, ``verdict`` is that of the comparison.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    n_bytes: int
    stats: TensorStats | None = None
    decoders: str = ""
    made: str = ""
    distance: Distance | None = None
    cost: float | None = None
    priced: str = ""
    verdict: str = ""

    @classmethod
    def of(cls, weights: Weights, name: str, is_known: bool = True) -> TensorRow:
        """What the file says of a tensor; ``is_known``: how its type is decoded, or what it is to be compared with."""
        kind, size = weights.type(name), weights.read_raw(name).nbytes
        return cls(name, kind, weights.shape(name), size, verdict=of_check(False, is_known))


@dataclass(frozen=True)
class WeightReport:
    """All that was found. ``notes`` are facts and no faults; ``unchecked`` says what could not be looked at."""

    model: dict[str, Any]
    other: str | None
    rows: tuple[TensorRow, ...]
    oddities: tuple[Oddity, ...] = ()
    notes: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    timing: dict[str, float] = field(default_factory=dict)

    @property
    def findings(self) -> tuple[Oddity, ...]:
        """What is wrong."""
        return tuple(oddity for oddity in self.oddities if oddity.certain)

    @property
    def suspicions(self) -> tuple[Oddity, ...]:
        """What looks odd and may be right."""
        return tuple(oddity for oddity in self.oddities if not oddity.certain)

    @property
    def verdict(self) -> str:
        """WRONG with a finding, UNCHECKED where a tensor could not be looked at, NOISE for honest quantization."""
        return of_tensors([row.verdict for row in self.rows], self.findings)

    @property
    def summary(self) -> str:
        """One sentence."""
        if self.findings:
            told = "; ".join(f"{finding.where}: {finding.says}" for finding in self.findings[:NAMED])
            more = len(self.findings) - NAMED
            return told + (f" (and {more} more findings)" if more > 0 else "")
        if self.other is not None and all(row.verdict == UNCHECKED for row in self.rows):
            return f"none of {len(self.rows)} tensors could be compared; nothing else that was compared differs"
        return self._right() + self._left()

    def _right(self) -> str:
        count = len(self.rows)
        tensors = f"{count} tensor{'s' if count != 1 else ''}"
        if self.other is None:
            return f"{tensors}: nothing wrong" + (f", {len(self.suspicions)} suspicious" if self.suspicions else "")
        same = sum(row.verdict == MATCH for row in self.rows)
        if same == count:
            return f"all {tensors} are equal"
        worst = max((row for row in self.rows if row.verdict == NOISE), key=_above_cost, default=None)
        if worst is None:
            return f"{same} of {tensors} are equal"
        ratio = (
            f"{_above_cost(worst):.2f} times the cost of {worst.priced}" if worst.cost else f"stored as {worst.type}"
        )
        return f"{same} of {tensors} are equal, the others as far as their types explain (most: {worst.name}, {ratio})"

    def _left(self) -> str:
        left = [row.name for row in self.rows if row.verdict == UNCHECKED]
        return f"; {len(left)} could not be compared, the first is {left[0]}" if left else ""


def _above_cost(row: TensorRow) -> float:
    return row.distance.nmse / row.cost if row.distance is not None and row.cost else 0.0
