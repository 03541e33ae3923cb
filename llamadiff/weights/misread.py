"""How a stranger misread a type's blocks: layouts are misread in every known way, and the one that fits is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from llamaref import ModelError, Weights
from llamaref.weights import block_sizes, decode
from numpy.typing import NDArray

from llamadiff.diagnose.bugs.quant_blocks import FIELDS, StoredWeight, changed
from llamadiff.diagnose.case import Case
from llamadiff.diagnose.registry import known_bugs, reads_blocks
from llamadiff.numerics.orders import order_in_words
from llamadiff.weights.distance import run_in_words
from llamadiff.weights.layouts import HALVES, LAYOUTS

Array = NDArray[Any]
Decode = Callable[[Array], Array]  # blocks [n, bytes] -> values [n, block]
FIRST = 512  # blocks that a misreading is tried on before all
NEAR = 1e-5  # squared error of a block, by its size, that a right reading may leave: sixteen-bit values have less
SHARE = 0.99  # of the blocks must fit: engines may do something else at the ends
WORDS = {
    "d": "scale d", "m": "minimum", "e": "scale", "qs": "quants", "qh": "high bits", "signs": "signs",
    "scales": "scales", "scales_h": "scales' high bits", "scales_l": "scales' low bits", "values": "values",
}  # fmt: skip


@dataclass(frozen=True)
class Misreading:
    """A way to misread blocks, by the name of the mistake and in words."""

    cause: str
    says: str


@dataclass(frozen=True)
class _Blocks:
    """A tensor's blocks, their type, and what a stranger made of them: [block, value]."""

    kind: str
    blocks: Array
    got: Array
    right: Array

    def decoded(self, blocks: Array) -> Array:
        """Any bytes as the type says."""
        with np.errstate(all="ignore"):
            return decode(self.kind, np.ascontiguousarray(blocks)).reshape(len(blocks), -1)

    def head(self, count: int) -> _Blocks:
        return _Blocks(self.kind, self.blocks[:count], self.got[:count], self.right[:count])

    def is_given_by(self, values: Array) -> bool:
        """Whether these are the stranger's values, but for a few blocks."""
        return bool(_alike(self.got[: len(values)], values).mean() >= SHARE)


def _alike(got: Array, values: Array) -> Array:
    """Which blocks are the same: [block]."""
    a, b = got.astype(np.float64), values.astype(np.float64)
    with np.errstate(all="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b)) | (np.isinf(a) & np.isinf(b))
        gap = np.where(same, 0.0, a - b)
        size = np.where(np.isfinite(b), b, 0.0)
        error = np.einsum("ij,ij->i", gap, gap)
        return np.asarray(error <= NEAR * np.einsum("ij,ij->i", size, size))


@np.errstate(all="ignore")  # what is no scale may be anything
def misreading(weights: Weights, name: str, values: Array) -> Misreading | None:
    """What gives a stranger's values of a tensor; None if no known misreading does, or they are right."""
    kind = weights.type(name)
    per_block, size = block_sizes(kind)
    stored = np.ascontiguousarray(weights.stored(name)).view(np.uint8).reshape(-1, size)
    if kind not in LAYOUTS:
        return None
    wide = _wide(kind, len(stored))
    if wide > 1:  # types without blocks: some values at a time
        stored, per_block = stored.reshape(-1, size * wide), wide
    whole = _Blocks(kind, stored, values.reshape(-1, per_block), _right(kind, stored, size))
    first = whole.head(FIRST)
    for told, misread in _ways(weights, name, first, wide):
        try:
            again = misread(whole.blocks) if first.is_given_by(misread(first.blocks)) else None
        except (ModelError, ValueError, IndexError, KeyError):
            continue
        if again is not None and whole.is_given_by(again):
            return told
    return None


def _wide(kind: str, count: int) -> int:
    """How many values of a type without blocks are looked at together; 1 for types of blocks."""
    if block_sizes(kind)[0] > 1:
        return 1
    return next(n for n in (32, 16, 8, 4, 2, 1) if count % n == 0)


def _right(kind: str, stored: Array, size: int) -> Array:
    with np.errstate(all="ignore"):
        return decode(kind, _natural(kind, stored.reshape(-1, size))).reshape(len(stored), -1)


def _natural(kind: str, blocks: Array) -> Array:
    """Bytes as gguf-py wants them: float16 as such."""
    return blocks.view(np.float16) if kind == "F16" else blocks


Way = tuple[Misreading, Decode]


def _ways(weights: Weights, name: str, some: _Blocks, wide: int) -> Iterator[Way]:
    """Every misreading of a type, the likeliest first."""
    if wide > 1 or some.kind in ("F16", "BF16"):
        yield from _sixteen_bits(some)
        return
    yield from _unwritten(some)
    yield from _known(weights, name, some)
    yield from _signs(some)
    yield from _fields(some)
    yield from _rearranged(some)
    yield from _scaled(some)
    yield from _other_types(some)
    yield from _strides(some)


def _known(weights: Weights, name: str, some: _Blocks) -> Iterator[Way]:
    """What diagnosis knows of misread weights, asked of this tensor alone."""
    if some.kind not in FIELDS:
        return
    case = cast("Case", SimpleNamespace(engine=SimpleNamespace(w=weights)))  # a weight alone has no run
    for known in known_bugs().values():
        if not reads_blocks(known):
            continue
        for change in known.changes(StoredWeight(name), case):
            recipe = change.recipe
            if isinstance(recipe, StoredWeight):
                yield Misreading(known.name, change.says), _reader(weights, name, some, recipe)


def _reader(weights: Weights, name: str, some: _Blocks, recipe: StoredWeight) -> Decode:
    """A changed weight's values, of as many blocks as are asked for."""
    stored = weights.stored(name)
    per_row = stored.shape[-1] // some.blocks.shape[1]

    def read(blocks: Array) -> Array:
        count = len(blocks)
        rows = -(-count // per_row)
        source = stored if recipe.beside is None else recipe.beside
        flat = source.reshape(-1, stored.shape[-1])[:rows]
        values = recipe.read(flat) if recipe.read is not None else weights.decoded(name, flat)
        return np.asarray(values.reshape(-1, some.got.shape[1])[:count])

    return read


def _rearranged(some: _Blocks) -> Iterator[Way]:
    """The same order within all blocks, whatever it is: found by the values that stand at each place."""
    good = np.isfinite(some.got).all(axis=1) & np.isfinite(some.right).all(axis=1) & some.right.any(axis=1)
    got, right = (side[good].astype(np.float64) for side in (some.got, some.right))
    if len(got) < 4:
        return
    scale = np.maximum(np.abs(right).max(axis=1, keepdims=True), 1e-300)
    got, right = got / scale, right / scale
    with np.errstate(all="ignore"):
        like = got.T @ right / np.sqrt(np.maximum((got**2).sum(axis=0)[:, None] * (right**2).sum(axis=0), 1e-300))
    order = like.argmax(axis=1)
    if len(set(order.tolist())) == len(order) and not (order == np.arange(len(order))).all():
        yield (
            Misreading("order-in-block", _order_in_words(some.kind, order)),
            lambda blocks: some.decoded(blocks)[:, order],
        )


def _order_in_words(kind: str, order: Array) -> str:
    """An order of a block's values, by its name if it has one."""
    count = len(order)
    here = np.arange(count)
    for size in (count, 64, 128, 32, 16):
        if size > count or count % size:
            continue
        local = here.reshape(-1, 2, size // 2).swapaxes(1, 2).reshape(-1)
        if (order == local).all():
            return f"takes a {kind} byte's parts for neighbours: they are {size // 2} values apart"
        if (order == np.roll(here.reshape(-1, 2, size // 2), 1, axis=1).reshape(-1)).all():
            return f"swaps the halves of every {size} values of {kind}: the high and low nibbles"
    return f"within each {kind} block, {order_in_words(order, 'value')}"


def _unwritten(some: _Blocks) -> Iterator[Way]:
    """A part of every block is left zero."""
    zero = (some.got == 0).all(axis=0) & (some.right != 0).any(axis=0)
    if zero.any():
        where = run_in_words(np.flatnonzero(zero), "value", len(zero))
        yield Misreading("not-written", f"leaves {where} of each {some.kind} block zero"), \
            lambda blocks: np.where(zero, 0, some.decoded(blocks))  # fmt: skip


def _fields(some: _Blocks) -> Iterator[Way]:
    """Each field's bytes read in another way."""
    for name, (first, last) in LAYOUTS[some.kind].items():
        where, what = slice(first, last), f"{some.kind}'s {WORDS[name]}"
        for cause, says, change in _changes(name, first, last):
            if name in HALVES and cause in ("nibbles-swapped", "field-ignored") and name == "d":
                continue
            yield Misreading(cause, says.format(what)), _with(some, where, change)


Change = Callable[[Array], Array]  # blocks -> the bytes of one field


def _with(some: _Blocks, where: slice, change: Change) -> Decode:
    return lambda blocks: some.decoded(changed(blocks, where, change(blocks)))


def _changes(name: str, first: int, last: int) -> Iterator[tuple[str, str, Change]]:
    """Ways to misread the bytes of a field."""
    size, where = last - first, slice(first, last)
    own: Change = lambda b: b[:, where]  # noqa: E731
    yield "nibbles-swapped", "swaps the nibbles of {}", lambda b: (own(b) << 4) | (own(b) >> 4)
    yield "field-ignored", "ignores {}", lambda b: np.zeros_like(own(b))
    yield "field-set", "takes {} for all set", lambda b: np.full_like(own(b), 255)
    yield "field-inverted", "inverts {}", lambda b: ~own(b)
    yield "bits-reversed", "reads {} from the other end of each byte", lambda b: _reversed(own(b), 1)
    yield "fields-reversed", "reads the two-bit fields of {} from the other end", lambda b: _reversed(own(b), 2)
    if size > 1:
        yield "byte-order", "reads {} in the other byte order", lambda b: own(b)[:, ::-1]
        yield "halves-swapped", "swaps the halves of {}", lambda b: np.roll(own(b), size // 2, axis=1)
        yield "pairs-swapped", "reads {} with each two bytes swapped", lambda b: _twos(own(b))
        yield "byte-late", "reads {} one byte late", lambda b: np.roll(b, -1, axis=1)[:, where]
        yield "byte-early", "reads {} one byte early", lambda b: np.roll(b, 1, axis=1)[:, where]
        yield "every-second", "reads every second byte of {} twice", lambda b: np.repeat(own(b)[:, ::2], 2, 1)[:, :size]
        yield "first-half-twice", "reads the first half of {} for both", lambda b: _first_half(own(b))
    yield "low-nibbles", "reads the low nibbles of {} alone", lambda b: own(b) & 15
    yield "high-nibbles", "reads the high nibbles of {} alone", lambda b: own(b) & 240
    yield "low-nibble-twice", "reads the low nibble of {} for both", lambda b: (own(b) & 15) * 17
    yield "high-nibble-twice", "reads the high nibble of {} for both", lambda b: (own(b) >> 4) * 17
    yield "highest-bit", "leaves out the highest bit of each byte of {}", lambda b: own(b) & 127
    yield "neighbours-field", "takes {} of the next block", lambda b: np.roll(own(b), -1, axis=0)
    yield "neighbours-field", "takes {} of the block before", lambda b: np.roll(own(b), 1, axis=0)


def _first_half(field: Array) -> Array:
    half = field[:, : (field.shape[1] + 1) // 2]
    return np.concatenate([half, half], axis=1)[:, : field.shape[1]]


def _twos(field: Array) -> Array:
    if field.shape[1] % 2:
        return field
    return field.reshape(len(field), -1, 2)[..., ::-1].reshape(field.shape)


def _reversed(field: Array, bits: int) -> Array:
    """Each byte's parts of so many bits in the opposite order."""
    parts = np.unpackbits(field, axis=1).reshape(len(field), field.shape[1], 8 // bits, bits)
    return np.packbits(parts[:, :, ::-1].reshape(len(field), -1), axis=1)


def _signs(some: _Blocks) -> Iterator[Way]:
    yield Misreading("sign", f"gives {some.kind}'s values the other sign"), lambda blocks: -some.decoded(blocks)
    yield (
        Misreading("sign", f"leaves out the sign of {some.kind}'s values"),
        lambda blocks: np.abs(some.decoded(blocks)),
    )


def _scaled(some: _Blocks) -> Iterator[Way]:
    """The scale left out, or read as something else; and one factor for all values."""
    place = LAYOUTS[some.kind].get("d")
    if place is not None:
        where = slice(*place)
        for cause, says, of in _SCALES:
            yield Misreading(cause, says.format(some.kind)), _rescaled(some, where, of)
    good = np.isfinite(some.got).all(axis=1) & some.right.any(axis=1)
    ratios = some.got[good].astype(np.float64), some.right[good].astype(np.float64)
    if len(ratios[0]):
        with np.errstate(all="ignore"):
            each = (ratios[0] * ratios[1]).sum(axis=1) / (ratios[1] ** 2).sum(axis=1)
        factor = float(np.median(each))
        if factor and np.isfinite(factor):
            yield Misreading("factor", f"multiplies {some.kind}'s values by {factor:.6g}"), \
                lambda blocks: some.decoded(blocks) * np.float32(factor)  # fmt: skip


def _as_bf16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


_SCALES: tuple[tuple[str, str, Callable[[Array], Array]], ...] = (
    ("scale-missing", "leaves out {}'s scale d", lambda bits: np.ones(len(bits), np.float32)),
    ("scale-missing", "reads {}'s scale as bfloat16; it is float16", _as_bf16),
    ("scale-sign", "leaves out the sign of {}'s scale d", lambda bits: abs(bits.view(np.float16).astype(np.float32))),
    ("scale-whole", "reads {}'s scale as a whole number", lambda bits: bits.astype(np.float32)),
)  # fmt: skip


def _rescaled(some: _Blocks, where: slice, of: Callable[[Array], Array]) -> Decode:
    """Values as another scale would make them: they are linear in it."""

    def read(blocks: Array) -> Array:
        bits = np.ascontiguousarray(blocks[:, where]).view(np.uint16)[:, 0]
        none, one = (some.decoded(changed(blocks, where, _bytes(value))) for value in (0.0, 1.0))
        with np.errstate(all="ignore"):
            return np.asarray(none + (one - none) * of(bits)[:, None])

    return read


def _bytes(value: float) -> Array:
    return np.frombuffer(np.float16(value).tobytes(), np.uint8)


def _other_types(some: _Blocks) -> Iterator[Way]:
    """Read as a neighbouring type: of as many values, whatever its bytes."""
    values, _ = block_sizes(some.kind)
    for kind in LAYOUTS:
        if kind != some.kind and block_sizes(kind)[0] == values and values > 1:
            yield Misreading("neighbouring-type", f"reads {some.kind} as {kind}"), _as_type(kind)


def _as_type(kind: str) -> Decode:
    size = block_sizes(kind)[1]

    def read(blocks: Array) -> Array:
        flat = blocks.reshape(-1)
        count = min(len(blocks), flat.size // size)
        with np.errstate(all="ignore"):
            return decode(kind, flat[: count * size].reshape(count, size)).reshape(count, -1)

    return read


def _strides(some: _Blocks) -> Iterator[Way]:
    """Blocks that are taken to be larger or smaller than they are: those of a neighbouring type."""
    own = some.blocks.shape[1]
    sizes: Mapping[int, str] = {
        block_sizes(kind)[1]: kind for kind in LAYOUTS if block_sizes(kind)[0] == block_sizes(some.kind)[0]
    }
    for step in (*sizes, own + 2, own - 2, own + 1, own - 1, own + 4, own - 4):
        if step != own and step > 0:
            of = f", {sizes[step]}'s" if step in sizes else ""
            yield Misreading("stride", f"takes {some.kind}'s blocks for {step} bytes{of}; they have {own}"), \
                _strided(some, step)  # fmt: skip


def _strided(some: _Blocks, step: int) -> Decode:
    def read(blocks: Array) -> Array:
        own, flat = blocks.shape[1], blocks.reshape(-1)
        count = min(len(blocks), (flat.size - own) // step + 1)
        places = np.arange(count)[:, None] * step + np.arange(own)
        return some.decoded(flat[places])

    return read


def _sixteen_bits(some: _Blocks) -> Iterator[Way]:
    """Floats of sixteen bits, taken for the other kind, swapped, or off by a byte."""
    words: Callable[[Array], Array] = lambda b: np.ascontiguousarray(b).view(np.uint16)  # noqa: E731
    half: Callable[[Array], Array] = lambda w: w.view(np.float16).astype(np.float32)  # noqa: E731
    reads = {"F16": half, "BF16": _as_bf16}
    own = reads[some.kind]
    other = next(kind for kind in reads if kind != some.kind)
    kind = some.kind
    yield Misreading("neighbouring-type", f"reads {kind} as {other}"), lambda b: reads[other](words(b))
    yield Misreading("byte-order", f"reads {kind} in the other byte order"), lambda b: own(words(b).byteswap())
    yield Misreading("sign", f"gives {kind}'s values the other sign"), lambda b: -own(words(b))
    yield Misreading("sign", f"leaves out the sign of {kind}'s values"), lambda b: np.abs(own(words(b)))
    yield Misreading("whole-numbers", f"reads {kind} as whole numbers"), lambda b: words(b).astype(np.float32)
    yield Misreading("whole-numbers", f"reads {kind} as signed whole numbers"), \
        lambda b: words(b).view(np.int16).astype(np.float32)  # fmt: skip
    yield (
        Misreading("byte-late", f"reads {kind} one byte late"),
        lambda b: own(words(np.roll(b.reshape(-1), -1).reshape(b.shape))),
    )
    swapped: Callable[[Array], Array] = lambda w: w.reshape(len(w), -1, 2)[..., ::-1].reshape(w.shape)  # noqa: E731
    yield Misreading("pairs-swapped", f"swaps each two values of {kind}"), lambda b: swapped(own(words(b)))
    zero = (some.got == 0).all(axis=0)
    if zero.any():
        where = run_in_words(np.flatnonzero(zero), "value", len(zero))
        yield Misreading("not-written", f"leaves {where} of each {len(zero)} zero"), \
            lambda b: np.where(zero, 0, own(words(b)))  # fmt: skip
