"""Attention's scores and weighted sums, and how people get them wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from llamaref import ops
from numpy.typing import NDArray

from llamadiff.diagnose.bugs.norms import Norm, Same, norm
from llamadiff.diagnose.bugs.rope import Rotation, rope_on
from llamadiff.diagnose.case import Case, NotRecordedError
from llamadiff.diagnose.registry import Change, bug, recipe
from llamadiff.diagnose.solve import solve
from llamadiff.diagnose.sought import FACTOR

Array = NDArray[Any]
BOTH = ("kq", "kqv_out")
PUT_IN = {"k": "Kcur_rope", "v": "Vcur_proj"}  # what goes into the cache


@dataclass(frozen=True)
class Scores:
    """Scores of ``q`` [b, t, head, dim] and K ``rows`` [b, s, kv_head, dim]; head h reads K head ``reads[h]``."""

    q: Array
    rows: Array
    reads: Array
    factor: float = 1.0

    def compute(self, case: Case) -> Array:
        q, k = case.carrier.operands("cache_k", self.q, self.rows[:, :, self.reads])
        return np.asarray(ops.attention_scores(q, k) * self.q.dtype.type(self.factor))


@dataclass(frozen=True)
class Values:
    """Sums of V ``rows`` [b, s, kv_head, dim] by ``probs`` [b, head, t, s]; head h reads V head ``reads[h]``."""

    probs: Array
    rows: Array
    reads: Array
    order: str = "token head dim"

    def compute(self, case: Case) -> Array:
        probs, v = case.carrier.operands("cache_v", self.probs, self.rows[:, :, self.reads])
        merged = ops.attention_values(probs, v)  # [b, t, head*dim]
        b, t, h = len(merged), merged.shape[1], probs.shape[1]
        heads = merged.reshape(b, t, h, -1)
        if self.order == "head token dim":
            heads = heads.transpose(0, 2, 1, 3)
        elif self.order == "token dim head":
            heads = heads.transpose(0, 1, 3, 2)
        return np.ascontiguousarray(heads).reshape(b, t, -1)


@recipe("kq")
def scores(case: Case) -> Scores:
    """Q against the cache's K."""
    return Scores(case["Qcur_rope"], _cached(case, "k"), _groups(case))


@recipe("kqv_out")
def values(case: Case) -> Values:
    """Probabilities against the cache's V."""
    return Values(case["kq_soft_max"], _cached(case, "v"), _groups(case))


@recipe("kv_k", "kv_v")
def cache(case: Case) -> Same:
    """Rows as they were put in."""
    side = case.tap.kind.word[-1]
    return Same(as_cached(case, side, case[PUT_IN[side]]))


def _groups(case: Case) -> Array:
    c = case.config
    return np.arange(c.n_head) // (c.n_head // c.n_head_kv)


def _cached(case: Case, side: str) -> Array:
    """The cache's rows [b, s, kv_head, dim]: recorded, or what was put in."""
    try:
        return case[f"kv_{side}"]
    except NotRecordedError:
        return as_cached(case, side, case[PUT_IN[side]])


def as_cached(case: Case, side: str, x: Array) -> Array:
    """K or V [b, s, kv_head * dim] as the cache has it: [b, s, kv_head, dim]."""
    return case.carrier.stored(f"cache_{side}", x.reshape(*x.shape[:2], case.config.n_head_kv, -1))


def _reads(r: Scores | Values, case: Case) -> Iterator[tuple[Array, str]]:
    heads, kv = np.arange(case.config.n_head), case.config.n_head_kv
    group = case.config.n_head // kv
    if kv > 1 and group > 1:
        yield heads % kv, f"lets head h read KV head h % {kv}; this model's head h reads h // {group}"
    if kv > 1:
        yield kv - 1 - heads // group, f"reads the {kv} KV heads in reverse order"
        yield np.zeros_like(heads), f"reads KV head 0 for every head; there are {kv}"
    if kv > 2:
        yield np.roll(heads // group, group), "reads the KV head before the right one"


@bug(*BOTH, fix="repeat each KV head n_head / n_head_kv times; do not tile them", source="ONNXim#34, jax-js#180")
def heads_tiled(r: Scores | Values, case: Case) -> Iterator[Change]:
    """Grouped-query heads are tiled (h % n_kv) instead of repeated (h // group), reversed or mixed up."""
    for reads, says in _reads(r, case):
        yield Change(replace(r, reads=reads), says, says)


@bug("kq", fix="take the scores of Q and K after RoPE, of both")
def scores_before_rope(r: Scores, case: Case) -> Iterator[Change]:
    """Scores are taken of Q, or of Q and K, as they were before RoPE."""
    shape_q, shape_k = r.q.shape, (*r.rows.shape[:2], case.config.n_head_kv, -1)
    normed = f"Qcur_normed-{case.tap.layer}" in case.run.shapes
    q = case["Qcur_normed" if normed else "Qcur_proj"]
    k = case["Kcur_normed" if normed else "Kcur_proj"]
    q, k = q.reshape(len(q), *shape_q[1:]), k.reshape(len(k), *shape_k[1:])
    yield Change(replace(r, q=q, rows=k), "takes Q and K from before RoPE", "both")
    yield Change(replace(r, q=q), "takes Q from before RoPE", "q")


@bug(
    "Qcur_normed",
    "Kcur_normed",
    "Qcur_rope",
    "Kcur_rope",
    "kq",
    fix="normalise Q and K before RoPE",
    source="quant.cpp#82, SharpMind#39",
)
def qk_norm_after_rope(r: Norm | Rotation | Scores, case: Case) -> Iterator[Change]:
    """Q and K are normalised after RoPE; the model does it before."""
    says = "normalises Q and K after RoPE; this model normalises before"
    side = case.tap.kind.word[0]
    if f"Qcur_normed-{case.tap.layer}" not in case.run.shapes:
        return
    if isinstance(r, Norm):
        yield Change(replace(r, x=rope_on(case, r.x).compute(case)), says)
    elif isinstance(r, Rotation):
        yield Change(replace(r, x=case[f"{side}cur_proj"].reshape(r.x.shape)), says)
    else:
        norms = [norm(case.of(f"{which}cur_normed-{case.tap.layer}")) for which in "QK"]
        yield Change(_normed_scores(r, norms, case), says)
        bare = [replace(n, weight=np.ones_like(n.weight)) for n in norms]
        yield Change(_normed_scores(r, bare, case), f"{says}, and without a weight", "bare")


def _normed_scores(r: Scores, norms: Sequence[Norm], case: Case) -> Scores:
    q, k = norms
    return replace(r, q=replace(q, x=r.q).compute(case), rows=replace(k, x=r.rows).compute(case))


@bug("kq", fix="leave Q and K as they are after RoPE: this model does not normalise them")
def qk_norm_applied(r: Scores, case: Case) -> Iterator[Change]:
    """Q and K are normalised, without a weight, in a model that does not do so."""
    if f"Qcur_normed-{case.tap.layer}" not in case.run.shapes:
        ones = np.ones(case.config.head_k, r.q.dtype)
        bare = Norm(r.q, ones, None, case.config.rms_eps or case.config.norm_eps, False)
        yield Change(_normed_scores(r, (bare, bare), case), "takes Q and K that were normalised, without a weight")


def scale_in_words(value: float, case: Case) -> str:
    """A scale with the formula that gives it."""
    c = case.config
    names = {
        1.0: "1 (no scale)", 1 / c.head_k: "1/d, the scale twice", 1 / math.sqrt(c.head_k): "1/sqrt(d)",
        1 / math.sqrt(c.n_embd): "1/sqrt(d_model)", 1 / math.sqrt(c.n_embd / c.n_head_kv): "1/sqrt(d_model / kv heads)",
        math.sqrt(c.head_k): "sqrt(d)", 1 / c.n_embd: "1/d_model",
    }  # fmt: skip
    words = next((name for known, name in names.items() if math.isclose(known, value, rel_tol=1e-5)), None)
    return words if words is not None else f"{value:.5g}"


@bug("kq", general=True, fix="dump raw scores, and see that the scale is applied once", source="llama.cpp#13951")
def scores_scaled(r: Scores, case: Case) -> Iterator[Change]:
    """The scale is in the scores already."""
    d = case.config.head_k
    for value in solve(case, lambda f: replace(r, factor=f), FACTOR, (1 / math.sqrt(d), 1 / d, math.sqrt(d))):
        yield Change(
            replace(r, factor=value), f"is multiplied by {scale_in_words(value, case)} before the softmax", value=value
        )


@bug("kqv_out", fix="put tokens before heads, [token, head, dim], before heads are merged")
def heads_merged_wrong(r: Values, case: Case) -> Iterator[Change]:
    """Heads are merged in the wrong order: a transpose is missing, or one too many."""
    yield Change(replace(r, order="head token dim"), "merges [head, token, dim] without transposing", "head token")
    yield Change(
        replace(r, order="token dim head"), "puts the values of a head apart: [dim, head] for [head, dim]", "dim head"
    )
