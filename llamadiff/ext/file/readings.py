"""What a tensor is that is another as a whole: blocks of another type, values of two types, an adapter merged in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from llamaref import ModelError
from llamaref.weights import block_sizes
from numpy.typing import NDArray

from llamadiff.ext.file.blocks.fields import values_of
from llamadiff.ext.file.cost import TYPICAL, QuantizedRows, quantized
from llamadiff.ext.file.pairs import SLACK, Measured
from llamadiff.ext.file.statistics import PLAIN
from llamadiff.ext.file.views import InFile, View, sample, width_of
from llamadiff.numerics.metrics import nmse
from llamadiff.result.oddity import Oddity

Array = NDArray[Any]
ROWS, FEW_ROWS = 64, 16  # of a tensor, by which a reading is tried; few, where they are to be quantized
SLOW = ("IQ1", "IQ2", "IQ3")  # types that take ggml seconds a row, and that nobody quantizes to something else
EXACT = 1e-6  # what rounding to 16 bits leaves, at most
SHARE = 0.1  # of the error, and no more, may be left where another type explains it
MOST_ROWS, MOST_RANK = 1024, 256
LEFT_EXACT, LEFT = 1e-9, 1e-5  # of W, that rounding to 32 or to 16 bits leaves besides
GAP = 4.0  # how many times the next singular value the last one of a low rank is


@dataclass(frozen=True)
class ReadAs:
    """A tensor of a file, its bytes taken for blocks of another type."""

    of: InFile
    kind: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape

    @cached_property
    def _rows(self) -> Array:
        stored = np.ascontiguousarray(self.of.weights.read_raw(self.of.name)).view(np.uint8)
        return stored.reshape(-1, stored.shape[-1])

    def take(self, rows: Array) -> Array:
        blocks = np.ascontiguousarray(self._rows[rows]).reshape(-1, block_sizes(self.kind)[1])
        return np.asarray(values_of(self.kind, blocks), np.float32).reshape(len(rows), -1)


def _others(view: View) -> Iterator[ReadAs]:
    """A tensor's bytes as blocks of each type of which as many values have as many bytes."""
    if not isinstance(view, InFile) or view.kind in PLAIN:
        return
    own, width = block_sizes(view.kind), width_of(view)
    for kind in (*TYPICAL, "F16", "BF16"):
        values, size = block_sizes(kind)
        if kind != view.kind and width % values == 0 and values * own[1] == size * own[0]:
            yield ReadAs(view, kind)


def another_type(measured: Measured) -> Iterator[Oddity]:
    """Blocks of one type that a file calls those of another, as large."""
    pair = measured.pair
    some = sample(pair.ours, ROWS)
    for view, against, whose in ((pair.ours, pair.theirs, "its"), (pair.theirs, pair.ours, "the other side's")):
        right = against.take(some)
        for other in _others(view):
            limit = max(measured.limit, SLACK * TYPICAL.get(other.kind, 0.0))
            if _is_near(other, some, right, min(limit, SHARE * measured.distance.nmse)):
                says = f"{whose} blocks are {other.kind}'s, as large as {view.kind}'s: the file calls them {view.kind}"
                yield Oddity(pair.name, says, "another-type")


def _is_near(view: View, rows: Array, right: Array, limit: float) -> bool:
    try:
        with np.errstate(all="ignore"):
            values = view.take(rows)
    except (ModelError, ValueError, NotImplementedError):  # nobody decodes it
        return False
    return bool(np.isfinite(values).all()) and nmse(values, right, 0) <= limit


def quantized_before(measured: Measured) -> Iterator[Oddity]:
    """Values that went through a coarser type before they became those of a file."""
    pair, rows = measured.pair, sample(measured.pair.ours, FEW_ROWS)
    ours, theirs = pair.ours.take(rows), pair.theirs.take(rows)
    kinds = [kind for kind in TYPICAL if _costs_as_much(kind, measured) and not kind.startswith(SLOW)]
    kinds = [kind for kind in kinds if ours.shape[1] % block_sizes(kind)[0] == 0]
    sides = [(kind, side) for side in (theirs, ours) for kind in kinds]
    made = quantized([QuantizedRows(kind, side) for kind, side in sides])
    limit = min(max(measured.limit, EXACT), SHARE * measured.distance.nmse)
    for (kind, side), values in zip(sides, made, strict=True):
        other, whose = (ours, "these are") if side is theirs else (theirs, "the other side's are")
        if values is not None and nmse(other, values.reshape(other.shape), 0) <= limit:
            stored = (pair.ours if side is theirs else pair.theirs).kind
            yield Oddity(pair.name, f"was quantized before: {whose} {kind}'s values, stored as {stored}", "twice")


def _costs_as_much(kind: str, measured: Measured) -> bool:
    """Whether a type costs about as much as a tensor is off, and more than its own."""
    cost = TYPICAL[kind]
    return cost / 10 <= measured.distance.nmse <= 10 * cost and cost > measured.cost.nmse


def low_rank(measured: Measured) -> Oddity | None:
    """That a tensor differs by a matrix of low rank: an adapter that was merged into it, or taken out."""
    pair = measured.pair
    if len(pair.theirs.shape) < 2:
        return None
    rows = sample(pair.ours, MOST_ROWS)
    theirs = pair.theirs.take(rows).astype(np.float64)
    gap = pair.ours.take(rows) - theirs
    square = gap @ gap.T if len(gap) <= gap.shape[1] else gap.T @ gap
    sizes = np.sqrt(np.maximum(np.linalg.eigvalsh(square)[::-1], 0.0))
    squares = sizes**2
    left = squares.sum() - np.cumsum(squares)
    own, is_exact = float(np.square(theirs).sum()), {pair.ours.kind, pair.theirs.kind} <= {*PLAIN}
    limit = max(measured.limit, LEFT_EXACT if is_exact else LEFT)
    for rank in range(1, min(MOST_RANK, len(sizes) // 4) + 1):
        if left[rank - 1] <= limit * own and sizes[rank - 1] > GAP * sizes[rank]:
            size = float(np.sqrt(squares.sum() / own)) if own else float("inf")
            says = (
                f"differs by a matrix of rank {rank}, {size:.3g} times its size, as where an adapter is merged into one"
            )
            return Oddity(pair.name, says, "low-rank")
    return None
