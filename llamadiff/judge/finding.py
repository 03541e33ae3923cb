"""What was found out about one tap: plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llamadiff.judge.fact import Fact
from llamadiff.judge.measurement import TapMeasurement
from llamadiff.judge.verdict import Reason
from llamadiff.numerics import metrics
from llamadiff.trace import taps


@dataclass(frozen=True)
class Local:
    """A recorded tap against what the engine computes from the same trace's inputs.

    ``arithmetic`` is the one that fits (None where none does). ``expected`` and ``recorded`` are the two values
    at ``index``, where they differ most. ``span`` names the unrecorded taps this one answers for as well. ``least`` is
    the smallest NMSE that an arithmetic leaves, if it has one error for all rows; ``hides`` the largest that would be
    taken for rounding, ``hides_row`` that of one row, ``hides_value`` the largest
    |error| / rms of one value. ``unclear``: unchecked, since an unknown rounding in the span may err as much;
    ``exact``: other taps show that nothing in the span is rounded. ``reasons`` are the verdict's, in their order.
    ``not_finite`` values were recorded where finite ones are right; ``opened`` values could not be judged, since no
    finite ones are right there on these inputs, in the rows of ``open_tokens``: errors are over the others, NaN where
    there are none. ``sketched``: verified without computing it all: errors are estimates, and no value is named.
    """

    nmse: float
    arithmetic: str | None
    limit: float
    noise_limit: float
    verdict: str
    token: int | None = None
    index: tuple[int, ...] = ()
    expected: float = math.nan
    recorded: float = math.nan
    per_token: tuple[float, ...] = ()
    span: tuple[str, ...] = ()
    facts: tuple[Fact, ...] = ()
    least: float = 0.0
    hides: float = 0.0
    hides_row: float = 0.0
    hides_value: float = 0.0
    unclear: bool = False
    exact: bool = False
    not_finite: int = 0
    opened: int = 0
    open_tokens: tuple[int, ...] = ()
    sketched: bool = False
    reasons: tuple[Reason, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Finding:
    """All that a pass found out about one tap; without a free run, nothing of that. ``local``: once it is judged."""

    tap: taps.Tap
    shape: tuple[int, ...]
    measured: Mapping[str, TapMeasurement]  # by source
    local: Mapping[str, Local] = field(default_factory=dict)  # by source
    stats: Mapping[str, metrics.Stats]  # by source, and "engine" for the free run
    drift: metrics.Difference | None  # candidate (or the free run) against the baseline
    noise: float | None  # what the baseline's arithmetic alone does to a free run
    at: Mapping[str, Mapping[str, float]]  # by source: every side's value where that source's local error is largest
    fitting: Mapping[str, Sequence[frozenset[str]]]  # by source: the policies that fit, for each phase
    distance: Mapping[str, float]  # by source: NMSE against the free run, which computes in float32 throughout
    sums: frozenset[str] = frozenset()  # the ways to add float16's numbers in it that the candidate's values allow
    stated: Tried = field(default_factory=dict)  # the statistics that the candidate states
    closeups: Mapping[str, object] = field(default_factory=dict)  # by source, where pictures are wanted


@dataclass(frozen=True)
class StatedStatistic:
    """One statistic: what was stated, llama.cpp's, the engine's, and between which values it is right."""

    name: str
    stated: float
    baseline: float
    engine: float
    low: float
    high: float

    @property
    def is_near(self) -> bool:
        return self.low <= self.stated <= self.high


Tried = Mapping[str, Sequence[StatedStatistic]]  # over which rows -> the statistics
