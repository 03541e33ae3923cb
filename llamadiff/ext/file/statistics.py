"""What one tensor holds, read in blocks of rows: moments, zeros, odd rows, and whether both decoders agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np
from llamaref import ModelError, Weights
from numpy.typing import NDArray

Array = NDArray[Any]
Decode = Callable[[Array], Array]
BLOCK = 1 << 15  # values that are decoded at once: small enough for malloc to keep the memory of both decodings
PLAIN = ("F32", "F64", "I8", "I16", "I32", "I64")  # kept as they are: there is nothing to decode
SAME, ONLY_GGUF, ONLY_GGML, NEITHER = "bit-equal", "gguf-py alone", "ggml alone", "no decoder"


@dataclass(frozen=True)
class TensorStats:
    """Moments over the finite values; ``zeros`` is the share of values that are zero."""

    rms: float
    mean: float
    min: float
    max: float
    zeros: float
    nan: int
    inf: int

    @property
    def deviation(self) -> float:
        return float(np.sqrt(max(self.rms**2 - self.mean**2, 0.0)))


@dataclass(frozen=True)
class TensorRead:
    """One tensor, read once. Rows are counted through all leading axes.

    ``apart``: how many values the two decoders give otherwise, and the first row that has one. ``zero_rows`` and
    ``constant_rows`` are their numbers, ``equal_rows`` pairs of a row and an earlier one that it equals.
    """

    stats: TensorStats
    decoders: str
    apart: int = 0
    apart_row: int | None = None
    zero_rows: tuple[int, ...] = ()
    constant_rows: tuple[int, ...] = ()
    equal_rows: tuple[tuple[int, int], ...] = ()
    not_finite_row: int | None = None


@dataclass
class Sums:
    """What blocks of rows add up to."""

    total: float = 0.0
    squares: float = 0.0
    count: int = 0
    zeros: int = 0
    nan: int = 0
    inf: int = 0
    low: float = np.inf
    high: float = -np.inf
    apart: int = 0
    apart_rows: list[int] = field(default_factory=list)
    broken_rows: list[int] = field(default_factory=list)
    zero_rows: list[int] = field(default_factory=list)
    constant_rows: list[int] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)

    def add(self, start: int, values: Array) -> None:
        """Rows from ``start`` on: [row, value]."""
        low, high = values.min(axis=1), values.max(axis=1)
        finite = bool(np.isfinite(low).all() and np.isfinite(high).all())
        kept = values.reshape(-1) if finite else values[np.isfinite(values)]
        zeros = kept.size - int(np.count_nonzero(kept))
        total, squares = _moments(kept)
        constant = np.flatnonzero(low == high)
        with self.lock:
            self.total, self.squares, self.count = self.total + total, self.squares + squares, self.count + kept.size
            self.zeros += zeros
            if kept.size:
                self.low, self.high = min(self.low, float(kept.min())), max(self.high, float(kept.max()))
            if not finite:
                self.nan += int(np.isnan(values).sum())
                self.inf += int(np.isinf(values).sum())
                self.broken_rows.append(start + int(np.flatnonzero(~np.isfinite(values).all(axis=1))[0]))
            if values.shape[1] > 1:
                self.zero_rows += [start + int(i) for i in constant if low[i] == 0]
                self.constant_rows += [start + int(i) for i in constant if low[i] != 0]

    def stats(self) -> TensorStats:
        n = max(self.count, 1)
        low, high = (self.low, self.high) if self.count else (0.0, 0.0)
        rms, zeros = float(np.sqrt(self.squares / n)), self.zeros / n
        return TensorStats(rms, self.total / n, low, high, zeros, self.nan, self.inf)


def _moments(values: Array) -> tuple[float, float]:
    """The sum and the sum of squares; in float64 where float32 does not hold them."""
    with np.errstate(over="ignore"):
        squares = float(np.dot(values, values))
    if not 0 < squares < np.inf:
        wide = np.asarray(values, np.float64)
        return float(wide.sum()), float(np.dot(wide, wide))
    return float(values.sum()), squares


def examine(weights: Weights, name: str, by_ggml: Decode | None) -> TensorRead:
    """Read a tensor once. ``by_ggml``: ggml's decoder of its type, if it has one."""
    kind, stored = weights.type(name), weights.read_raw(name)
    rows = stored.reshape(-1, stored.shape[-1])
    by_gguf = gguf_decoder(weights, name)
    decode = by_ggml or by_gguf
    if decode is None:
        return TensorRead(Sums().stats(), NEITHER)
    sums, signatures = Sums(), np.zeros(len(rows), np.float32)
    width = decode(rows[:1]).shape[-1]
    towards = np.asarray(np.random.default_rng(0).standard_normal(width), np.float32)

    step = max(1, BLOCK // width)

    def work(start: int) -> None:
        stop = start + step
        with np.errstate(all="ignore"):
            values = decode(rows[start:stop])
            if by_ggml is not None and by_gguf is not None:
                _compare(sums, start, values, by_gguf(rows[start:stop]))
            sums.add(start, values)
            signatures[start:stop] = values @ towards

    list(weights.map(work, range(0, len(rows), step)))
    odd = {*sums.zero_rows, *sums.constant_rows}
    return TensorRead(
        sums.stats(), _decoders(kind, by_gguf, by_ggml, sums), sums.apart, min(sums.apart_rows, default=None),
        tuple(sorted(sums.zero_rows)), tuple(sorted(sums.constant_rows)),
        tuple(_equal_rows(rows, signatures, odd)) if width > 1 else (), min(sums.broken_rows, default=None),
    )  # fmt: skip


def gguf_decoder(weights: Weights, name: str) -> Decode | None:
    """gguf-py's decoder of a tensor, if it has one; plain numbers need none."""
    if weights.type(name) in PLAIN:
        return lambda some: np.asarray(some, np.float32)

    def decode(some: Array) -> Array:
        return weights.decode_rows(name, some)

    try:
        stored = weights.read_raw(name)
        decode(stored.reshape(-1, stored.shape[-1])[:1])
    except ModelError:
        return None
    return decode


def _compare(sums: Sums, start: int, a: Array, b: Array) -> None:
    """Count values whose bits differ; two NaN are the same."""
    if np.array_equal(a.view(np.uint32), b.view(np.uint32)):
        return
    apart = (a.view(np.uint32) != b.view(np.uint32)) & ~(np.isnan(a) & np.isnan(b))
    if apart.any():
        with sums.lock:
            sums.apart += int(apart.sum())
            sums.apart_rows.append(start + int(np.flatnonzero(apart.any(axis=1))[0]))


def _decoders(kind: str, by_gguf: Decode | None, by_ggml: Decode | None, sums: Sums) -> str:
    if kind in PLAIN:
        return "plain numbers"
    if by_gguf is None or by_ggml is None:
        return ONLY_GGML if by_gguf is None else ONLY_GGUF
    return f"{sums.apart} values differ" if sums.apart else SAME


def _equal_rows(rows: Array, signatures: Array, odd: set[int]) -> list[tuple[int, int]]:
    """Pairs of a row and an earlier one with the same bytes, of those that are not ``odd`` anyway."""
    order = np.argsort(signatures, kind="stable")
    same = np.flatnonzero(signatures[order][1:] == signatures[order][:-1])
    pairs = ((int(order[i + 1]), int(order[i])) for i in same)
    return sorted(
        (max(a, b), min(a, b)) for a, b in pairs if a not in odd and b not in odd and np.array_equal(rows[a], rows[b])
    )
