"""Why a tensor is not what it should be: guesses are made of the other side, and the one that fits is named."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.file.distance import Meter, run_in_words
from llamadiff.ext.file.orders import order_of
from llamadiff.ext.file.pairs import Measured, Pair
from llamadiff.ext.file.readings import another_type, low_rank, quantized_before
from llamadiff.ext.file.views import View, blocks_of_rows, rows_of, sample, whole, width_of
from llamadiff.ext.file.weight_faults import plain_changes
from llamadiff.numerics.metrics import nmse
from llamadiff.result.oddity import Oddity

Array = NDArray[Any]
ROWS = 64  # that a guess is tried on first
SOME_ROWS = 256  # of those that are off, that are looked at value by value
INSIDE = 0.01  # of the largest squared error: below, a value is not what is off
EVERYWHERE = 0.5  # of the blocks are off: the tensor as a whole is another
LARGEST = 1 << 28  # values of a tensor that is looked at whole


@dataclass(frozen=True)
class Guess:
    """What a tensor may be instead, and what to say if it is."""

    cause: str
    says: str
    view: View


def explained(measured: Measured, guesses: Iterable[Guess], heads: int) -> Oddity:
    """What is wrong with a tensor, by the first guess that fits; else where it is off, and by how much."""
    pair, off = measured.pair, measured.off()
    if measured.distance.not_finite:
        return Oddity(pair.name, f"{measured.distance.not_finite} values are not finite, {measured.place()}",
                      "not-finite")  # fmt: skip
    if not off.any() or off.mean() > EVERYWHERE:
        found = _as_a_whole(measured, guesses, heads)
    else:
        told = _in_part(measured, off)
        found = Oddity(pair.name, f"{measured.place()}: {told}", "part") if told is not None else None
        found = found or _by_order(measured, heads)
    says = f"{_size(measured)}, {measured.place()}{_inside(measured, off)}"
    return found or Oddity(pair.name, says, "unknown")


def _as_a_whole(measured: Measured, guesses: Iterable[Guess], heads: int) -> Oddity | None:
    """What a tensor holds instead, by its types, by the guesses, by measuring."""
    pair, limit = measured.pair, measured.limit
    found = next(another_type(measured), None)
    if found is None:
        guess = next((guess for guess in guesses if fits(guess.view, pair, limit)), None)
        found = Oddity(pair.name, guess.says, guess.cause) if guess is not None else None
    if found is None:
        told = next(_by_measuring(pair, heads, limit), None)
        found = Oddity(pair.name, told, "changed") if told is not None else low_rank(measured)
    return found or next(quantized_before(measured), None)


def _by_order(measured: Measured, heads: int) -> Oddity | None:
    """Rows or columns in another order, of which half or more stay in their places."""
    told = next(_by_measuring(measured.pair, heads, measured.limit), None)
    return Oddity(measured.pair.name, told, "changed") if told is not None else None


def _size(measured: Measured) -> str:
    """How far off, beside what the type costs."""
    d, cost = measured.distance, measured.cost.nmse
    row, block, worst = d.worst_block
    allowed = f"its type costs {cost:.1e}" if cost else "its type costs nothing"
    return f"NMSE {d.nmse:.1e} ({d.snr:.1f} dB) where {allowed}; worst in row {row}, block {block}: {worst:.1e}"


def _inside(measured: Measured, off: Array) -> str:
    """Which values of the blocks that are off are: a sub-block, or more; nothing where all are."""
    if not off.any() or off.mean() > EVERYWHERE:
        return ""
    rows = np.flatnonzero(off.any(axis=1))[:SOME_ROWS]
    shape = (len(rows), -1, measured.block)
    wrong, right = (side.take(rows).reshape(shape)[off[rows]] for side in (measured.pair.ours, measured.pair.theirs))
    error = ((wrong.astype(np.float64) - right) ** 2).mean(axis=0)
    bad = np.flatnonzero(error > INSIDE * error.max())
    return "" if len(bad) > len(error) // 2 else f"; of each, {run_in_words(bad, 'value', len(error))}"


def fits(view: View, pair: Pair, limit: float) -> bool:
    """Whether a tensor of the file is a view, within a limit: a few rows are tried first."""
    if _sizes(view.shape) != _sizes(pair.ours.shape):
        return False
    some = sample(pair.ours, ROWS)
    if not _near(pair.ours.take(some), view.take(some), 4 * limit):
        return False
    meter = Meter(1, width_of(view))
    for rows in blocks_of_rows(pair.ours):
        meter.add(pair.ours.take(rows), view.take(rows))
    return meter.distance().nmse <= limit


def _sizes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without the axes of one before the others."""
    kept = [size for number, size in enumerate(shape) if size > 1 or number == len(shape) - 1]
    return tuple(kept)


def _near(values: Array, expected: Array, limit: float) -> bool:
    return nmse(values, expected, 0) <= limit


def _by_measuring(pair: Pair, heads: int, limit: float) -> Iterator[str]:
    """What was done to all values alike, or to their order."""
    shape = pair.theirs.shape
    if int(np.prod(shape)) > LARGEST:
        return
    ours, theirs = whole(pair.ours), whole(pair.theirs)
    yield from plain_changes(ours.reshape(-1), theirs.reshape(-1), shape, limit)
    rows = (-1, shape[-1] if len(shape) > 1 else 1)
    order = order_of(ours.reshape(rows), theirs.reshape(rows), heads, limit) if ours.any() else None
    if order is not None:
        yield order


def _in_part(measured: Measured, off: Array) -> str | None:
    """What the blocks that are off hold instead."""
    pair, block = measured.pair, measured.block
    rows = np.flatnonzero(off.any(axis=1))
    ours, theirs = pair.ours.take(rows), pair.theirs.take(rows)
    if off[rows].all() and len(rows) > 1:
        order = order_of(ours, theirs, 0, measured.limit)
        if order is not None:
            return "these two rows are swapped" if len(rows) == 2 else f"of these rows, {order}"
    if off[rows].all() and len(rows) == 1 and rows_of(pair.ours) > 1:
        other = _row_like(pair, ours, measured.limit)
        if other is not None and other != rows[0]:
            return f"row {rows[0]} holds row {other}"
    shape = (len(rows), -1, block)
    wrong, right = ours.reshape(shape)[off[rows]], theirs.reshape(shape)[off[rows]]
    told = next(plain_changes(wrong.reshape(-1), right.reshape(-1), (right.size,), measured.limit), None)
    if told is not None:
        return told
    return _zero_part(wrong, right, measured) or _shifted(ours, theirs, off[rows], measured)


def _row_like(pair: Pair, row: Array, limit: float) -> int | None:
    """The row of the other side that one is."""
    for rows in blocks_of_rows(pair.theirs):
        some = pair.theirs.take(rows).astype(np.float64)
        error = ((some - row) ** 2).sum(axis=1) / np.maximum((some**2).sum(axis=1), 1e-30)
        if error.min() <= limit:
            return int(rows[error.argmin()])
    return None


def _zero_part(wrong: Array, right: Array, measured: Measured) -> str | None:
    """That the same values of every block are zero, and the rest is right."""
    zero = (wrong == 0).all(axis=0) & (right != 0).any(axis=0)
    rest = ~zero
    if not zero.any() or (rest.any() and not _near(wrong[:, rest], right[:, rest], 10 * measured.limit)):
        return None
    return f"{run_in_words(np.flatnonzero(zero), 'value', len(zero))} of each of these blocks are zero"


def _shifted(ours: Array, theirs: Array, off: Array, measured: Measured) -> str | None:
    """That each of these blocks is the one before it or after it."""
    shape = (len(ours), -1, measured.block)
    a, b = ours.reshape(shape), theirs.reshape(shape)
    for shift, words in ((1, "the block before"), (-1, "the block after")):
        if a.shape[1] > 1 and _near(a[off], np.roll(b, shift, axis=1)[off], 4 * measured.limit):
            return f"each holds {words}"
    return None
