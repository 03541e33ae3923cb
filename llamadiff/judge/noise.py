"""How large a tap's rounding noise can be, measured by its source's perturbed lanes and by its other taps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.judge import fit
from llamadiff.judge.allowance import OWN, WHOLE, Sample
from llamadiff.judge.compared import Compared
from llamadiff.judge.lanes import Source
from llamadiff.judge.measurement import VARIANTS, UnknownRounding
from llamadiff.judge.settings import settings_of
from llamadiff.numerics import metrics, tolerances
from llamadiff.numerics.policies import (
    BF16,
    CACHES,
    COARSE,
    COARSE_ATTENTION,
    COARSE_CACHE,
    F32,
    MEASURING,
    PERTURBED,
    READ,
    READ_PERTURBED,
)

Array = NDArray[Any]
# How many times the square of a sample of rounding counts: of a perturbed lane, of one perturbed in its last bits,
# of an arithmetic that is done in another way, of one on inputs in 16 bits: what is rounded again may go the other way.
PERTURBED_FACTOR, PERTURBED_F32_FACTOR, VARIANT, FLIPPED = 2.0, 64.0, 0.02, 1.0
# A cached value that lies between two steps of its type may go either way: how many do that no perturbed lane shows,
# how far each moves, and how far a 4-bit cache moves every value, of the rms.
TIES, STEPS, STEP, ROUGHLY = 8, {"F16": 2.0**-10, "BF16": 2.0**-7, "Q8_0": 2.0**-6}, 0.25, 0.08
FEWER = 10.0  # ratio of two sums of ten squares each that chance makes one time in a thousand
SURE_ROW = 1e-9  # NMSE of a row that an arithmetic has exactly, through a span
ROWS = 3  # such rows, but for the first, that are no accident
_TINY = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True)
class TapNoise:
    """One tap of a source: ``expected`` are its values under the arithmetic that fits best.

    ``errors``: of each arithmetic, the rows' sums of squares; ``match`` is the NMSE of right arithmetic. ``kinds``:
    what the ops of the span, and the tap's own, multiply by, or are; ``cached``: the values of a layer's K.
    """

    source: Source
    seen: Compared
    expected: metrics.Rows
    errors: Sequence[Array]
    span: Sequence[str]
    match: float
    kinds: frozenset[str]
    cached: int

    @cached_property
    def _rows_by_policy(self) -> dict[str, metrics.Rows]:
        """Policy -> what its lane computed; the first is the one that rounds least."""
        lanes = self.seen.lanes_of(self.source)
        return {lane.policy: self.seen.lane(lane, self.source, ranked=True) for lane in lanes}

    @property
    def _exact(self) -> metrics.Rows:
        return next(iter(self._rows_by_policy.values()))

    @cached_property
    def sure(self) -> list[Sample]:
        """Samples of what rounding makes of the tap, whatever the engine's arithmetic is.

        A perturbed lane shows what the rounding of recorded values makes of the op's result. The lane of an arithmetic
        shows that one's own rounding. Over a span of unrecorded ops rounding is chaotic, and may differ by all of it:
        there this counts where some row shows that it is the engine's.
        """
        made, in_f32 = self._rows_by_policy, self.source.precision == F32
        drawn = [made[policy] for policy in PERTURBED if policy in made]
        weight = (PERTURBED_FACTOR if self.source.is_rough else PERTURBED_F32_FACTOR) / max(1, len(drawn))
        samples = [Sample(weight, one, self._exact) for one in drawn]
        if READ_PERTURBED in made:
            samples.append(Sample(PERTURBED_FACTOR, made[READ_PERTURBED], made[READ]))
        if self.span and self.is_certain:
            samples.append(Sample(PERTURBED_FACTOR, self.expected, self._exact))
        if self.span and COARSE_CACHE in made:
            samples.append(Sample(self._weight_of_ties, made[COARSE_CACHE], self._exact))
        if not self.span and not in_f32:  # which arithmetic a tap has can be lost among flips
            samples += [Sample(FLIPPED, one, self._exact) for one in self._variants]
        return samples

    @property
    def _weight_of_ties(self) -> float:
        """How much of what a 4-bit cache leaves a few ties leave, in rows that are rounded as they are stored."""
        stored = [kept for kind in self.kinds & {*CACHES} if (kept := self.source.stored.get(kind, "F32")) != "F32"]
        step = max((STEPS.get(kept, STEP) for kept in stored), default=0.0)
        return TIES * (step / ROUGHLY) ** 2 / max(1, self.cached)

    @property
    def _variants(self) -> set[metrics.Rows]:
        """Arithmetics of which one that is done in another way differs by a small part; what was read holds too."""
        own = self._rows_by_policy.get(READ, self.expected) if self.source.precision != F32 else self.expected
        return {own, self.expected} - {self._exact}

    def others(self) -> Iterator[tuple[str, list[Sample]]]:
        """The same with what an arithmetic adds that other taps must show: how it may be done, or which one it is."""
        if not self.span:
            if self.source.precision == F32 and self._variants:
                yield VARIANTS, [*self.sure, *(Sample(VARIANT, one, self._exact) for one in self._variants)]
            return
        for policy, values in self._arithmetics.items():
            yield policy, [*self.sure, Sample(PERTURBED_FACTOR, values, self._exact)]

    @property
    def _arithmetics(self) -> dict[str, metrics.Rows]:
        """Those that round."""
        return {
            policy: values
            for policy, values in self._rows_by_policy.items()
            if policy not in (*MEASURING, F32, READ_PERTURBED)
        }

    @cached_property
    def is_certain(self) -> bool:
        """Whether the arithmetic that fits a span best has some rows of it exactly, and another has not."""
        kept = tolerances.ROUNDING[self.source.precision] if self.source.precision != F32 else 0.0
        errors = self._errors(self.expected)
        apart = [self._errors(lane) for lane in (self._exact, *self._arithmetics.values()) if lane is not self.expected]
        return fit.is_certain(errors, apart, self.expected.reference(), WHOLE * self.match + OWN * 2 * kept)

    def policy_distances(self) -> dict[str, float]:
        """The NMSE by which each arithmetic differs from the one that rounds least."""
        size = float(self._exact.reference().sum())
        sums = {policy: float(values.errors(self._exact).sum()) for policy, values in self._arithmetics.items()}
        return {policy: metrics.ratio(error, size) for policy, error in sums.items()}

    def rounding_correlation(self) -> dict[str, float]:
        """How far a tap's errors go with the rounding errors of each arithmetic, in standard deviations of chance.

        What rounding does to a value has a sign that nothing else knows: errors that go with it in many rows were made
        by it. Of an error of another origin, however large, that is not so. What chance does is seen from lanes that
        are rounded at random, and go through the same ops: with those no engine's errors go.
        """
        exact = self._exact
        rows = fit.count_distinct(exact.reference())
        error = self.seen.clamp_to_print_precision(self.source, exact)
        drawn = [self._cosines(error, values) for policy, values in self._rows_by_policy.items() if policy in MEASURING]
        if not drawn:
            return {}
        chance = max(float(np.sqrt(np.mean(np.square(drawn)))), (exact.size // exact.shape[0]) ** -0.5)
        return {
            policy: float(np.mean(self._cosines(error, values))) * rows**0.5 / chance
            for policy, values in self._arithmetics.items()
        }

    def _cosines(self, recorded: metrics.Rows, rounded: metrics.Rows) -> Array:
        """Of each row, how the error of what was recorded goes with what a rounding does to it: -1 to 1."""
        parts = []
        for some in self._exact.blocks:
            right = self._exact.block(some)
            error, rounding = (np.nan_to_num(side.block(some) - right) for side in (recorded, rounded))
            sizes = np.sqrt(np.square(error).sum(axis=1) * np.square(rounding).sum(axis=1))
            parts.append((error * rounding).sum(axis=1) / np.maximum(sizes, _TINY))
        return np.concatenate(parts)

    def is_far(self, errors: Array, is_known: bool) -> bool:
        """Whether a few values of a row are further off than those of any rounding might be, which are spread over it.

        ``errors``: the rows' sums of squares. The sums of a few squares vary: they may have FEWER times as much.
        ``is_known``: which arithmetic the products have; then only that of attention is unknown.
        """
        unknown = (F32, *PERTURBED, COARSE_ATTENTION) if is_known else None
        lanes = [lane for lane in self.seen.lanes_of(self.source) if unknown is None or lane.policy in unknown]
        exact, *others = (self.seen.lane(lane) for lane in lanes)
        mask = self.source.trace.known[self.seen.tap.name]
        count = np.moveaxis(mask, exact.axis, 0).reshape(exact.shape[0], -1).sum(axis=1)
        width = exact.size // exact.shape[0]
        own = 0.0 if is_known else tolerances.ROUNDING[BF16]  # of the values themselves, before they were printed
        most = (np.max([exact.errors(other) for other in others], axis=0) + own * exact.reference()) / width
        return bool((errors > FEWER * most * count).any())

    def _errors(self, computed: metrics.Rows) -> Array:
        """The rows' sums of squared errors against what was recorded."""
        return computed.errors(self.seen.clamp_to_print_precision(self.source, computed))

    def unknown_rounding(self, nearest: Array, phases: Sequence[slice]) -> UnknownRounding:
        """What the span errs by, and what roundings that nothing shows may leave of it. ``nearest``: the rows' errors
        under the arithmetic that fits best.
        """
        all_shown, cache_shown = self._shown_by_rows(nearest, phases)
        made, exact = self._rows_by_policy, self._exact
        size = float(exact.reference().sum())
        others = [error for error in self.errors if error is not nearest]
        is_certain = fit.is_certain(nearest, others, exact.reference(), SURE_ROW)

        def left(policy: str, shown: bool) -> float:
            known = shown or policy not in made
            return 0.0 if known else metrics.ratio(float(made[policy].errors(exact).sum()), size)

        kept = self.source.precision_of(self.seen.tap.name)
        return UnknownRounding(
            left(COARSE, all_shown or is_certain), left(COARSE_CACHE, all_shown or cache_shown),
            left(COARSE_ATTENTION, all_shown), 0.0 if all_shown else tolerances.ROUNDING[BF16],
            OWN * tolerances.ROUNDING[kept] if kept != F32 else 0.0,
            metrics.ratio(float(self.errors[0].sum()), size), metrics.ratio(float(nearest.sum()), size),
        )  # fmt: skip

    def _shown_by_rows(self, errors: Array, phases: Sequence[slice]) -> tuple[bool, bool]:
        """Whether exact rows show how all ops of the span round, and whether they show what a cache makes of K and V.

        What rounds does so in every row of a phase, and in rows that read what the others have written: so all is
        shown by exact rows of the same phase of which one comes later, and a cache whose type is stated by those of
        any. The first row has nothing to weigh; a choice of experts may be a tie in one row.
        """
        if any(name.startswith("ffn_moe_topk") for name in self.span):
            return False, False
        sizes, is_stated = self._exact.reference(), {"type_k", "type_v"} <= settings_of(self.source.trace).keys()
        rows, off = np.arange(len(sizes)), errors > SURE_ROW * sizes
        right = [rows[phase][(~off & (sizes > 0))[phase]] for phase in phases]
        wrong = [rows[phase][off[phase]] for phase in phases]
        last = [int(some[-1]) if np.count_nonzero(some) >= ROWS else -1 for some in right]
        later = all(end > some.max(initial=-1) for end, some in zip(last, wrong, strict=True) if len(some))
        return later, is_stated and max(last) >= 0
