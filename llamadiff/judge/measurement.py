"""What was measured of one tap, before anybody says what it means: plain numbers, and none of another tap's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from llamadiff.judge.fact import Fact
from llamadiff.numerics import metrics

Array = NDArray[Any]

# Allowances that a tap is held to, besides one for each policy: what perturbed values show alone; and the ways in which
# one arithmetic may be done, where nothing shows which.
SURE, VARIANTS = "sure", "variants"


@dataclass(frozen=True)
class AllowedError:
    """Whether an allowance explains an error; and the largest one that would still be taken for rounding: of the whole
    tensor and of a row as NMSE, of a value as |error| / rms.
    """

    fits: bool
    whole: float
    row: float
    value: float


@dataclass(frozen=True)
class UnknownRounding:
    """What rounding in some unknown way might leave of a span: NMSE, by what would be rounded; and what to hold to it.

    ``kept``: what the tap's own precision leaves. ``plain``: the error under float32, ``nearest`` under the arithmetic
    that fits best.
    """

    products: float = 0.0
    caches: float = 0.0
    attention: float = 0.0
    values: float = 0.0
    kept: float = 0.0
    plain: float = 0.0
    nearest: float = 0.0


@dataclass(frozen=True)
class Printed:
    """Of a tap that was read from a log: the NMSE that its printed digits leave, and whether a few values of a row are
    further off than those of any rounding: of any at all, or of those that an engine may have of which some are known.
    """

    slack: float
    far: bool
    far_from_known: bool


@dataclass(frozen=True, kw_only=True)
class TapEvidence:
    """What one tap tells of its engine's arithmetic.

    ``kinds``: what its ops multiply by, or are; ``product``: the first, of a product alone. ``seen``: policies that the
    tap shows; ``unseen``: those that it refutes; others were not tried, or cannot be told. ``labels``: what each kind
    is rounded to if the tap is right, as far as it tells, in so many ``distinct_rows``. ``rounding_correlation``: how
    far a span's errors go with those of each policy's rounding, in standard deviations of chance.
    """

    kinds: frozenset[str] = frozenset()
    product: str | None = None
    seen: frozenset[str] = frozenset()
    unseen: frozenset[str] = frozenset()
    labels: Mapping[str, str] = field(default_factory=dict)
    distinct_rows: int = 0
    rounding_correlation: Mapping[str, float] = field(default_factory=dict)


UNKNOWN_Q8 = "how its eight bits are rounded to is not known"
UNKNOWN_SUMS = "how its CPU adds float16's numbers is not known"


@dataclass(frozen=True, kw_only=True)
class TapMeasurement:
    """A tap against what the engine computes from the same trace's inputs, under the arithmetic that fits best.

    ``label`` is what that rounds to; ``limit`` the NMSE that right arithmetic has; ``is_even``: no value, row or whole
    is beyond it. ``allowances``: those that were tried, by SURE, VARIANTS or a policy; ``policy_distances``: by policy,
    the NMSE by which it differs from the one that rounds least. ``unknown``: what nobody knows
    of how it is computed (UNKNOWN_Q8, UNKNOWN_SUMS), if there is such. The other fields are those of a Local.
    """

    nmse: float
    per_token: tuple[float, ...]
    label: str
    limit: float
    is_even: bool
    allowances: Mapping[str, AllowedError]
    evidence: TapEvidence = TapEvidence()
    least: float = 0.0
    policy_distances: Mapping[str, float] = field(default_factory=dict)
    unknown_rounding: UnknownRounding = UnknownRounding()
    printed: Printed | None = None
    unknown: str = ""
    span: tuple[str, ...] = ()
    token: int | None = None
    index: tuple[int, ...] = ()
    expected: float = float("nan")
    recorded: float = float("nan")
    facts: tuple[Fact, ...] = ()
    not_finite: int = 0
    opened: int = 0
    open_tokens: tuple[int, ...] = ()
    sketched: bool = False

    @property
    def is_match(self) -> bool:
        """Whether it matches, whatever other taps show."""
        return matches(self.is_even, self.nmse, self.limit, self.allowances)


def matches(is_even: bool, nmse: float, limit: float, allowances: Mapping[str, AllowedError]) -> bool:
    """Whether an error is a match's in every part, or as a whole where the surest allowance explains its parts."""
    return is_even or (nmse <= limit and allowances[SURE].fits)


@dataclass(frozen=True)
class Sketched:
    """A product of one source that clearly is a match.

    ``policies``: of each phase that has rows, the one that fits best; ``rows``: their sums of squared errors, as
    estimated, and by policy in ``errors``; ``sizes``: the rows' own squares; ``nmse`` of all.
    """

    policies: Sequence[str]
    errors: Mapping[str, Array]
    rows: Array
    sizes: Array
    nmse: float

    @property
    def per_row(self) -> tuple[float, ...]:
        """The NMSE of each row."""
        return metrics.ratios(self.rows, self.sizes)

    def fitting_policies(self, match: float, phases: Sequence[slice]) -> tuple[frozenset[str], ...]:
        """The policies that fit, in each phase that has rows."""
        return tuple(
            frozenset(
                name for name, rows in self.errors.items() if rows[phase].sum() <= match * self.sizes[phase].sum()
            )
            for phase in phases
            if len(self.sizes[phase])
        )
