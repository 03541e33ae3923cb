"""A tensor of the file and what it should be: measured, and judged by what its type costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from llamaref.weights import block_sizes

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.file.cost import Cost, QuantizedRows, costs_of
from llamadiff.ext.file.distance import SHARE, Distance, Meter, place_in_words
from llamadiff.ext.file.merged import added_to
from llamadiff.ext.file.result import TensorRow
from llamadiff.ext.file.statistics import PLAIN, Sums
from llamadiff.ext.file.views import InFile, View, blocks_of_rows, rows_of, sample, width_of
from llamadiff.judge.verdict import of_rounding
from llamadiff.numerics.tolerances import ROUNDING
from llamadiff.result.oddity import Oddity
from llamadiff.system.pages import let_go
from llamadiff.system.progress import Progress

SLACK = 3.0  # how many times its type's cost a tensor may be off: quantizers differ, and some weigh columns
BLOCK_SLACK = 8.0  # and a block, of the worst one of the sample
MOST = 0.95  # a block that is off by its own size is not quantized, whatever its type
SAMPLE = 1 << 16  # values that are quantized to learn what it costs
SCALED = ("NVFP4",)  # types whose blocks are made for one more factor a tensor, or an expert: its .scale
SIXTEEN = {"F16", "BF16"}
FLOOR = 1e-12  # what float32 leaves


@dataclass(frozen=True)
class Pair:
    """A tensor of the file, ``theirs``: what it should be, and how that is made. ``floor``: the NMSE of making it.

    ``decoded``: theirs are the file's own values, so that the type costs nothing; ``exact``: in float32, so that small
    blocks lose nothing either.
    """

    ours: InFile
    theirs: View
    made: str = ""
    floor: float = FLOOR
    decoded: bool = False
    exact: bool = False

    @property
    def name(self) -> str:
        return self.ours.name

    @property
    def least(self) -> float:
        """The NMSE that is left where nothing is wrong and the type costs nothing: a merged sum is rounded again."""
        return self.floor if self.ours.added is None else max(self.floor, floor_of("merged", self.theirs.kind))


FREE = Cost(0.0, 0.0)


def floor_of(rule: str, kind: str) -> float:
    """What is lost in making a tensor: nothing, but where sums of 16-bit values were rounded to such again."""
    kind = kind.lower()
    return max(FLOOR, 8 * ROUNDING[kind]) if rule in ("plus one", "-exp", "merged") and kind in ROUNDING else FLOOR


@dataclass(frozen=True)
class Measured:
    """A pair, how far it is apart, and what its types cost: those ``priced``.

    ``meter`` has every block's error; None: equal bytes.
    """

    pair: Pair
    row: TensorRow
    distance: Distance
    meter: Meter | None
    cost: Cost = FREE
    priced: tuple[str, ...] = ()

    @property
    def limit(self) -> float:
        """The NMSE that honest quantization stays below."""
        return min(SLACK * self.cost.nmse, MOST) + self.pair.least

    @property
    def block_limit(self) -> float:
        return min(BLOCK_SLACK * max(self.cost.worst, SLACK * self.cost.nmse), MOST) + 100 * self.pair.least

    def off(self) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Which blocks are off: [row, block]."""
        assert self.meter is not None
        return np.asarray(self.meter.off(self.block_limit, 0.0 if self.pair.exact else SHARE))

    @property
    def block(self) -> int:
        """Values of a block whose error is told."""
        assert self.meter is not None
        return self.meter.block

    def place(self) -> str:
        """Where it is off, in words."""
        return place_in_words(self.off(), self.block, width_of(self.pair.ours))

    @property
    def is_wrong(self) -> bool:
        if self.meter is None:
            return False
        return bool(self.distance.nmse > self.limit or self.distance.not_finite or self.off().any())

    def judged(self) -> TensorRow:
        """Its line of the table."""
        if self.meter is None:
            return self.row
        place = self.place() if self.is_wrong else ""
        equal = self.distance.nmse == 0 and not self.distance.not_finite
        verdict = of_rounding(equal and not self.is_wrong, not self.is_wrong)
        distance, priced = replace(self.distance, place=place), " and ".join(dict.fromkeys(self.priced))
        return replace(self.row, distance=distance, cost=self.cost.nmse, priced=priced, verdict=verdict)


def in_file(model: ModelFile, name: str) -> InFile:
    """A tensor of a file, by ggml's decoder if it is to be trusted, times its .scale where it has one, and with what
    an adapter that is applied adds to it.
    """
    weights, scale = model.weights, scale_of(name)
    factor = weights.whole(scale).reshape(-1) if weights.type(name) in SCALED and scale in weights else None
    return InFile(weights, name, model.dequantizer.decoder(name), factor, added_to(weights.adapter, name))


def scale_of(name: str) -> str:
    """What a tensor's scale is called."""
    return f"{name.removesuffix('.weight')}.scale"


def with_lacking_scale(found: Oddity, pair: Pair) -> Oddity:
    """What is said of a pair, where one side lacks the factor that its blocks were made for."""
    sides = {"": pair.ours, "the other side ": pair.theirs}
    lacking = [
        f"{whose}has no {scale_of(side.name)}"
        for whose, side in sides.items()
        if isinstance(side, InFile) and side.kind in SCALED and side.scale is None
    ]
    if found.cause != "changed" or len(lacking) != 1:
        return found
    return replace(found, says=f"{lacking[0]}: {found.says}", cause="scale-missing")


def measure_all(pairs: Sequence[Pair], progress: Progress) -> list[Measured]:
    """How far every pair is apart, and what its types cost on such values."""
    measured = []
    for number, pair in enumerate(pairs):
        progress(f"comparing {pair.name}", number, len(pairs))
        measured.append(measure(pair))
        let_go(pair.ours.weights.read_raw(pair.name))
        if isinstance(pair.theirs, InFile):
            let_go(pair.theirs.weights.read_raw(pair.theirs.name))
    progress("asking ggml what its types cost")
    return priced(measured)


def measure(pair: Pair) -> Measured:
    """How far a pair is apart."""
    ours = pair.ours
    row = replace(TensorRow.of(ours.weights, ours.name), made=pair.made)
    if _same_bytes(pair):
        equal = Distance(0.0, 1.0, (0, 0, 0.0))
        return Measured(pair, replace(row, distance=equal), equal, None)
    meter, sums = Meter(ours.weights.block_size(ours.name), width_of(ours)), Sums()
    for rows in blocks_of_rows(ours):
        values = ours.take(rows)
        meter.add(values, pair.theirs.take(rows))
        sums.add(int(rows[0]), values)
    return Measured(pair, replace(row, stats=sums.stats()), meter.distance(), meter)


def _same_bytes(pair: Pair) -> bool:
    """Whether both are tensors of files, of one type, and equal byte for byte."""
    a, b = pair.ours, pair.theirs
    if not isinstance(b, InFile) or a.kind != b.kind or a.shape != b.shape or a.added is not None:
        return False
    if not np.array_equal(1.0 if a.scale is None else a.scale, 1.0 if b.scale is None else b.scale):
        return False
    return bool(np.array_equal(a.weights.read_raw(a.name).view(np.uint8), b.weights.read_raw(b.name).view(np.uint8)))


def priced(measured: Sequence[Measured]) -> list[Measured]:
    """The same with what their types cost: the file's, and the other side's where that is quantized too."""
    asked = [(i, some) for i, one in enumerate(measured) if one.meter is not None for some in _samples(one.pair)]
    total = [FREE] * len(measured)
    kinds: list[tuple[str, ...]] = [()] * len(measured)
    for (i, some), cost in zip(asked, costs_of([some for _, some in asked]), strict=True):
        total[i] = Cost(total[i].nmse + cost.nmse, total[i].worst + cost.worst)
        kinds[i] = (*kinds[i], some.kind)
    both = zip(measured, total, kinds, strict=True)
    return [replace(one, cost=cost, priced=of) for one, cost, of in both]


def _samples(pair: Pair) -> list[QuantizedRows]:
    """What honest quantization costs is asked of the finer side's values, for each side that is quantized."""
    if pair.decoded:
        return []
    sides: list[View] = [pair.ours, pair.theirs] if isinstance(pair.theirs, InFile) else [pair.ours]
    if {side.kind for side in sides} == SIXTEEN:  # of which neither is finer: either may have been made of the other
        return [_quantized(side.kind, other) for side, other in zip(sides, reversed(sides), strict=True)]
    finer = max(pair.ours, pair.theirs, key=lambda side: _bits(side.kind)) if len(sides) == 2 else pair.theirs
    kinds = [side.kind for side in sides if side.kind not in PLAIN and (side is not finer or _is_blocks(side.kind))]
    if not kinds:
        return []
    return [_quantized(kind, finer) for kind in kinds]


def _quantized(kind: str, view: View) -> QuantizedRows:
    """Some rows of a view, to be quantized to a type."""
    most = max(4, SAMPLE // width_of(view))
    return QuantizedRows(kind, view.take(sample(view, min(most, rows_of(view)))), made_so=view.kind == kind)


def _bits(kind: str) -> float:
    """Bits of a value; of what is no type of ggml's, as many as there are."""
    try:
        values, size = block_sizes(kind)
    except KeyError:
        return 64.0
    return 8 * size / values


def _is_blocks(kind: str) -> bool:
    return kind not in ("F16", "BF16", *PLAIN)
