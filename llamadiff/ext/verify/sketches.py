"""Products of many tokens that are seen to be right before they are computed, so that they need not be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llamaref.sums import WeightProduct
from numpy.typing import NDArray

from llamadiff.ext.verify.by_sketch import Sketching
from llamadiff.ext.verify.combinations import Combinations
from llamadiff.judge.compared import Compared
from llamadiff.judge.coverage import LEAST
from llamadiff.judge.finding import Finding
from llamadiff.judge.lanes import Lane, Source
from llamadiff.judge.measurement import Sketched
from llamadiff.judge.measuring import Judge
from llamadiff.numerics import metrics
from llamadiff.numerics.policies import F32
from llamadiff.trace.taps import Tap

Array = NDArray[Any]


@dataclass(frozen=True)
class _Given:
    """What the engine was given for a product: ``values`` [lane, ...], of which each source's ``rows`` were
    ``sketched``.
    """

    values: Array
    sketched: Mapping[str, Sketched]
    rows: Mapping[str, metrics.Rows]


class Sketches:
    """Of the products of one pass; ``products``: weight -> the tap that is its product and nothing else."""

    def __init__(self, judge: Judge, products: Mapping[str, str]) -> None:
        self._judge, self._products = judge, products
        self._combinations = Combinations.within(judge.phases, len(judge.positions))
        self._given: dict[str, _Given] = {}  # by tap
        self._last: tuple[Array, tuple[Array, Array | None]] | None = None  # an operand, and its rows combined

    def verified_product(
        self,
        product: WeightProduct,
        lanes: Sequence[Lane],
        taps: Mapping[str, Tap],
        recorded: Callable[[Source, Tap, tuple[int, ...]], Array],
    ) -> Array | None:
        """What was recorded of a product, in each lane, if all of it clearly is right."""
        tap = taps.get(self._products.get(product.name, ""))
        if tap is None or product.scale is not None or not self._can_see(tap, lanes):
            return None
        shape = (*product.x.shape[1:-1], product.width)
        values = {source.name: recorded(source, tap, shape) for source in self._replayed(lanes)}
        sketching = Sketching.of(product, self._combined(product), self._combinations, lanes)
        rows, sketched = {name: metrics.Rows(own) for name, own in values.items()}, dict[str, Sketched]()
        for source in self._replayed(lanes):
            match = self._judge.match_of(source, tap)
            seen = sketching.seen(source.name, rows[source.name], match, self._judge.phases)
            if seen is None:
                return None
            sketched[source.name] = seen
        given = _by_lane([values[str(lane.source)] for lane in lanes], product.x.dtype)
        self._given[tap.name] = _Given(given, sketched, rows)
        return given

    def finding_of(
        self, tap: Tap, x: Array, lanes: Sequence[Lane], spans: Mapping[str, tuple[str, ...]]
    ) -> Finding | None:
        """That of a tap whose product was known; else None."""
        given = self._given.pop(tap.name, None)
        if given is None:
            return None
        assert x is given.values, f"{tap.name} is not the product that was verified"
        recorded, judge = {name: rows.x for name, rows in given.rows.items()}, self._judge
        seen = Compared(tap, [*x], lanes, recorded, judge.sources, judge.positions, given.rows)
        return judge.of_sketches(seen, spans, given.sketched)

    def _can_see(self, tap: Tap, lanes: Sequence[Lane]) -> bool:
        """Whether a tap may be verified so: of many tokens, recorded whole and in float32 by every source that is
        replayed, with nothing that measures noise, or draws pictures, beside.
        """
        many = len(self._judge.positions) >= LEAST and self._judge.pictured is None
        return many and not any(lane.source is None or lane.is_noise_probe for lane in lanes) and all(
            source.is_whole(tap.name) and source.shown_in(tap.name) == F32 and not source.trace.printed.slack
            for source in self._replayed(lanes)
        )  # fmt: skip

    def _replayed(self, lanes: Sequence[Lane]) -> list[Source]:
        """The sources that have lanes."""
        return [source for name, source in self._judge.sources.items() if any(lane.source == name for lane in lanes)]

    def _combined(self, product: WeightProduct) -> tuple[Array, Array | None]:
        """The rows of a product's operands, combined; of those that several products read in turn, once."""
        if self._last is None or self._last[0] is not product.x:
            sums = None if product.sums is None else self._combinations.rows(product.sums)
            self._last = product.x, (self._combinations.rows(product.x), sums)
        return self._last[1]


def _by_lane(values: Sequence[Array], dtype: Any) -> Array:
    """Values of each lane, [lane, ...]: a view where they are one source's, a copy where they are several's."""
    first = values[0].astype(dtype, copy=False)
    if all(value is values[0] for value in values):
        return np.broadcast_to(first, (len(values), *first.shape))
    return np.stack(values).astype(dtype, copy=False)
