"""What converters legally do to a checkpoint's tensors, each by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.file.views import (
    Joined,
    Mapped,
    Picked,
    Shaped,
    Transposed,
    View,
    cut,
    length_of,
    reordered,
    stacked,
)

Order = NDArray[np.int64]


@dataclass(frozen=True)
class Sizes:
    """What transforms depend on, from config.json."""

    heads: int = 0
    kv_heads: int = 0
    groups: int = 1


Transform = Callable[[Sequence[View], Sizes], View]


def pairs_order(rows: int, heads: int) -> Order:
    """Rows of each head from halves (i, i + n/2) to pairs (2i, 2i + 1): row r of the result is row order[r].

    Raises ValueError for rows that are not of so many heads.
    """
    if heads < 1 or rows % (2 * heads):
        raise ValueError(f"{rows} rows are not of {heads} heads")
    return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def permuted(view: View, heads: int) -> View:
    """The rows of Q or K as Llama-type converters permute them; of a bias, its values."""
    return reordered(view, pairs_order(length_of(view), heads))


def plus(view: View, added: float) -> View:
    """A constant added to every value."""
    return Mapped(view, lambda x: x + np.float32(added))


def _column(view: View) -> View:
    return Shaped(view, (*view.shape, 1))


def _grouped(view: View, groups: int) -> View:
    return Shaped(view, (groups, view.shape[-1] // groups))


def _without_middle(view: View) -> View:
    return Shaped(view, (view.shape[0], view.shape[-1])) if len(view.shape) > 1 else view


def _gate_of(view: View, half: int) -> View:
    """Gate (0) or up (1) of experts that hold both: [expert, 2 * ff, embd]."""
    experts, both, width = view.shape
    rows = np.arange(experts * both).reshape(experts, 2, both // 2)[:, half].reshape(-1)
    return Shaped(Picked(view, rows), (experts, both // 2, width))


TRANSFORMS: Mapping[str, Transform] = {
    "identity": lambda v, s: v[0],
    "permuted by heads": lambda v, s: permuted(v[0], s.heads),
    "permuted by kv heads": lambda v, s: permuted(v[0], s.kv_heads),
    "plus one": lambda v, s: plus(v[0], 1.0),
    "-exp": lambda v, s: _column(Mapped(v[0], lambda x: -np.exp(x))),
    "as a column": lambda v, s: _column(v[0]),
    "transposed": lambda v, s: Transposed(v[0]) if len(v[0].shape) > 1 else v[0],
    "kernel without its middle axis": lambda v, s: _without_middle(v[0]),
    "by groups": lambda v, s: _grouped(v[0], s.groups),
    "stacked": lambda v, s: stacked(v),
    "gate half": lambda v, s: _gate_of(v[0], 0),
    "up half": lambda v, s: _gate_of(v[0], 1),
}


def cut_qkv(view: View, sizes: Sizes) -> dict[str, View]:
    """Q, K and V of a fused matrix, which has them one after the other."""
    heads, kv = sizes.heads, sizes.kv_heads or sizes.heads
    size = length_of(view) // (heads + 2 * kv)
    ends = (0, heads * size, (heads + kv) * size, (heads + 2 * kv) * size)
    return {part: cut(view, ends[i], ends[i + 1]) for i, part in enumerate("QKV")}


def joined_experts(gate: View, up: View) -> View:
    """Gate and up of each expert one after the other: [expert, 2 * ff, embd]."""
    experts, rows, width = gate.shape
    order = np.arange(2 * experts * rows).reshape(2, experts, rows).swapaxes(0, 1).reshape(-1)
    return Picked(Joined((gate, up), (experts, 2 * rows, width)), order)
