"""One tap as it is compared: what was recorded of it, what each lane computed, and how far apart these are."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from llamaref.config import Rope
from numpy.typing import NDArray

from llamadiff.judge.finiteness import open_places
from llamadiff.judge.lanes import FREE, Lane, Source
from llamadiff.numerics import metrics
from llamadiff.trace import taps

Array = NDArray[Any]


@dataclass(frozen=True)
class Unfollowed:
    """What no lane follows: by lane the NMSE of some sums in float16; how far RoPE's angles go, in radians squared."""

    sums: Mapping[Lane, float] = field(default_factory=dict)
    mean_square_angle: Mapping[Rope, float] = field(default_factory=dict)


class Compared:
    """One tap's arrays as they are compared; each is widened once, however often it is compared."""

    def __init__(
        self,
        tap: taps.Tap,
        x: Sequence[Array],
        lanes: Sequence[Lane],
        recorded: Mapping[str, Array],
        sources: Mapping[str, Source],
        positions: Array,
        rows: Mapping[str, metrics.Rows] | None = None,
        unfollowed: Unfollowed | None = None,
    ) -> None:
        """``x`` computed by each lane, ``recorded`` by source; ``positions`` [token].

        ``rows``: what was recorded, of a tap that was recorded whole and looked at before.
        """
        self.tap, self.x, self.lanes, self.recorded = tap, x, lanes, recorded
        self.sources, self.positions = sources, positions
        self.unfollowed = unfollowed or Unfollowed()
        self._rows: dict[Hashable, metrics.Rows] = {(name, False): each for name, each in (rows or {}).items()}
        self._opened: dict[str, Array | None] = {}

    def lanes_of(self, source: Source) -> list[Lane]:
        return [lane for lane in self.lanes if lane.source == source.name]

    def exact(self, source: Source) -> Lane:
        """The lane of a source that rounds least."""
        return next(lane for lane in self.lanes_of(source) if not lane.is_noise_probe)

    def undetermined(self, source: Source) -> Array | None:
        """Where a tap of a source cannot be judged.

        Where some inputs are not finite, nor is the result elsewhere perhaps: a step that the whole tensor shares
        spreads them.
        """
        if source.name not in self._opened:
            lane = self.exact(source)
            computed = self.lane(lane, source)
            if source.name in self.recorded:  # the look that compares the two also shows whether they are finite
                computed.pair(self.values(source.name, source))
            finite = computed.finite
            right = self.comparable(self.x[self.lanes.index(lane)], source, ranked=False)
            masks = taps.parse(self.tap.name) is None
            places = None if finite else open_places(right, masks)
            if places is not None and source.name in self.recorded:
                spread = open_places(self.comparable(self.recorded[source.name], source, ranked=False), masks)
                places = places if spread is None else places | spread
            self._opened[source.name] = places
        return self._opened[source.name]

    def in_phases(self, lanes: Sequence[Lane], phases: Sequence[slice], source: Source) -> metrics.Rows:
        """What lanes computed, each in its phase: rows in the order of the tokens."""
        if len(set(lanes)) == 1:
            return self.lane(lanes[0], source, ranked=True)
        parts = sorted(zip(phases, lanes, strict=True), key=lambda part: part[0].start or 0)
        whole = [self.comparable(self.x[self.lanes.index(lane)], source, ranked=True) for _, lane in parts]
        axis = self.tap.row_axis
        rows = [np.moveaxis(x, axis, 0)[phase] for x, (phase, _) in zip(whole, parts, strict=True)]
        return metrics.Rows(np.moveaxis(np.concatenate(rows), 0, axis), axis)

    def lane(self, lane: Lane, *sources: Source, ranked: bool = False) -> metrics.Rows:
        """What a lane computed, where these sources have values; without sources all of it."""
        return self._make_rows(lane, self.x[self.lanes.index(lane)], sources, ranked)

    def values(self, name: str, *sources: Source, ranked: bool = False) -> metrics.Rows:
        """What a source recorded, where these sources have values."""
        return self._make_rows(name, self.recorded[name], sources, ranked)

    def clamp_to_print_precision(self, source: Source, computed: metrics.Rows) -> metrics.Rows:
        """What a source recorded, as near to what was computed as the rounding of printed numbers leaves room for."""
        recorded = self.values(source.name, source, ranked=True)
        slack = source.trace.printed.slack.get(self.tap.name)
        if slack is None:
            return recorded
        key = ("told", source.name, id(computed))
        if key not in self._rows:
            room = metrics.Rows(slack, self.tap.row_axis).values
            near = recorded.values + np.clip(computed.values - recorded.values, -room, room)
            self._rows[key] = metrics.Rows(self._in_place(near, slack.shape), self.tap.row_axis)
        return self._rows[key]

    def _in_place(self, rows: Array, shape: tuple[int, ...]) -> Array:
        """Rows [row, value] as the tap has them."""
        axis = self.tap.row_axis
        return np.moveaxis(rows.reshape(shape[axis], *shape[:axis], *shape[axis + 1 :]), 0, axis)

    def _make_rows(self, what: Hashable, x: Array, sources: Sequence[Source], ranked: bool) -> metrics.Rows:
        partial = [source for source in sources if self.tap.name in source.trace.known]
        sorts = self.tap.kind.op == "ARGSORT"
        ranked = ranked and (sorts or any(self.undetermined(source) is not None for source in sources))
        key = (what, *(source.name for source in (sources if ranked else partial)), ranked)
        if key not in self._rows:
            for source in sources if ranked else partial or (None,):
                x = self.comparable(x, source, ranked)
            self._rows[key] = metrics.Rows(x, self.tap.row_axis)
        return self._rows[key]

    def comparable(self, x: Array, source: Source | None, ranked: bool) -> Array:
        """A tap's defined values, and those that a source knows.

        Chosen experts are ``ranked`` by what was recorded of them: of two that are equal, either may come first. Then
        those that cannot be judged are left out too.
        """
        x = self._mask_undefined(x)
        if source is None:
            return x
        x = source.zero_unrecorded(self.tap.name, x)
        opened = self.undetermined(source) if ranked else None
        x = x if opened is None else np.where(opened, x.dtype.type(0), x)
        if not ranked or self.tap.kind.op != "ARGSORT":
            return x
        scores = (f"{word}-{self.tap.layer}" for word in self.tap.kind.inputs.split("|"))
        probs = next((name for name in scores if source.is_whole(name)), None)
        return x if probs is None else np.take_along_axis(source.trace[probs], x.astype(np.int64), axis=-1)

    def stats(self, name: str) -> metrics.Stats:
        """A side's moments, over the values that both sides have."""
        masks = [source.trace.known[self.tap.name] for source in self.sources.values()
                 if name in self.recorded and self.tap.name in source.trace.known]  # fmt: skip
        values = self._mask_undefined(self.recorded[name])
        if masks:
            return metrics.stats(values[np.logical_and.reduce(masks)])
        found = metrics.stats(self.values(name))
        return metrics.with_extremes(found, values) if self.tap.kind.word == taps.RESIDUAL else found

    def distance(self, name: str) -> float:
        """A source's values against the free run's, where it has any."""
        source = self.sources[name]
        return metrics.nmse_of(self.values(name, source), self.lane(FREE, source))

    def values_at(self, index: tuple[int, ...]) -> dict[str, float]:
        """Every side's value at one place."""
        free = {"engine": self.x[self.lanes.index(FREE)]} if FREE in self.lanes else {}
        sides = {**self.recorded, **free}
        return {name: float(self._mask_undefined(array)[index]) for name, array in sides.items()}

    def _mask_undefined(self, x: Array) -> Array:
        """Raw scores are defined on the causal triangle only: elsewhere both sides count as zero.

        In some graphs another node has their name.
        """
        hidden = self.positions[None, :] > self.positions[:, None]
        if self.tap.kind.word != "kq" or x.shape[-2:] != hidden.shape:
            return x
        return np.where(hidden, x.dtype.type(0), x)


@dataclass(frozen=True)
class Errors:
    """``recorded`` against ``right``: rows' sums of squared errors, and their own squares; the largest difference."""

    recorded: metrics.Rows
    right: metrics.Rows
    rows: Array
    sizes: Array
    largest: float
    worst: metrics.Worst

    @classmethod
    def of(cls, recorded: metrics.Rows, right: metrics.Rows) -> Errors:
        return cls(recorded, right, right.errors(recorded), right.reference(), *metrics.worst_of(recorded, right))

    @property
    def nmse(self) -> float:
        return metrics.ratio(float(self.rows.sum()), float(self.sizes.sum()))

    @property
    def per_row(self) -> tuple[float, ...]:
        """The NMSE of each row."""
        return metrics.ratios(self.rows, self.sizes)
