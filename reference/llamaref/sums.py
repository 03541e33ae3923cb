"""Products as a tap sees them: one by a weight that is yet to be computed, and the matrices that one consists of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamaref.weights import Weights

Array = NDArray[Any]


@dataclass(frozen=True)
class WeightProduct:
    """(x @ W.T) * scale + bias, which ``compute`` makes: ``x`` [b, t, in], ``sums`` [b, t, in / 32] as
    ``Weights.product`` takes them, ``scale`` and ``bias`` [out] where there are any.
    """

    compute: Callable[[], Array]
    weights: Weights
    name: str
    x: Array
    sums: Array | None = None
    scale: Array | None = None
    bias: Array | None = None

    @property
    def width(self) -> int:
        """How many channels it has."""
        return self.weights.shape(self.name)[0]


@dataclass(frozen=True)
class Matrix:
    """One matrix: w [out, in] and x [row, in] give what stands at ``place`` of a run's result, [row, out].

    A weight is as the file keeps it.
    """

    w: Array
    x: Array
    place: Any


Matrices = Callable[[int], Iterator[Matrix]]  # those of one run of the batch


def by_weight(w: Weights, name: str, x: Array) -> Matrices:
    """x [b, t, in] -> [b, t, out]."""
    return lambda run: iter([Matrix(w.read_raw(name), x[run], ...)])


def by_heads(w: Weights, name: str, x: Array) -> Matrices:
    """Each head by a matrix of its own: x [b, h, t, in] -> [b, h, t, out]."""

    def of(run: int) -> Iterator[Matrix]:
        stored = w.read_raw(name).reshape(x.shape[1], -1, x.shape[-1])
        return (Matrix(stored[head], x[run, head], head) for head in range(x.shape[1]))

    return of


def by_experts(w: Weights, name: str, x: Array, chosen: Array) -> Matrices:
    """Each row by the expert that it has chosen: x [b, t, used, in], chosen [b, t, used] -> [b, t, used, out]."""

    def of(run: int) -> Iterator[Matrix]:
        for expert in np.unique(chosen[run]):
            mine = np.nonzero(chosen[run] == expert)
            yield Matrix(w.read_raw(name)[expert], x[run][mine], mine)

    return of


def of_scores(q: Array, keys: Array) -> Matrices:
    """Attention's raw scores: q [b, t, h, d], keys [b, s, k, d] -> [b, h, t, s]."""
    heads = q.shape[2] // keys.shape[2]
    return lambda run: (Matrix(keys[run, :, h // heads], q[run, :, h], h) for h in range(q.shape[2]))


def of_values(probs: Array, values: Array) -> Matrices:
    """Weighted sums of values, heads merged: probs [b, h, t, s], values [b, s, k, d] -> [b, t, h*d]."""
    heads, d = probs.shape[1] // values.shape[2], values.shape[-1]

    def of(run: int) -> Iterator[Matrix]:
        for h in range(probs.shape[1]):
            yield Matrix(values[run, :, h // heads].T, probs[run, h], (slice(None), slice(h * d, (h + 1) * d)))

    return of
