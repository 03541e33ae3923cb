"""What was measured of one tap, before anybody says what it means: plain numbers, and none of another tap's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llamadiff.judge.pattern.deviation import Fact

# Allowances that a tap is held to, besides one for each policy: what shaken values show alone; and the ways in which
# one arithmetic may be done, where nothing shows which.
SURE, VARIANTS = "sure", "variants"


@dataclass(frozen=True)
class Held:
    """Whether an allowance explains an error; and the largest one that would still be taken for rounding: of the whole
    tensor and of a row as NMSE, of a value as |error| / rms.
    """

    fits: bool
    whole: float
    row: float
    value: float


@dataclass(frozen=True)
class Rough:
    """What rounding in some unknown way might leave of a span: NMSE, by what would be rounded; and what to hold to it.

    ``kept``: what the tap's own precision leaves. ``plain``: the error under float32, ``nearest`` under the arithmetic
    that fits best; ``certain``: some row has that one to the last bit.
    """

    products: float = 0.0
    caches: float = 0.0
    attention: float = 0.0
    values: float = 0.0
    kept: float = 0.0
    plain: float = 0.0
    nearest: float = 0.0
    certain: bool = False


@dataclass(frozen=True)
class Printed:
    """Of a tap that was read from a log: the NMSE that its printed digits leave, and whether a few values of a row are
    further off than those of any rounding: of any at all, or of those that an engine may have of which some are known.
    """

    slack: float
    far: bool
    far_from_known: bool


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A tap against what the engine computes from the same trace's inputs, under the arithmetic that fits best.

    ``label`` is what that rounds to; ``limit`` the NMSE that right arithmetic has; ``even``: no value, row or whole is
    beyond it. ``held``: the allowances that were tried, by SURE, VARIANTS or a policy; ``apart``: by policy, the NMSE
    by which it differs from the one that rounds least. ``seen``: policies that the tap shows; ``unseen``: those that it
    refutes; others were not tried, or cannot be told. ``followed``: how far a span's errors go with those of each
    policy's rounding, in standard deviations of chance. ``labels``: what each kind of operand is rounded to if the tap
    is right, as far as it tells, in ``rows`` that differ. ``kinds``: what its ops multiply by, or are; ``product``: the
    first, of a product alone. ``blind``: it rounds to eight bits, and nobody knows how. ``own``: llama.cpp's. The other
    fields are those of a Local.
    """

    nmse: float
    per_token: tuple[float, ...]
    label: str
    limit: float
    even: bool
    held: Mapping[str, Held]
    least: float = 0.0
    apart: Mapping[str, float] = field(default_factory=dict)
    seen: frozenset[str] = frozenset()
    unseen: frozenset[str] = frozenset()
    followed: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    rows: int = 0
    kinds: frozenset[str] = frozenset()
    product: str | None = None
    rough: Rough = Rough()
    printed: Printed | None = None
    blind: bool = False
    own: bool = False
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
        return self.even or (self.nmse <= self.limit and self.held[SURE].fits)


Fitting = Sequence[frozenset[str]]  # the policies that fit, for each phase
