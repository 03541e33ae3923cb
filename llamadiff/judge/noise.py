"""How large a tap's rounding noise can be, measured by its source's shaken lanes and by its other taps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.judge import fit
from llamadiff.judge.allowance import OWN, WHOLE, Sample
from llamadiff.judge.compared import Compared
from llamadiff.judge.lanes import Source
from llamadiff.numerics import metrics, tolerances
from llamadiff.numerics.policies import (
    BF16,
    CACHES,
    F32,
    JITTERS,
    MEASURING,
    READ,
    READ_SHAKEN,
    ROUGH,
    ROUGH_ATTENTION,
    ROUGH_CACHE,
)

Array = NDArray[Any]
# How many times the square of a sample of rounding counts: of a shaken lane, of one that is shaken in its last bits,
# of an arithmetic that is done in another way, of one on inputs in 16 bits: what is rounded again may go the other way.
SHAKEN, SHAKEN_F32, VARIANT, FLIPPED = 2.0, 64.0, 0.02, 1.0
FEWER = 10.0  # ratio of two sums of ten squares each that chance makes one time in a thousand
SURE = 1e-9  # NMSE of a row that an arithmetic has exactly, through a span
IN_ATTENTION = ("ROPE", "SOFT_MAX")
MAY_ROUND = (*IN_ATTENTION, "SWIGLU", "GEGLU", "GELU", "GET_ROWS")  # ops of which a value may have 16 bits
_TINY = float(np.finfo(np.float64).tiny)
DIGITS = 3  # decimals of the logarithm of a row's squares: rows that differ less are alike
ROWS = 3  # rows that differ, and are exact: a scale that is cut off is the rounded one in every second block


@dataclass
class Shown:
    """What right taps have shown of a source's arithmetic.

    ``missed``: by kind of operand, the policies that missed all of its products. ``exact``: kinds, each with what
    products of it were rounded to exactly, and in how many rows that differ. ``known``: some policy missed a tap that
    another one fits.
    """

    missed: dict[str, set[str]] = field(default_factory=dict)
    exact: Counter[tuple[str, str]] = field(default_factory=Counter)
    known: bool = False

    def note(self, missed: set[str], product_of: str | None, rounded_to: str | None, sizes: Array) -> None:
        """Of one tap, the policies that missed it; ``product_of``: the kind of its operand, if it is a product.

        ``rounded_to``: what that is rounded to, if so exactly. ``sizes``: the squares of its rows.
        """
        self.known |= bool(missed)
        if product_of is not None:
            self.missed.setdefault(product_of, missed).intersection_update(missed)
        if product_of is not None and rounded_to is not None:
            self.exact[product_of, rounded_to] += len(np.unique(np.log(np.maximum(sizes, _TINY)).round(DIGITS)))

    def is_exact(self, product_of: str | None, rounded_to: str) -> bool:
        """Whether products of this kind are rounded just so: enough of them were, to the last bit."""
        return product_of is not None and self.exact[product_of, rounded_to] >= ROWS

    def is_known(self, kind: str) -> bool:
        """Whether right taps show what operands of a kind are rounded to."""
        return any(count >= ROWS for (product_of, _), count in self.exact.items() if product_of == kind)

    @property
    def never(self) -> set[str]:
        """The arithmetics that no kind of product has."""
        return set.intersection(*self.missed.values()) if self.missed else set()


@dataclass(frozen=True)
class TapNoise:
    """One tap of a source: ``expected`` are its values under the arithmetic that fits best.

    ``is_exact``: other taps have shown that the source has this arithmetic, and no variant of it. ``match`` is the NMSE
    of right arithmetic. ``kinds``: what the ops of the span, and the tap's own, multiply by, or are.
    """

    source: Source
    seen: Compared
    expected: metrics.Rows
    span: Sequence[str]
    shown: Shown
    is_exact: bool
    match: float
    kinds: frozenset[str]

    @cached_property
    def _made(self) -> dict[str, metrics.Rows]:
        """Policy -> what its lane computed; the first is the one that rounds least."""
        lanes = self.seen.lanes_of(self.source)
        return {lane.policy: self.seen.lane(lane, self.source, ranked=True) for lane in lanes}

    def samples(self) -> list[Sample]:
        """Samples of what rounding makes of the tap.

        A shaken lane shows what the rounding of recorded values makes of the op's result. The lane of an arithmetic
        shows that one's own rounding: another way of doing it differs by a small part of that. Over a span of
        unrecorded ops rounding is chaotic, and may differ by all of it.
        """
        made, in_f32 = self._made, self.source.precision == F32
        exact, samples = next(iter(made.values())), []
        drawn = [made[policy] for policy in JITTERS if policy in made]
        weight = (SHAKEN if self.source.is_rough else SHAKEN_F32) / max(1, len(drawn))
        samples += [Sample(weight, one, exact) for one in drawn]
        if READ_SHAKEN in made:
            samples.append(Sample(SHAKEN, made[READ_SHAKEN], made[READ]))
        if not self.span:
            # which arithmetic a tap has can be lost among flips; what was read of the engine holds for it too
            own = made.get(READ, self.expected) if not in_f32 else self.expected
            if in_f32 and self.is_exact:
                return samples
            variants = {own, self.expected} - {exact}
            return [*samples, *(Sample(VARIANT if in_f32 else FLIPPED, one, exact) for one in variants)]
        rounded = self.expected if self._is_certain else made.get(self._alike or "")
        return samples if rounded is None else [*samples, Sample(SHAKEN, rounded, exact)]

    @property
    def guess(self) -> str | None:
        """The policy that a span is taken to have because it errs by as much, though no row shows it."""
        return self._alike if self.span and not self._is_certain else None

    @cached_property
    def _is_certain(self) -> bool:
        """Whether the arithmetic that fits a span best has some rows of it exactly, and another has not."""
        kept = tolerances.ROUNDING[self.source.precision] if self.source.precision != F32 else 0.0
        sizes, errors = self.expected.reference(), self._errors(self.expected)
        exact, *others = [next(iter(self._made.values())), *self._candidates.values()]
        apart = [self._errors(lane) for lane in (exact, *others) if lane is not self.expected]
        return fit.is_certain(errors, apart, sizes, WHOLE * self.match + OWN * 2 * kept)

    @cached_property
    def _alike(self) -> str | None:
        """The policy that errs from float32 by as much as a span does."""
        exact = next(iter(self._made.values()))
        spreads = [float(other.errors(exact).sum()) for other in self._candidates.values()]
        alike = fit.alike(float(self._errors(exact).sum()), spreads)
        return None if alike is None else list(self._candidates)[alike]

    @property
    def _candidates(self) -> dict[str, metrics.Rows]:
        """The arithmetics that a span may have, besides float32."""
        never = (*MEASURING, F32, *self.shown.never)
        return {policy: values for policy, values in self._made.items() if policy not in never}

    def is_far(self, errors: Array) -> bool:
        """Whether a few values of a row are further off than those of any rounding might be, which are spread over it.

        ``errors``: the rows' sums of squares. The sums of a few squares vary: they may have FEWER times as much. Where
        other taps have shown which arithmetic the products have, only that of attention is unknown.
        """
        unknown = (F32, *JITTERS, ROUGH_ATTENTION) if self.shown.known else None
        lanes = [lane for lane in self.seen.lanes_of(self.source) if unknown is None or lane.policy in unknown]
        exact, *others = (self.seen.lane(lane) for lane in lanes)
        mask = self.source.trace.known[self.seen.tap.name]
        count = np.moveaxis(mask, exact.axis, 0).reshape(exact.shape[0], -1).sum(axis=1)
        width = exact.size // exact.shape[0]
        own = (
            0.0 if self.shown.known else tolerances.ROUNDING[BF16]
        )  # of the values themselves, before they were printed
        most = (np.max([exact.errors(other) for other in others], axis=0) + own * exact.reference()) / width
        return bool((errors > FEWER * most * count).any())

    def _errors(self, computed: metrics.Rows) -> Array:
        """The rows' sums of squared errors against what was recorded."""
        return computed.errors(self.seen.told(self.source, computed))

    def is_unclear(self, nearest: Array, errors: Sequence[Array]) -> bool:
        """Whether a span errs as one in unknown arithmetic may: by what 8 bits, a cache of 4 bits, or 16 bits would do.

        What other taps have shown of a kind of op is known, and so is what a row of the span itself shows of its
        products. ``nearest`` are the rows' errors under the arithmetic that fits best, ``errors`` those under each.
        """
        made = self._made
        exact = next(iter(made.values()))
        others = [error for error in errors if error is not nearest]
        certain = fit.is_certain(nearest, others, exact.reference(), SURE)
        kinds = {kind for kind in self.kinds if not self.shown.is_known(kind)}
        products = bool(kinds - {*CACHES, *MAY_ROUND}) and not certain
        unknown = [ROUGH] if products else []
        unknown += [ROUGH_CACHE] if kinds & {*CACHES} else []
        unknown += [ROUGH_ATTENTION] if kinds & {*CACHES, *IN_ATTENTION} else []
        rough = sum(float(made[policy].errors(exact).sum()) for policy in unknown if policy in made)
        size, kept = float(exact.reference().sum()), self.source.precision_of(self.seen.tap.name)
        rough += OWN * tolerances.ROUNDING[kept] * size if kept != F32 else 0.0
        rough += tolerances.ROUNDING[BF16] * size if kinds & {*MAY_ROUND} else 0.0
        error = errors[0] if products else nearest
        return bool(error.sum() <= rough)
