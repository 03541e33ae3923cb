"""Attention at nodes of a graph: scores, heads, merging; softcaps wherever they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from llamadiff.ext.explain.alter import after, instead, takes, through, times, with_float, with_source
from llamadiff.ext.explain.case import Array, NotRecordedError
from llamadiff.ext.explain.registry import Constant, Edit, at_nodes
from llamadiff.ext.explain.site import Site
from llamadiff.ext.explain.solve import FACTOR, Sought
from llamadiff.ext.graph.graph import GraphNode
from llamadiff.ext.graph.op import Op


def cap_around(site: Site) -> tuple[Any, Any] | None:
    """The scalings before and after a tanh that caps; None if it is another one."""
    below = site.source(0)
    above = site.user("SCALE")
    return (below, above) if below is not None and below.op == "SCALE" and site.own(below) and above else None


@at_nodes("TANH", fix="take cap * tanh(x / cap)")
def softcap_missing(site: Site) -> Iterator[Edit]:
    """A softcap (cap * tanh(x / cap)) of attention scores or logits is left out, or one of its three steps is."""
    around = cap_around(site)
    if around is None or not site.own(around[1]):
        return
    below, above = around
    cap = float(site.at(above).floats[0])
    fix, both = _cap_fix(cap), {below.number: through, above.number: through}
    yield Edit(through, f"leaves out the softcap of {cap:.4g}", "all", both, fix)
    says = f"does not multiply by the softcap ({cap:.4g}) after tanh"
    yield Edit(lambda n: n, says, "after", {above.number: through}, fix)
    says = f"does not divide by the softcap ({cap:.4g}) before tanh"
    yield Edit(lambda n: n, says, "before", {below.number: through}, fix)


def _cap_fix(cap: float) -> str:
    return f"take {cap:.4g} * tanh(x / {cap:.4g})"


@at_nodes("TANH", general=True, fix="read the softcap from the file")
def softcap_other(site: Site) -> Iterator[Constant]:
    """A softcap is another than the file's."""
    around = cap_around(site)
    if around is None or not site.own(around[1]):
        return
    below, above = around
    own, scale_before = float(site.at(above).floats[0]), float(site.at(below).floats[0])

    def more(cap: float) -> Any:
        return {below.number: with_float(p0=scale_before * own / cap), above.number: with_float(p0=cap)}

    sought = Sought(own / 100, own * 100, lambda cap, own: f"caps at {cap:.4g}, where {own:.4g} is right")
    yield Constant(lambda cap: lambda n: n, sought, own, (20.0, 30.0, 50.0), more=more, fix=_cap_fix(own))


@at_nodes(
    "MUL_MAT", fix="repeat each KV head n_head / n_head_kv times; do not tile them", source="ONNXim#34, jax-js#180"
)
def heads_tiled(site: Site) -> Iterator[Edit]:
    """Grouped-query heads are tiled (h % n_kv) instead of repeated (h // group), reversed or mixed up."""
    kv = site.shape(0)[-3]
    heads = site.node.shape[-3]
    if site.weight(0) or kv == 1 or site.shape(1)[-3] != heads:
        return
    group = heads // kv
    fix = f"read KV head h // {group} for query head h" if group > 1 else "read KV head h for query head h"
    if group > 1:
        says = f"reads KV head h % {kv} for query head h; this model reads h // {group}"
        tiled = with_source(0, lambda n: np.tile(n.x(), (*[1] * (n.x().ndim - 3), group, 1, 1)))
        yield Edit(tiled, says, "tiled", fix=fix)
    reverse, first = with_source(0, lambda n: n.x()[..., ::-1, :, :]), with_source(0, lambda n: n.x()[..., :1, :, :])
    yield Edit(reverse, "reads KV heads in reverse", "reversed", fix=fix)
    yield Edit(first, "reads the first KV head for every query head", "first", fix=fix)
    if kv > 2:
        before = with_source(0, lambda n: np.roll(n.x(), 1, axis=-3))
        yield Edit(before, "reads the KV head before the right one", "roll", fix=fix)


@at_nodes(
    "MUL_MAT", fix="dump raw scores, and see that the scale is applied once", source="llama.cpp#13951", general=True
)
def scores_scaled(site: Site) -> Iterator[Constant]:
    """The scale is in the scores already."""
    if not site.weight(0) and not site.adapter:
        width = site.shape(1)[-1]
        familiar = (1 / math.sqrt(width), 1 / width, math.sqrt(width))
        yield Constant(lambda value: times(1, value), FACTOR, 1.0, familiar, linear=True)


@at_nodes("CONT", fix="put tokens before heads, [token, head, dim], before heads are merged")
def heads_merged_wrong(site: Site) -> Iterator[Edit]:
    """Heads are merged in the wrong order: a transpose is missing, or one too many."""
    below = site.source(0)
    if below is not None and below.op == "MUL_MAT" and site.direct(0) == "PERMUTE":
        says = "merges heads without the transpose: [head, token, dim] read as [token, head * dim]"
        yield Edit(takes(lambda n: np.ascontiguousarray(n.x().swapaxes(-3, -2))), says)
        says = "puts the values of a head apart: [dim, head] for [head, dim]"
        yield Edit(takes(lambda n: np.ascontiguousarray(n.x().swapaxes(-2, -1))), says, "dim head")


def _scores(site: Site) -> tuple[GraphNode, GraphNode] | None:
    """What makes Q and K of a product of raw scores: the last nodes before it that are no views; None of other ones."""
    if site.weight(0) or not (site.node.label or "").startswith("kq-"):
        return None
    q, k = site.source(1), site.writer(site.engine.read_from(site.node))
    return None if q is None or k is None else (q, k)


@at_nodes("SCALE", of="scores-before-rope")
def scaled_before_rope(site: Site) -> Iterator[Edit]:
    """The factor of Q multiplies what was not rotated yet."""
    rope = site.source(0)
    below = site.at(rope).source(0) if rope is not None and rope.op == "ROPE" else None
    if below is not None and below.label:
        with suppress(NotRecordedError):
            x = site.case.values(below.label).reshape(-1, *site.shape(0))
            yield Edit(instead(0, x), "takes Q from before RoPE", "q")


def _unscaled(site: Site, node: GraphNode) -> tuple[GraphNode, float]:
    """A node before the factor that multiplies it, and the factor; 1 where there is none."""
    below = site.at(node).source(0) if node.op == "SCALE" else None
    return (node, 1.0) if below is None else (below, float(site.at(node).floats[0]))


def _as_read(site: Site, side: str, x: Array) -> Array:
    """Rows of Q or K [b, 1, token, head, dim] as a product of scores reads them: heads first, K with empty slots."""
    if side == "q":
        return x.swapaxes(-3, -2)
    kept = site.case.carrier.store("cache_k", x.reshape(len(x), x.shape[-3], -1))
    rows = kept.reshape(len(kept), *x.shape[1:]).swapaxes(-3, -2)
    out = np.zeros((*rows.shape[:-2], site.shape(0)[-2], x.shape[-1]), x.dtype)
    out[..., : rows.shape[-2], :] = rows
    return out


@at_nodes("MUL_MAT", fix="take the scores of Q and K after RoPE, of both")
def scores_before_rope(site: Site) -> Iterator[Edit]:
    """Scores are taken of Q, or of Q and K, as they were before RoPE."""
    unrotated = []
    for node in _scores(site) or ():
        rope, factor = _unscaled(site, node)
        below = site.at(rope).source(0) if rope.op == "ROPE" else None
        if below is None or not below.label:
            return
        unrotated.append(site.case.values(below.label).reshape(-1, *node.shape) * np.float32(factor))
    if not unrotated:
        return
    q, k = (_as_read(site, side, x) for side, x in zip("qk", unrotated, strict=True))
    yield Edit(after(instead(1, q), instead(0, k)), "takes Q and K from before RoPE", "both")
    yield Edit(instead(1, q), "takes Q from before RoPE", "q")


@at_nodes("MUL_MAT", fix="normalise Q and K before RoPE", source="quant.cpp#82, SharpMind#39")
def qk_norm_after_rope(site: Site) -> Iterator[Edit]:
    """Q and K are normalised after RoPE; the model does it before."""
    says = "normalises Q and K after RoPE; this model normalises before"
    yield from _normed(site, says, all)


@at_nodes("MUL_MAT", fix="leave Q and K as they are after RoPE: this model does not normalise them")
def qk_norm_applied(site: Site) -> Iterator[Edit]:
    """Q and K are normalised, without a weight, in a model that does not do so."""
    says = "takes Q and K that were normalised, without a weight"
    yield from _normed(site, says, lambda weights: not any(weights))


def _normed(site: Site, says: str, asked: Callable[[list[str]], bool]) -> Iterator[Edit]:
    """Scores of Q and K after RMSNorm: by the weights that theirs have, or by none."""
    made = _scores(site)
    if made is None:
        return
    weights = [_norm_weight(site, node) for node in made]
    if not asked(weights):
        return
    eps = next(
        (float(np.frombuffer(n.params, np.float32)[0]) for n in site.engine.graph.nodes if n.op == "RMS_NORM"), 0
    )

    factors = [_unscaled(site, node)[1] for node in made]

    def values(bare: bool, before: bool, n: Op) -> Op:
        for place, weight, factor in ((1, weights[0], factors[0]), (0, weights[1], factors[1])):
            scale = factor if before else 1.0
            x = n.x(place).astype(np.float64) / scale
            x = x * scale / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
            x = np.asarray(x if bare or not weight else x * site.vector(weight), np.float32)
            n = instead(place, x)(n)
        return n

    for before in (True, False)[: 1 + any(factor != 1 for factor in factors)]:
        where = "" if before else " scaled"
        if any(weights):
            yield Edit(partial(values, False, before), says, where.strip())
        without = says if not any(weights) else f"{says}, and without a weight"
        yield Edit(partial(values, True, before), without, f"bare{where}")


def _norm_weight(site: Site, node: GraphNode) -> str:
    """The weight of the norm that Q or K went through before its rotation; empty if there is none."""
    node, _ = _unscaled(site, node)
    below = site.at(node).source(0) if node.op == "ROPE" else node
    above = site.at(below).source(0) if below is not None and below.op == "MUL" else None
    return site.at(below).weight(1) if below is not None and above is not None and above.op == "RMS_NORM" else ""
