"""Twelve ways in which engines with a KV cache go wrong, each as a change of the right engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from proof.decoding.engine import Engine

Array = np.ndarray


class Restarting(Engine):
    """Positions begin at 0 in every batch."""

    def positions(self, start: int, stop: int) -> Array:
        return np.arange(stop - start)


class Lagging(Engine):
    """Positions are one behind after the first batch."""

    def positions(self, start: int, stop: int) -> Array:
        return np.arange(start, stop) - (start > 0)


class Standing(Engine):
    """Positions stay at the first batch's length."""

    def positions(self, start: int, stop: int) -> Array:
        return np.arange(stop - start) + (self.first if start else 0)


class OffByOne(Engine):
    """Rows after the first batch are written one slot too far."""

    def slots(self, start: int, stop: int) -> Array:
        return np.arange(start, stop) + (start > 0)


class Overwriting(Engine):
    """All batches after the first write the same slots, and nothing beyond them is read."""

    def slots(self, start: int, stop: int) -> Array:
        return np.arange(stop - start) + (self.first if start else 0)

    def seen(self, start: int, stop: int) -> int:
        return int(self.slots(start, stop)[-1]) + 1


class OtherLayer(Engine):
    """The cache of the layer before is read; the first layer reads the last one's."""

    def layer_read(self, layer: int) -> int:
        return (layer or self.h.layers) - 1


class Blind(Engine):
    """The last key is not seen, after the first batch."""

    def seen(self, start: int, stop: int) -> int:
        return stop - (start > 0)


class Stuttering(Engine):
    """A batch's first row is put into the cache twice, after the first batch."""

    def slots(self, start: int, stop: int) -> Array:
        twice = max(len(self.batches) - 1, 0)
        return np.arange(start, stop + (start > 0)) + twice

    def written(self, rows: Array) -> Array:
        return np.concatenate([rows[:1], rows]) if self.batches else rows


class Short(Engine):
    """The cache has two rows too few, and begins again with the first."""

    def slots(self, start: int, stop: int) -> Array:
        return np.arange(start, stop) % (self.room - 2)

    def seen(self, start: int, stop: int) -> int:
        return min(stop, self.room - 2)


class RotatingTwice(Engine):
    """K is rotated, and once more as it is read."""

    def keys(self, k: Array) -> Array:
        return self.rope(k, np.arange(len(k)))


class Unrotated(Engine):
    """K is cached as it was before RoPE."""

    def kept(self, k: Array, rotated: Array) -> Array:
        return k


class Transposing(Engine):
    """V is kept as [head, dim, token] and read as [token, head, dim]."""

    def values(self, v: Array) -> Array:
        return np.ascontiguousarray(v.transpose(1, 2, 0)).reshape(v.shape)


class StutteringTokens(Engine):
    """A batch's first token is fed twice, after the first batch, and its last is not."""

    def fed(self, tokens: Sequence[int], start: int) -> Sequence[int]:
        return [tokens[0], *tokens[:-1]] if start else tokens


ENGINES: dict[str, type[Engine]] = {
    "none": Engine,
    "positions restart": Restarting,
    "positions lag": Lagging,
    "positions stand still": Standing,
    "rows off by one": OffByOne,
    "rows overwritten": Overwriting,
    "rows of another layer": OtherLayer,
    "last key unseen": Blind,
    "first row fed twice": Stuttering,
    "first token fed twice": StutteringTokens,
    "cache too short": Short,
    "rotated twice": RotatingTwice,
    "cached before RoPE": Unrotated,
    "V transposed": Transposing,
}
NAMED = {
    "positions restart": ("Qcur_rope", "rope-position-restarted"),
    "positions lag": ("Qcur_rope", "rope-position-restarted"),
    "positions stand still": ("Qcur_rope", "rope-position-restarted"),
    "rows off by one": ("kq", "cache-row-off"),
    "rows overwritten": ("kq", "cache-overwritten"),
    "rows of another layer": ("kq", "cache-of-another-layer"),
    "last key unseen": ("kq", "decode-key-unseen"),
    "first row fed twice": ("kq", "first-row-fed-twice"),
    "first token fed twice": ("embd", "first-row-fed-twice"),
    "cache too short": ("kq", "cache-too-short"),
    "rotated twice": ("kq", "cache-rotated-again"),
    "cached before RoPE": ("kq", "cache-before-rope"),
    "V transposed": ("kqv_out", "cache-transposed"),
}
