"""Tensors that are read a few rows at a time, and what converters do to them, undone or done without a copy.

A view's rows run through all leading axes: a tensor [expert, out, in] has expert * out rows of ``in`` values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Protocol

import numpy as np
from llamaref import Weights
from numpy.typing import NDArray

Array = NDArray[Any]
SOME = 1 << 19  # values that are read at once


class View(Protocol):
    """A tensor to be read by rows. ``kind`` is the type that it is stored as."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def kind(self) -> str: ...

    def take(self, rows: Array) -> Array:
        """Rows by their numbers, float32: [row, value]."""
        ...


def rows_of(view: View) -> int:
    """How many rows there are, through all leading axes."""
    return int(np.prod(view.shape[:-1], dtype=np.int64))


def width_of(view: View) -> int:
    """Values of a row."""
    return view.shape[-1]


def plain(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without axes of one."""
    return tuple(size for size in shape if size != 1)


def whole(view: View) -> Array:
    """All of it: [row, value]."""
    return view.take(np.arange(rows_of(view)))


def blocks_of_rows(view: View) -> Iterator[Array]:
    """The numbers of all rows, some at a time."""
    step = max(1, SOME // max(1, width_of(view)))
    for start in range(0, rows_of(view), step):
        yield np.arange(start, min(start + step, rows_of(view)))


def sample(view: View, most: int) -> Array:
    """The numbers of up to so many rows, spread at random, the same each time."""
    count = rows_of(view)
    if count <= most:
        return np.arange(count)
    return np.sort(np.random.default_rng(count).choice(count, most, replace=False))


@dataclass(frozen=True)
class InFile:
    """A tensor of a GGUF file. ``decode``: a faster decoder of its rows than gguf-py's; ``scale``: a factor of all of
    it, or of each expert. ``added``: what is added to its rows.
    """

    weights: Weights
    name: str
    decode: Callable[[Array], Array] | None = None
    scale: Array | None = None
    added: Callable[[Array], Array] | None = None

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return self.weights.shape(self.name)

    @cached_property
    def kind(self) -> str:
        return self.weights.type(self.name)

    @cached_property
    def _rows(self) -> Array:
        stored = self.weights.read_raw(self.name)
        return stored.reshape(-1, stored.shape[-1])

    def take(self, rows: Array) -> Array:
        first = int(rows[0]) if len(rows) else 0
        run = len(rows) > 0 and int(rows[-1]) - first == len(rows) - 1 and bool((np.diff(rows) == 1).all())
        some = self._rows[first : first + len(rows)] if run else self._rows[rows]
        with np.errstate(all="ignore"):
            values = self.decode(some) if self.decode is not None else self.weights.decode_rows(self.name, some)
            if self.scale is not None:
                values = values * self.scale[rows * len(self.scale) // len(self._rows)][:, None]
            if self.added is not None:
                values = values + self.added(rows)
        return np.asarray(values, np.float32)


@dataclass(frozen=True)
class Stored:
    """An array that is mapped or in memory; bfloat16 are whole numbers, ``kind`` says so."""

    array: Array
    kind: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape or (1,)

    def take(self, rows: Array) -> Array:
        return widened(self.array.reshape(-1, self.shape[-1])[rows], self.kind)


def widened(values: Array, kind: str) -> Array:
    """Stored values as float32."""
    if kind == "BF16":
        return (np.asarray(values).astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore"):
        return np.asarray(values, np.float32)


@dataclass(frozen=True)
class _Of:
    """What is made of another view."""

    of: View

    @property
    def kind(self) -> str:
        return self.of.kind


@dataclass(frozen=True)
class Picked(_Of):
    """All rows in another order, or some: row i is row ``order[i]``."""

    order: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape if len(self.order) == rows_of(self.of) else (len(self.order), width_of(self.of))

    def take(self, rows: Array) -> Array:
        return self.of.take(self.order[rows])


@dataclass(frozen=True)
class Mapped(_Of):
    """Every value through a function."""

    function: Callable[[Array], Array]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape

    def take(self, rows: Array) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(self.function(self.of.take(rows)), np.float32)


@dataclass(frozen=True)
class Shaped(_Of):
    """The same values in order under another shape."""

    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raise ValueError for another number of values."""
        if prod(self.shape) != prod(self.of.shape):
            raise ValueError(f"{self.of.shape} cannot be {self.shape}")

    def take(self, rows: Array) -> Array:
        if width_of(self.of) == self.shape[-1]:
            return self.of.take(rows)
        return whole(self.of).reshape(-1, self.shape[-1])[rows]


@dataclass(frozen=True)
class Transposed(_Of):
    """The last two axes swapped."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.of.shape[:-2], self.of.shape[-1], self.of.shape[-2])

    @cached_property
    def _turned(self) -> Array:
        return np.ascontiguousarray(np.swapaxes(whole(self.of).reshape(self.of.shape), -1, -2))

    def take(self, rows: Array) -> Array:
        return np.asarray(self._turned.reshape(-1, self.shape[-1])[rows])


@dataclass(frozen=True)
class Joined:
    """Views one after the other along their rows, under one shape."""

    parts: Sequence[View]
    shape: tuple[int, ...]

    @property
    def kind(self) -> str:
        return self.parts[0].kind

    @cached_property
    def _starts(self) -> Array:
        return np.cumsum([0, *map(rows_of, self.parts)])

    def take(self, rows: Array) -> Array:
        out = np.empty((len(rows), self.shape[-1]), np.float32)
        which = np.searchsorted(self._starts, rows, side="right") - 1
        for part in np.unique(which):
            mine = which == part
            out[mine] = self.parts[part].take(rows[mine] - self._starts[part])
        return out


def stacked(parts: Sequence[View]) -> Joined:
    """Tensors of one shape under a new first axis. Raises ValueError where they are of several."""
    if len({part.shape for part in parts}) > 1:
        raise ValueError("of several shapes")
    return Joined(parts, (len(parts), *parts[0].shape))


def concatenated(parts: Sequence[View]) -> Joined:
    """Tensors one after the other along the rows of the last axis but one; vectors, along their only one.

    Raises ValueError for rows of several widths.
    """
    if len({part.shape[1:] for part in parts}) > 1:
        raise ValueError("of several widths")
    if len(parts[0].shape) == 1:
        values = np.concatenate([whole(part).reshape(-1) for part in parts])
        return Joined((Stored(values, parts[0].kind),), values.shape)
    rows = sum(part.shape[-2] for part in parts)
    return Joined(parts, (rows, parts[0].shape[-1]))


def length_of(view: View) -> int:
    """How many rows there are; of a vector, values."""
    return rows_of(view) if len(view.shape) > 1 else view.shape[0]


def reordered(view: View, order: Array) -> View:
    """The rows in another order; of a vector, its values."""
    if len(view.shape) > 1:
        return Picked(view, order)
    return Shaped(Picked(Shaped(view, (view.shape[0], 1)), order), view.shape)


def cut(view: View, first: int, last: int) -> View:
    """Rows ``first`` to before ``last``; of a vector, its values."""
    if len(view.shape) == 1:
        return Stored(whole(view).reshape(-1)[first:last], "F32")
    return Picked(view, np.arange(first, last))
