"""What a picture shows of one tensor against what is right: a coarse map of errors, the worst place, histograms.

It is small however large the tensor is; of the values that a cell of a map stands for it has the largest error, so that
the worst element is always seen.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.numerics.metrics import Rows, gaps, ratio

Array = NDArray[Any]
MOST_ROWS, MOST_COLUMNS = 64, 128  # cells of a map
MOST_PARTS = 256  # bars of a profile
BINS, SAMPLED = 48, 1 << 16  # of a histogram; of how many values it is made
WINDOW = 16  # values around the worst one
LEAST, MOST = -16.0, 4.0  # powers of ten that the levels 1 and 255 stand for


@dataclass(frozen=True)
class Grid:
    """A map of ``rows`` times ``columns`` cells over ``of`` values.

    ``levels`` is a byte a cell, row by row, in base64: 0 no error, else 1 to 255 for errors of 10^LEAST to 10^MOST, in
    even steps of their logarithm; what is not finite is 255.
    """

    rows: int
    columns: int
    of: tuple[int, int]
    levels: str


@dataclass(frozen=True)
class Window:
    """Neighbours of the worst value, from column ``start`` on; what is right and what was recorded."""

    start: int
    expected: tuple[float, ...]
    recorded: tuple[float, ...]


@dataclass(frozen=True)
class Histogram:
    """How many values of both sides lie in each of the equal parts between ``low`` and ``high``."""

    low: float
    high: float
    expected: tuple[int, ...]
    recorded: tuple[int, ...]


@dataclass(frozen=True)
class Closeup:
    """One tensor. ``axes`` name rows and columns of the map, whose errors are relative to the rms of what is right.

    ``within`` names the part that the map is of, where it is not all: ``head 3``. ``worst`` is the worst element's row
    and column in it. ``per_row`` is the NMSE of rows, of groups of them the largest; ``heads`` that of each head, if
    there are any.
    """

    axes: tuple[str, str]
    within: str
    errors: Grid
    worst: tuple[int, int]
    window: Window
    histogram: Histogram
    per_row: tuple[float, ...]
    heads: tuple[float, ...] = ()


def closeup(recorded: Rows, right: Rows, axes: Sequence[str], index: Sequence[int]) -> Closeup | None:
    """The close-up of a tensor with these ``axes``, whose worst element is at ``index``; None for one without values.

    Rows are those that both are made of; of scores, whose rows are queries, the map has the worst element's head.
    """
    if not right.size or len(index) != len(right.shape):
        return None
    axis = right.axis
    row, others = index[axis], [place for number, place in enumerate(index) if number != axis]
    names = [name for number, name in enumerate(axes) if number != axis]
    width = right.size // right.shape[0]
    plane = slice(0, width) if axis == 0 else slice(others[0] * right.shape[-1], (others[0] + 1) * right.shape[-1])
    column = int(np.ravel_multi_index(others, right.shape[1:])) if others else 0
    reference = right.reference()
    rms = float(np.sqrt(reference.sum() / right.size))
    return Closeup(
        axes=(axes[axis], "*".join(names) if axis == 0 else names[-1]),
        within="" if axis == 0 else f"{names[0]} {others[0]}",
        errors=_map(recorded, right, plane, rms),
        worst=(row, column - plane.start),
        window=_window(recorded, right, row, column, plane),
        histogram=_histogram(recorded, right, row),
        per_row=_profile([ratio(float(e), float(r)) for e, r in zip(right.errors(recorded), reference, strict=True)]),
        heads=_heads(recorded, right) if len(right.shape) == 3 else (),
    )


def _map(recorded: Rows, right: Rows, plane: slice, rms: float) -> Grid:
    """The largest error of each cell."""
    count, width = right.shape[0], plane.stop - plane.start
    rows, columns = min(count, MOST_ROWS), min(width, MOST_COLUMNS)
    starts = np.arange(columns) * width // columns
    cells = np.zeros((rows, columns))
    for some in right.blocks:
        errors = np.abs(gaps(recorded, right, some))[:, plane]
        places = np.arange(some.start, some.start + len(errors)) * rows // count
        np.maximum.at(cells, places, np.maximum.reduceat(errors, starts, axis=1))
    return grid(cells / rms if rms > 0 else np.where(cells > 0, np.inf, 0.0), (count, width))


def grid(cells: Array, of: tuple[int, int]) -> Grid:
    """Errors [row, column] as a Grid."""
    return Grid(cells.shape[0], cells.shape[1], of, b64encode(levels(cells).tobytes()).decode())


def coarse(values: Array, columns: int = MOST_PARTS) -> Array:
    """[row, column] with no more than so many columns: of each group the largest value."""
    width = values.shape[1]
    if width <= columns:
        return values
    return np.asarray(np.fmax.reduceat(values, np.arange(columns) * width // columns, axis=1))


def levels(errors: Array) -> Array:
    """Errors as the bytes of a Grid; what is NaN (not judged) as no error."""
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = 1 + (np.log10(errors) - LEAST) * (254 / (MOST - LEAST))
    whole = np.clip(np.nan_to_num(scaled, nan=0.0, posinf=255.0, neginf=0.0), 1, 255)
    return np.where(errors > 0, np.rint(whole), 0).astype(np.uint8)


def _window(recorded: Rows, right: Rows, row: int, column: int, plane: slice) -> Window:
    start = max(plane.start, min(column - WINDOW // 2, plane.stop - WINDOW))
    some = slice(start, min(start + WINDOW, plane.stop))
    sides = (tuple(map(float, side.row_values(slice(row, row + 1))[some])) for side in (right, recorded))
    return Window(start - plane.start, *sides)


def _histogram(recorded: Rows, right: Rows, row: int) -> Histogram:
    """Of large tensors every n-th row, and the worst one."""
    step = max(1, right.size // SAMPLED)
    worst = [slice(row, row + 1)] if row % step else []
    sides = [np.concatenate([side.every(step), *map(side.row_values, worst)]) for side in (right, recorded)]
    sides = [values[np.isfinite(values)] for values in sides]
    filled = [values for values in sides if values.size]
    low = min((float(values.min()) for values in filled), default=0.0)
    high = max((float(values.max()) for values in filled), default=0.0)
    return Histogram(low, high, *(_counts(values, low, high) for values in sides))


def _counts(values: Array, low: float, high: float) -> tuple[int, ...]:
    """How many values are in each bin. Halves are taken, as the distance of two large numbers may be infinite."""
    span = high / 2 - low / 2
    places = (values / 2 - low / 2) / span * BINS if span > 0 else np.zeros(values.shape)
    return tuple(map(int, np.bincount(np.minimum(places.astype(np.intp), BINS - 1), minlength=BINS)))


def _profile(errors: Sequence[float]) -> tuple[float, ...]:
    return tuple(map(float, coarse(np.asarray([errors]))[0]))


def _heads(recorded: Rows, right: Rows) -> tuple[float, ...]:
    """The NMSE of each head: the middle axis of rows, heads and values."""
    heads, size = right.shape[1:]
    errors, sizes = np.zeros(heads), np.zeros(heads)
    for some in right.blocks:
        errors += np.square(gaps(recorded, right, some)).reshape(-1, heads, size).sum((0, 2))
        sizes += np.square(np.nan_to_num(right.block(some), posinf=0, neginf=0)).reshape(-1, heads, size).sum((0, 2))
    return tuple(ratio(float(e), float(s)) for e, s in zip(errors, sizes, strict=True)) if heads <= MOST_PARTS else ()
