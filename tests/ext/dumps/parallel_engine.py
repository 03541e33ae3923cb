"""A tensor-parallel engine in NumPy: what each of its ranks has at every tap, and mistakes that one rank alone makes.

Q, K, V, gate and up are split by rows of their weights, the output and down projections by columns, whose parts are
added up over the ranks. Norms and residuals are on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from proof.strangers.model import File, read

Array = np.ndarray
Ranks = list[Array]  # a value of each rank
Dump = list[dict[str, Ranks]]  # of each step, the taps
TOKENS = (1, 17, 5, 80, 42, 9, 33)

BIAS_EVERYWHERE, NO_ALL_REDUCE, ONE_ALL_REDUCE = "bias on every rank", "no all-reduce", "all-reduce to rank 0 alone"
SWAPPED_HEADS, OTHER_NORM, OTHER_SHARD = "heads of rank 1 swapped", "norm of rank 1", "down shard of rank 1"
OTHER_ROPE, STALE_CACHE = "RoPE of rank 1", "cache of rank 1 in decode steps"
ALL_ROPE = "RoPE of all ranks"


class ParallelEngine:
    """One file on so many ranks, with one mistake or none; in layer 1, if it has a place."""

    def __init__(self, path: Path, ranks: int = 2, mistake: str = "") -> None:
        self.file: File = read(path)
        self.h, self.count, self.mistake = self.file.hyper, ranks, mistake
        self.cache: dict[tuple[str, int, int], Array] = {}
        self.seen: dict[str, Ranks] = {}

    def run(self, tokens: Sequence[int] = TOKENS, batches: Sequence[int] = ()) -> Dump:
        """The taps of each batch, one value a rank."""
        dump, start = [], 0
        for size in batches or (len(tokens),):
            self.seen = {}
            self._forward(np.array(tokens[start : start + size]), np.arange(start, start + size))
            dump.append(self.seen)
            start += size
        return dump

    # -- the ranks -----------------------------------------------------------------------------------------------------

    def keep(self, name: str, values: Ranks) -> Ranks:
        self.seen[name] = values
        return values

    def is_wrong(self, mistake: str, layer: int, rank: int = 1) -> bool:
        return self.mistake == mistake and layer == 1 and rank == 1

    def rows(self, stem: str, rank: int, layer: int, unit: int = 1) -> tuple[Array, Array | float]:
        """A rank's rows of a weight, and of its bias; where units of rows are fewer than ranks, some have the same."""
        w, bias = self.weight(stem, layer), self.file.tensors.get(f"blk.{layer}.{stem}.bias")
        units = len(w) // unit
        size = max(1, units // self.count) * unit
        start = rank * units // self.count * unit
        return w[start : start + size], 0.0 if bias is None else bias[start : start + size]

    def weight(self, stem: str, layer: int) -> Array:
        return self.file[f"blk.{layer}.{stem}.weight"]

    def column(self, stem: str, x: Ranks, layer: int, unit: int = 1) -> Ranks:
        """Each rank's rows of a product."""
        parts = [self.rows(stem, rank, layer, unit) for rank in range(self.count)]
        return [x[rank] @ w.T + bias for rank, (w, bias) in enumerate(parts)]

    def row(self, stem: str, x: Ranks, layer: int) -> Ranks:
        """Each rank's part of a product's sum; the bias is rank 0's."""
        w, bias = self.weight(stem, layer), self.file.tensors.get(f"blk.{layer}.{stem}.bias")
        columns = np.split(w, self.count, axis=1)
        if self.is_wrong(OTHER_SHARD, layer) and stem == "ffn_down":
            columns[1] = columns[0]
        parts = [x[rank] @ columns[rank].T for rank in range(self.count)]
        everywhere = self.is_wrong(BIAS_EVERYWHERE, layer)
        return [part if bias is None or (rank and not everywhere) else part + bias for rank, part in enumerate(parts)]

    def all_reduce(self, parts: Ranks, layer: int) -> Ranks:
        if self.is_wrong(NO_ALL_REDUCE, layer):
            return parts
        total = np.sum(parts, axis=0)
        if self.is_wrong(ONE_ALL_REDUCE, layer):
            return [total, *parts[1:]]
        return [total.copy() for _ in parts]

    # -- the model -----------------------------------------------------------------------------------------------------

    def norm(self, x: Ranks, name: str, layer: int | None = None) -> Ranks:
        w = self.file[name]
        values = [w * each / np.sqrt(np.square(each).mean(-1, keepdims=True) + self.h.eps) for each in x]
        if layer is not None and self.is_wrong(OTHER_NORM, layer) and "attn_norm" in name:
            values[1] = values[1] * np.float32(1.01)
        return [each.astype(np.float32) for each in values]

    def rope(self, x: Array, positions: Array, layer: int, rank: int) -> Array:
        half = self.h.n_rot // 2
        is_wrong = self.is_wrong(OTHER_ROPE, layer, rank) or self.is_wrong(ALL_ROPE, layer)
        base = 500000.0 if is_wrong else self.h.base
        angles = positions[:, None, None] * base ** (-np.arange(half) / half)
        cos, sin = np.cos(angles), np.sin(angles)
        pairs = (
            x.reshape(*x.shape[:-1], half, 2) if self.h.pairs else x.reshape(*x.shape[:-1], 2, half).swapaxes(-1, -2)
        )
        a, b = pairs[..., 0], pairs[..., 1]
        turned = np.stack([a * cos - b * sin, a * sin + b * cos], -1)
        return (turned if self.h.pairs else turned.swapaxes(-1, -2)).reshape(x.shape).astype(np.float32)

    def _forward(self, tokens: Array, positions: Array) -> None:
        h, keep = self.h, self.keep
        x = keep("embd", [self.file["token_embd.weight"][tokens] for _ in range(self.count)])
        for i in range(h.layers):
            normed = keep(f"attn_norm-{i}", self.norm(x, f"blk.{i}.attn_norm.weight", i))
            attended = self._attention(normed, positions, i)
            out = keep(f"attn_out-{i}", self.row("attn_output", attended, i))
            x = keep(f"ffn_inp-{i}", [a + b for a, b in zip(x, self.all_reduce(out, i), strict=True)])
            normed = keep(f"ffn_norm-{i}", self.norm(x, f"blk.{i}.ffn_norm.weight"))
            gate = keep(f"ffn_gate-{i}", self.column("ffn_gate", normed, i))
            up = keep(f"ffn_up-{i}", self.column("ffn_up", normed, i))
            both = [(g / (1 + np.exp(-g)) * u).astype(np.float32) for g, u in zip(gate, up, strict=True)]
            out = keep(f"ffn_out-{i}", self.row("ffn_down", keep(f"ffn_swiglu-{i}", both), i))
            reduced = [np.sum(out, axis=0)] * self.count
            x = keep(f"l_out-{i}", [a + b for a, b in zip(x, reduced, strict=True)])
        normed = keep("result_norm", self.norm(x, "output_norm.weight"))
        head = np.array_split(self.file.tensors.get("output.weight", self.file["token_embd.weight"]), self.count)
        keep("result_output", [each @ w.T for each, w in zip(normed, head, strict=True)])

    def _attention(self, x: Ranks, positions: Array, i: int) -> Ranks:
        dim, keep = self.h.dim, self.keep
        q = keep(f"Qcur_proj-{i}", self.column("attn_q", x, i, dim))
        k = keep(f"Kcur_proj-{i}", self.column("attn_k", x, i, dim))
        v = keep(f"Vcur_proj-{i}", self.column("attn_v", x, i, dim))
        if self.is_wrong(SWAPPED_HEADS, i):
            q[1] = q[1].reshape(len(positions), -1, dim)[:, ::-1].reshape(q[1].shape)
        n = len(positions)
        q, k = (
            [self.rope(each.reshape(n, -1, dim), positions, i, rank) for rank, each in enumerate(some)]
            for some in (q, k)
        )
        keep(f"Qcur_rope-{i}", q), keep(f"Kcur_rope-{i}", k)
        out, scores, weights = [], [], []
        for rank in range(self.count):
            keys = self._cached("k", k[rank], i, rank)
            values = self._cached("v", v[rank].reshape(n, -1, dim), i, rank)
            group = q[rank].shape[1] // keys.shape[1]
            kq = np.einsum("qhd,khd->hqk", q[rank], keys.repeat(group, 1))
            seen = np.arange(len(keys))[None] <= positions[:, None]
            masked = np.where(seen, kq / np.sqrt(dim), -np.inf)
            soft = np.exp(masked - masked.max(-1, keepdims=True))
            soft = (soft / soft.sum(-1, keepdims=True)).astype(np.float32)
            scores.append(kq), weights.append(soft)
            out.append(np.einsum("hqk,khd->qhd", soft, values.repeat(group, 1)).reshape(n, -1))
        keep(f"kq-{i}", scores), keep(f"kq_soft_max-{i}", weights)
        return keep(f"kqv_out-{i}", out)

    def _cached(self, what: str, rows: Array, layer: int, rank: int) -> Array:
        before = self.cache.get((what, layer, rank))
        stale = self.is_wrong(STALE_CACHE, layer, rank) and before is not None
        own = before[-1:] if stale and what == "v" else rows
        self.cache[what, layer, rank] = own if before is None else np.concatenate([before, own])
        return self.cache[what, layer, rank]


def tensors(dump: Dump) -> Iterator[tuple[int, int, str, Array]]:
    """The step, the rank, the tap and the values of all."""
    for step, taps in enumerate(dump):
        for name, ranks in taps.items():
            yield from ((step, rank, name, values) for rank, values in enumerate(ranks))


Write = Callable[[Dump, Path], Path]
