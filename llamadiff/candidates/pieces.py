"""The tensors of a candidate under its own names, still in their files or in memory; and each in a tap's shape."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.candidates import name_map
from llamadiff.engines.model_file import Runnable
from llamadiff.system.errors import UserError
from llamadiff.trace import taps
from llamadiff.trace.last_row import in_last_row, is_last_row

Array = NDArray[Any]
_ROW = re.compile(r"(.+)@(-?[0-9]{1,9})")


@dataclass(frozen=True)
class Piece:
    """One tensor of a dump under the engine's own name; ``row`` if it is one token's alone, ``indices`` of its values
    if they are not all."""

    name: str
    array: Array
    row: int | None = None
    indices: Array | None = None

    @property
    def shape(self) -> tuple[int, ...] | None:
        return self.array.shape

    def load(self, most: int) -> Piece:
        return self


@dataclass(frozen=True)
class Unread:
    """A tensor that is still in its file: all that is known is its header's shape (None: a text, which has none).

    ``read`` gets its values, and the indices of those that are there if they are not all; of a text, up to so many.
    """

    name: str
    row: int | None
    shape: tuple[int, ...] | None
    read: Callable[[int], tuple[Array, Array | None]]

    def load(self, most: int) -> Piece:
        """Its values in memory."""
        array, indices = self.read(most)
        return Piece(self.name, array, self.row, indices)


def named_row(name: str) -> tuple[str, int | None]:
    """A tensor's name without the token that it is of alone, and that: ``result_output@-1`` is the last one's row."""
    match = _ROW.fullmatch(name)
    return (match[1], int(match[2])) if match else (name, None)


def place_in_tap(
    piece: Piece, tap: taps.Tap, entry: name_map.Entry, model: Runnable, n_tokens: int
) -> tuple[Array, Array | None]:
    """A tensor in the tap's shape, and which of its values are known (None: all).

    One of another size stays as it is: that is for the report to say.
    """
    shape = taps.shape_of(tap, n_tokens, model.sizes)
    if piece.row is None and piece.indices is None:
        if is_last_row(tap, piece.array.size, shape):
            return in_last_row(piece.array, shape)
        try:
            return name_map.fit_to_tap(piece.array, tap, entry, model, n_tokens), None
        except name_map.OtherSizeError:
            if piece.array.ndim <= max(1, tap.row_axis):  # without rows there is nothing more to say
                raise
            return piece.array, None
    values, mask, rows = np.zeros(shape, np.float32), np.zeros(shape, bool), slice(None)
    if piece.row is not None:
        if tap.row_axis != 0 or not -n_tokens <= piece.row < n_tokens:
            raise UserError(
                f"{piece.name}@{piece.row}: there are {n_tokens} tokens, 0 to {n_tokens - 1} (-1 is the last)"
            )
        rows = slice(piece.row % n_tokens, piece.row % n_tokens + 1)
    flat, flags = values[rows].reshape(-1), mask[rows].reshape(-1)  # views
    indices = np.arange(piece.array.size) if piece.indices is None else piece.indices
    if indices.size and (indices.max() >= flat.size or indices.min() < 0):
        raise UserError(f"{piece.name}: index {int(indices.max())} is outside the {flat.size} values of {tap.name}")
    flat[indices], flags[indices] = piece.array.reshape(-1), True
    return values, mask
