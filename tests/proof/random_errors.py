"""Errors of many kinds, each at random: what is put into right taps, to hold sentences to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from llamadiff.trace.taps import Tap

Array = NDArray[Any]


@dataclass(frozen=True)
class Right:
    """A right run: what every tap holds [row, ...], and what its ops read."""

    taps: Mapping[str, Array]
    kinds: Mapping[str, Tap]
    rope: Any
    dim: int

    def rows(self, name: str) -> Array:
        return np.moveaxis(np.asarray(self.taps[name], np.float64), self.kinds[name].row_axis, 0)


def _some(rng: np.random.Generator, n: int) -> Array:
    return rng.choice(n, rng.integers(1, max(2, n // 2 + 1)), replace=False)


def _size(rng: np.random.Generator) -> float:
    return float(10 ** rng.uniform(-3, 1))


def _noise(x: Array, rng: np.random.Generator) -> Array:
    return _size(rng) * np.sqrt(np.mean(x * x)) * rng.standard_normal(x.shape)


def _along(axis: int, change: Callable[[Array, np.random.Generator], Array]) -> Callable[..., Array]:
    """A change of some rows, heads or channels."""

    def apply(x: Array, rng: np.random.Generator, _: Right) -> Array:
        at = axis % x.ndim
        some = np.isin(np.arange(x.shape[at]), _some(rng, x.shape[at]))
        mask = some.reshape([-1 if i == at else 1 for i in range(x.ndim)])
        return np.where(mask, change(x, rng), x)

    return apply


def _order(x: Array, rng: np.random.Generator, right: Right) -> Array:
    """Channels in another order: one of those that people's engines have, or any."""
    flat, dim = x.reshape(len(x), -1), right.dim
    n = flat.shape[1]
    heads = np.arange(n).reshape(-1, dim) if n % dim == 0 else np.arange(n)[None]
    orders = [
        np.roll(np.arange(n), rng.integers(1, n)), rng.permutation(n), np.arange(n)[::-1],
        heads[rng.permutation(len(heads))].ravel(), heads.T.ravel(), np.argsort(heads.T.ravel()),
    ]  # fmt: skip
    if heads.shape[1] % 2 == 0:
        halves = heads.reshape(len(heads), -1, 2).swapaxes(1, 2).ravel()
        orders += [halves, np.argsort(halves)]
    return flat[:, orders[rng.integers(len(orders))]].reshape(x.shape)


def _axes(x: Array, rng: np.random.Generator, right: Right) -> Array:
    shape = x.shape if x.ndim > 2 or x.shape[1] % right.dim else (len(x), x.shape[1] // right.dim, right.dim)
    if rng.integers(2):
        shape = x.shape
    first, second = rng.choice(len(shape), 2, replace=False)
    return np.ascontiguousarray(x.reshape(shape).swapaxes(first, second)).reshape(x.shape)


def _rows(x: Array, rng: np.random.Generator, _: Right) -> Array:
    n = len(x)
    sources = [np.maximum(np.arange(n) - 1, 0), rng.permutation(n), np.arange(n)[::-1], np.roll(np.arange(n), 1),
               rng.integers(0, n, n), np.where(np.arange(n) == rng.integers(n), 0, np.arange(n))]  # fmt: skip
    return x[sources[rng.integers(len(sources))]]


def _turned(x: Array, rng: np.random.Generator, right: Right) -> Array:
    """Rotated further, as complex numbers."""
    if x.ndim != 3 or x.shape[-1] != right.dim:
        return x + _noise(x, rng)
    n = len(x)
    by = [rng.integers(-n, n, n), np.where(np.arange(n) > rng.integers(n), -1, 0), np.full(n, rng.integers(1, 9))]
    return rotated(x, by[rng.integers(3)], right, halves=bool(rng.integers(2)))


def rotated(x: Array, by: Array, right: Right, halves: bool) -> Array:
    n = right.dim
    angle = by[:, None, None] * right.rope.base ** (-2 * np.arange(n // 2) / n)
    pairs = x.reshape(*x.shape[:-1], 2, -1).swapaxes(-1, -2) if halves else x.reshape(*x.shape[:-1], -1, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angle)
    out = np.stack([turned.real, turned.imag], -1)
    return (out.swapaxes(-1, -2) if halves else out).reshape(x.shape)


def _other(x: Array, rng: np.random.Generator, right: Right) -> Array:
    same = [name for name, values in right.taps.items() if values.size == x.size]
    return right.rows(same[rng.integers(len(same))]).reshape(x.shape)


def _not_finite(x: Array, rng: np.random.Generator) -> Array:
    return np.full_like(x, [np.nan, np.inf, -np.inf][rng.integers(3)])


ERRORS: dict[str, Callable[..., Array]] = {
    "noise": lambda x, rng, _: x + _noise(x, rng),
    "scale": lambda x, rng, _: x * (1 + rng.choice([-1, 1]) * _size(rng)),
    "offset": lambda x, rng, _: x + _size(rng),
    "vector": lambda x, rng, _: x + _noise(x[:1], rng),
    "row factors": lambda x, rng, _: x * rng.uniform(0.2, 2, len(x)).reshape([-1] + [1] * (x.ndim - 1)),
    "head factors": lambda x, rng, _: x * rng.uniform(0.2, 2, (*x.shape[: x.ndim - 1], 1)),
    "one value": lambda x, rng, _: x + (np.arange(x.size) == rng.integers(x.size)).reshape(x.shape) * _noise(x, rng),
    "some rows noise": _along(0, lambda x, rng: x + _noise(x, rng)),
    "some rows scaled": _along(0, lambda x, rng: x * (1 + _size(rng))),
    "some rows zero": _along(0, lambda x, rng: np.zeros_like(x)),
    "some heads": _along(1, lambda x, rng: x + _noise(x, rng)),
    "some heads scaled": _along(1, lambda x, rng: x * (1 + _size(rng))),
    "some channels": _along(-1, lambda x, rng: x + _noise(x, rng)),
    "last channels zero": lambda x, rng, _: x * (np.arange(x.shape[-1]) < rng.integers(x.shape[-1])),
    "periodic": lambda x, rng, _: x + (np.arange(x.shape[-1]) % 32 == rng.integers(32)) * _noise(x, rng),
    "growing": lambda x, rng, _: x + _noise(x, rng) * (
        10.0 ** np.linspace(-4, 0, len(x)).reshape([-1] + [1] * (x.ndim - 1))),
    "zero": lambda x, rng, _: np.zeros_like(x),
    "not finite": _along(0, _not_finite), "not finite channels": _along(-1, _not_finite),
    "order": _order, "axes": _axes, "rows": _rows, "turned": _turned, "other": _other,
    "beyond a bound": lambda x, rng, _: np.where(x < np.quantile(x, rng.uniform(0.02, 0.4)), x + _noise(x, rng), x),
    "order and scale": lambda x, rng, right: _order(x, rng, right) * (1 + _size(rng)),
    "rows and noise": lambda x, rng, right: _rows(x, rng, right) + 1e-3 * _noise(x, rng),
}  # fmt: skip


def kinds_from(name: str) -> list[str]:
    """The kinds of errors, beginning at one that depends on the tap."""
    kinds = list(ERRORS)
    first = crc32(name.encode()) % len(kinds)
    return kinds[first:] + kinds[:first]
