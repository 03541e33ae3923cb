"""How much of a run was judged: a part that does not reach the logits says nothing of what comes after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.judge.verdict import UNCHECKED
from llamadiff.trace.taps import LOGITS

if TYPE_CHECKING:
    from llamadiff.result.rows import Row
    from llamadiff.trace.reader import Trace

NEAR = 0.75  # of difflib's ratio
FEW = 3


@dataclass(frozen=True)
class Ignored:
    """Tensors whose names stand for nothing: how many, and the first few, each with the tap that it may be meant as."""

    count: int
    first: tuple[tuple[str, str | None], ...]


@dataclass(frozen=True)
class Coverage:
    """How many taps were judged, of how many; whether ``end``, the tap of the logits, was recorded (``reached``).

    ``asked``: the user asked for less than all of them.
    """

    judged: int
    taps: int
    end: str
    reached: bool
    asked: bool
    ignored: Ignored = Ignored(0, ())

    @property
    def is_enough(self) -> bool:
        return self.reached or self.asked


def coverage_of(
    rows: Sequence[Row], missing: Sequence[str], trace: Trace, names: Sequence[str], extra: Sequence[str], asked: bool
) -> Coverage:
    """What was judged of a trace; ``names`` are all taps that it could have, in order, ``extra`` names of no tap."""
    end = LOGITS if LOGITS in names or not names else names[-1]
    reached = any(row.tap == end for row in rows) and _has_last_row(trace.known.get(end))
    judged = sum(row.verdict != UNCHECKED for row in rows)
    return Coverage(judged, len(rows) + len(missing), end, reached, asked or asked_for_less(trace.info.producer),
                    _find_ignored(extra, [name for name in names if name not in trace]))  # fmt: skip


def asked_for_less(producer: Mapping[str, Any]) -> bool:
    """Whether a trace says that not all taps were wanted of it."""
    return isinstance(producer.get("asked"), Mapping) and bool(producer["asked"])


def _has_last_row(known: NDArray[Any] | None) -> bool:
    """Whether a tap has a value of the last token."""
    return known is None or bool(np.asarray(known)[-1].any())


def _find_ignored(extra: Sequence[str], absent: Sequence[str]) -> Ignored:
    lower = {name.lower(): name for name in absent}
    near = [(name, get_close_matches(name.lower(), lower, 1, NEAR)) for name in extra[:FEW]]
    return Ignored(len(extra), tuple((name, lower[match[0]] if match else None) for name, match in near))
