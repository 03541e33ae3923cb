"""What a misreading of blocks is, a bug that misreads blocks, and bytes read otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from llamaref import Weights
from llamaref.weights import block_sizes
from numpy.typing import NDArray

from llamadiff.ext.file.blocks.fields import changed, field_of

Array = NDArray[Any]
Decode = Callable[[Array], Array]  # blocks [n, bytes] -> values [n, block]
Misread = Callable[[Array, Decode], Array]  # the same, by what the type's right decoding makes of any blocks
Change = Callable[[Array], Array]  # the bytes of a field [n, bytes] -> what is read in their place


@dataclass(frozen=True)
class Misreading:
    """A way to misread blocks: as a clause, the values that it gives, and the mistake's name.

    ``variant`` tells it from the others of a known bug; ``fix`` is what to do, where that is not all that bug's.
    """

    says: str
    read: Misread
    variant: str = ""
    cause: str = ""
    fix: str = ""


Readings = Callable[[str, int], Iterator[Misreading]]  # a type, blocks in a row -> the ways to misread it


@dataclass(frozen=True)
class BlockBug:
    """A way to misread blocks that engines are known to have, and what to do about it."""

    name: str
    about: str
    fix: str
    source: str
    readings: Readings

    def of(self, kind: str, per_row: int) -> Iterator[Misreading]:
        """What it comes to with a type's blocks, so many in a row: nothing, or one or more misreadings."""
        return (replace(each, cause=self.name) for each in self.readings(kind, per_row))


def block_bug(*, fix: str, source: str = "") -> Callable[[Readings], BlockBug]:
    """Make a bug of a function that misreads blocks: it has its name, and the docstring says what the bug is."""

    def made(readings: Readings) -> BlockBug:
        name, about = readings.__name__.replace("_", "-"), " ".join((readings.__doc__ or "").split())
        return BlockBug(name, about, fix, source, readings)

    return made


def with_field(kind: str, name: str, change: Change) -> Misread:
    """Blocks whose bytes in one field are read in another way."""
    where = field_of(kind, name)
    return lambda blocks, decode: decode(changed(blocks, where, change(blocks[:, where])))


def displaced(w: Weights, name: str) -> Iterator[tuple[str, int, Array]]:
    """A matrix as it is read from a place beside its own: as a clause, how many bytes off, and the rows found there."""
    if len(w.shape(name)) != 2:
        return
    _, size = block_sizes(w.type(name))
    for shift in dict.fromkeys((32, -32, size, -size, 16, -16)):
        rows = w.stored_beside(name, shift)
        if rows is not None:
            says = f"reads {name} from {abs(shift)} bytes {'after' if shift > 0 else 'before'} its start"
            yield says, shift, rows


def zero(field: Array) -> Array:
    """No bit is set."""
    return np.zeros_like(field)


def all_set(field: Array) -> Array:
    """Every bit is set."""
    return np.full_like(field, 255)


def with_nibbles_swapped(field: Array) -> Array:
    """High nibbles for low ones."""
    return (field << 4) | (field >> 4)


def halves_swapped(field: Array) -> Array:
    """The second half of the bytes before the first."""
    return np.roll(field, field.shape[1] // 2, axis=1)


def first_half_twice(field: Array) -> Array:
    """The first half of the bytes for both."""
    half = field[:, : (field.shape[1] + 1) // 2]
    return np.concatenate([half, half], axis=1)[:, : field.shape[1]]


def every_second_twice(field: Array) -> Array:
    """Each second byte for the one after it too."""
    return np.repeat(field[:, ::2], 2, axis=1)[:, : field.shape[1]]


def parts_reversed(bits: int) -> Change:
    """Each byte's parts of so many bits in the opposite order."""

    def change(field: Array) -> Array:
        parts = np.unpackbits(field, axis=1).reshape(len(field), field.shape[1], 8 // bits, bits)
        return np.packbits(parts[:, :, ::-1].reshape(len(field), -1), axis=1)

    return change
