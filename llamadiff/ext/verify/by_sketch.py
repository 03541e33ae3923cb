"""Products of many tokens, verified by sketch: through random combinations of their rows and of their channels.

A sketch only cuts short what is clearly a match: where it sees more than a small share of the limits, the product is
computed and judged as any other tap is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llamaref.sums import WeightProduct
from numpy.typing import NDArray

from llamadiff.ext.verify.combinations import Combinations, ErrorSquares, by_numbers
from llamadiff.judge.allowance import Even
from llamadiff.judge.coverage import COUNT
from llamadiff.judge.fit import nearest
from llamadiff.judge.lanes import Lane
from llamadiff.judge.measurement import Sketched
from llamadiff.numerics import metrics

Array = NDArray[Any]

# Of what a match may err by: how large an estimate may be. An error above the limit passes one time in 3e12, with the
# rounding of combinations at its worst (docs/verifying.md); right arithmetic stays twenty times below.
WHOLE_SHARE, PART_SHARE = 1 / 20, 1 / 150


@dataclass(frozen=True)
class Sketching:
    """A product as its lanes would compute it: ``given`` [lane, span, COUNT, channel] by combined rows, and ``taken``
    [lane, row, COUNT], whose channels are combined.
    """

    combinations: Combinations
    lanes: Sequence[Lane]
    given: Array
    taken: Array

    @classmethod
    def of(
        cls,
        product: WeightProduct,
        combined: tuple[Array, Array | None],
        combinations: Combinations,
        lanes: Sequence[Lane],
    ) -> Sketching:
        """``combined``: the rows of the product's two operands, combined."""
        numbers = combinations.of_channels(product.width).astype(product.x.dtype, copy=False)
        given, of_weights, of_minima = _both_sides(product, *combined, numbers)
        taken = by_numbers(product.x, of_weights)
        if product.sums is not None:
            taken += product.sums @ of_minima.astype(product.x.dtype)
        if product.bias is not None:
            given, taken = given + combinations.of_ones * product.bias, taken + product.bias @ numbers
        return cls(combinations, lanes, given, taken)

    def estimates(self, source: str, recorded: metrics.Rows) -> dict[str, ErrorSquares]:
        """By policy, how far a source's values [row, channel] are from what its lanes would compute."""
        rows, channels = self.combinations.rows(recorded.x), self.combinations.channels(recorded.x)
        return {
            lane.policy: ErrorSquares.of(rows - given, channels - taken)
            for lane, given, taken in zip(self.lanes, self.given, self.taken, strict=True)
            if lane.source == source
        }

    def seen(self, source: str, recorded: metrics.Rows, match: float, phases: Sequence[slice]) -> Sketched | None:
        """A source's values if in each phase they clearly match what one of its lanes would compute; else None."""
        found, sizes = self.estimates(source, recorded), recorded.measure().squares
        limits = Even.of(match, sizes, recorded.shape[1])
        chosen = [(phase, _nearest(found, sizes, phase)) for phase in phases if len(sizes[phase])]
        if not all(self._is_clear(found[policy], limits, match * sizes, phase) for phase, policy in chosen):
            return None
        rows, total = np.empty(len(sizes)), 0.0
        for phase, policy in chosen:
            rows[phase] = found[policy].rows[phase]
            total += sum(float(found[policy].channels[i].sum()) for i, _ in self._spans(phase, len(sizes)))
        errors = {policy: each.rows for policy, each in found.items()}
        return Sketched([policy for _, policy in chosen], errors, rows, sizes, metrics.ratio(total, float(sizes.sum())))

    def _is_clear(self, found: ErrorSquares, limits: Even, whole: Array, phase: slice) -> bool:
        """Whether estimates are a small share of the limits in each span of a phase, and as a whole."""
        return all(
            max(found.channels[i].sum(), found.rows[span].sum()) <= WHOLE_SHARE * whole[span].sum()
            and (found.rows[span] <= PART_SHARE * limits.rows[span]).all()
            and (found.channels[i] <= PART_SHARE * limits.value).all()
            for i, span in self._spans(phase, len(whole))
        )

    def _spans(self, phase: slice, n: int) -> Iterator[tuple[int, slice]]:
        """Those of a phase, with their numbers."""
        rows = range(*phase.indices(n))
        return ((i, span) for i, span in enumerate(self.combinations.spans) if span.start in rows)


def _both_sides(product: WeightProduct, x: Array, sums: Array | None, numbers: Array) -> tuple[Array, Array, Array]:
    """In one pass over W: the product of combined rows; W.T @ ``numbers`` [out, k], and the same of its minima."""
    rows, added = x.reshape(-1, x.shape[-1]).T, None if sums is None else sums.reshape(-1, sums.shape[-1]).T
    given = np.empty((rows.shape[1], product.width), x.dtype)
    totals = np.zeros((len(rows), COUNT)), np.zeros((0 if added is None else len(added), COUNT))

    def multiply(some: slice, w: Array, stored: Array) -> Sequence[Array]:
        given[:, some] = (w @ rows).T
        if added is None:
            return (w.T @ numbers[some],)
        minima = product.weights.minima(product.name, stored)
        given[:, some] += (minima @ added).T
        return w.T @ numbers[some], minima.T @ numbers[some]

    for parts in product.weights.by_blocks(product.name, multiply):
        for total, part in zip(totals, parts, strict=False):
            np.add(total, part, out=total)
    return given.reshape(*x.shape[:-1], product.width), *totals


def _nearest(found: Mapping[str, ErrorSquares], sizes: Array, phase: slice) -> str:
    """The policy whose estimates are smallest in a phase."""
    return list(found)[nearest([each.rows[phase] for each in found.values()], sizes[phase])]
