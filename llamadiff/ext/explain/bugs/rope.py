"""RoPE at nodes of a graph. op_params are those of ggml_rope_impl: n_dims, mode, context, base, scale, YaRN's four."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from llamadiff.ext.explain.alter import (
    after,
    changed,
    gives,
    instead,
    plus,
    through,
    with_float,
    with_int,
    with_source,
    with_weight,
)
from llamadiff.ext.explain.case import Array, Recording
from llamadiff.ext.explain.registry import Constant, Edit, at_nodes
from llamadiff.ext.explain.site import Site
from llamadiff.ext.explain.solve import ROPE_BASE, ROPE_FACTOR
from llamadiff.ext.graph.engine import Alter
from llamadiff.ext.graph.graph import GraphNode
from llamadiff.ext.graph.op import Op, Operand
from llamadiff.ext.graph.ops.rope import MROPE, NEOX, Parameters, yarn_ramp

SCALING = "shainet#111, mlxcel#1355, imp#880"  # who had bugs of scaled positions
ORIGINAL = tuple(1 << n for n in range(10, 21))  # contexts, in tokens, that models are trained with
DIMS, MODE, BASE, SCALE, EXT, ATTN = 1, 2, 5, 6, 7, 8  # places among the parameters


@at_nodes(
    "ROPE",
    fix="rotate the layout of the architecture; GGUF files of llama permute the rows of Q and K for (2i, 2i+1)",
    source="TinyLlama#24, llama.cpp#22611, candle#3410, imp#503",
)
def rope_layout(site: Site) -> Iterator[Edit]:
    """RoPE rotates halves (i, i + n/2) where the model needs pairs (2i, 2i+1), or the other way round."""
    mode, half = int(site.ints[MODE]), int(site.ints[DIMS]) // 2
    pairs, halves = "(2i, 2i+1)", f"(i, i+{half})"
    if mode == 0:
        fix = f"rotate {pairs}: the rows of Q and K in the file are permuted for it"
        yield Edit(with_int(p2=NEOX), f"rotates {halves}; this model needs {pairs}", fix=fix)
    elif mode == NEOX:
        fix = f"rotate {halves}: the rows of Q and K in the file are as in the checkpoint"
        yield Edit(with_int(p2=0), f"rotates {pairs}; this model needs {halves}", fix=fix)


@at_nodes(
    "ROPE",
    fix="read rope.freq_base from the file (10000 where it is missing), for layers with a window rope.freq_base_swa",
    source="llama.cpp#3401",
    general=True,
)
def rope_base(site: Site) -> Iterator[Constant]:
    """RoPE's base is not the file's."""
    own = float(site.floats[BASE])
    others = tuple(value for value in ROPE_BASE.familiar if value != own)
    fix = f"rotate with base {own:.6g}: rope.freq_base of the file, or rope.freq_base_swa in a layer with a window"
    yield Constant(lambda value: with_float(p5=value), ROPE_BASE, own, others, fix=fix)


@at_nodes("ROPE", fix="apply rope.scaling.type and rope.scaling.factor of the file", source=SCALING)
def rope_scaling_ignored(site: Site) -> Iterator[Edit]:
    """The file's RoPE scaling (linear or YaRN) is ignored."""
    scale, ext = float(site.floats[SCALE]), float(site.floats[EXT])
    if scale != 1 or ext:
        what = "YaRN" if ext else f"the scaling by {1 / scale:.4g}"
        yield Edit(with_float(p6=1.0, p7=0.0, p8=1.0), f"ignores {what} that the file asks for", fix=_fix(scale, ext))
    if ext:
        kept = float(site.floats[ATTN]) * _grown(scale)
        says = "ignores YaRN that the file asks for"
        yield Edit(with_float(p6=1.0, p7=0.0, p8=kept), says, "magnitude kept", fix=_fix(scale, ext))


def _fix(scale: float, ext: float) -> str:
    """What positions are to be divided by."""
    if ext:
        return f"divide the slow pairs' angles by {1 / scale:.4g} and keep the fast ones, as YaRN does"
    return f"divide positions by {1 / scale:.4g}, once" if scale != 1 else "take positions as they are, not scaled"


@at_nodes("ROPE", fix="divide positions by rope.scaling.factor; do not multiply", source=SCALING)
def rope_scaling_inverted(site: Site) -> Iterator[Edit]:
    """Positions are multiplied by the scaling factor instead of divided."""
    scale = float(site.floats[SCALE])
    if scale == 1:
        return
    says, fix = f"multiplies positions by {1 / scale:.4g} instead of dividing", _fix(scale, float(site.floats[EXT]))
    if not site.floats[EXT]:
        yield Edit(with_float(p6=1 / scale), says, fix=fix)
        return
    grown, inverted = _grown(scale), _grown(1 / scale)
    for magnitude, variant in ((inverted, ""), (1.0, "plain"), (grown, "magnitude")):
        alter = with_float(p6=1 / scale, p8=float(site.floats[ATTN]) * magnitude / inverted)
        yield Edit(alter, says, variant, fix=fix)


def _grown(scale: float) -> float:
    """YaRN's attention temperature, which ggml multiplies the attention factor by."""
    return 1 + 0.1 * math.log(1 / scale)


@at_nodes("ROPE", fix="divide positions by rope.scaling.factor once", source=SCALING)
def rope_scaling_doubled(site: Site) -> Iterator[Edit]:
    """RoPE scaling is applied twice."""
    scale = float(site.floats[SCALE])
    if scale != 1:
        says, fix = f"divides positions by {1 / scale:g} twice", f"divide positions by {1 / scale:g} once"
        yield Edit(with_float(p6=scale * scale), says, fix=fix)
        yield Edit(with_source(1, lambda n: n.x(1) * scale), says, "first", fix=fix)
    s = Parameters.of(site.ints, site.floats)
    if s.ext_factor:
        says = "scales frequencies by YaRN twice"
        yield Edit(_with_factors(1 / _kept(s)), says, "YaRN", fix=_fix(scale, s.ext_factor))


def _kept(s: Parameters) -> Array:
    """What YaRN leaves of each pair's frequency, in ggml: [pair]."""
    low, high = s.yarn_range
    ramp = yarn_ramp(s.n_dims // 2, math.floor(low), math.ceil(high))
    return np.asarray(s.scale + (1 - s.scale) * s.ext_factor * ramp)


@at_nodes("ROPE", fix="read rope.scaling.original_context_length, not context_length", source=SCALING)
def rope_yarn_original(site: Site) -> Iterator[Edit]:
    """YaRN's original context is not the file's."""
    s = Parameters.of(site.ints, site.floats)
    for length in ORIGINAL if s.ext_factor else ():
        other = _kept(replace(s, n_ctx_orig=length))
        if length != s.n_ctx_orig and not np.array_equal(_kept(s), other):
            says = f"blends YaRN's frequencies as of an original context of {length}, where {s.n_ctx_orig} is right"
            fix = f"take {s.n_ctx_orig}, rope.scaling.original_context_length of the file"
            yield Edit(_with_factors(_kept(s) / other), says, f"{length}", fix=fix)


@at_nodes(
    "ROPE", fix="scale positions as the file's rope.scaling says, and not otherwise", source=SCALING, general=True
)
def rope_scaling_applied(site: Site) -> Iterator[Constant]:
    """Positions are scaled by a factor that is not the file's."""
    scale, ext = float(site.floats[SCALE]), float(site.floats[EXT])
    make = lambda value: with_float(p6=1 / value, p7=0.0)  # noqa: E731
    yield Constant(make, ROPE_FACTOR, 1 / scale, fix=_fix(scale, ext))


@at_nodes("ROPE", fix="blend scaled and plain angles by frequency, as YaRN does", source=SCALING)
def rope_yarn_as_linear(site: Site) -> Iterator[Edit]:
    """YaRN is taken for linear scaling: all frequencies are divided."""
    if site.floats[EXT]:
        says, kept = "divides all frequencies; YaRN keeps the high ones", _grown(float(site.floats[SCALE]))
        yield Edit(with_float(p7=0.0), says)
        yield Edit(with_float(p7=0.0, p8=float(site.floats[ATTN]) * kept), says, "magnitude")


@at_nodes(
    "ROPE", fix="multiply cos and sin by the model's attention factor: of YaRN, 0.1 ln(factor) + 1", source=SCALING
)
def rope_yarn_magnitude(site: Site) -> Iterator[Edit]:
    """The attention factor of YaRN or LongRoPE is left out, is applied where the model has none, or is YaRN's own."""
    scale, factor = float(site.floats[SCALE]), float(site.floats[ATTN])
    grown = _grown(scale) if site.floats[EXT] else 1.0
    own = factor * grown
    for magnitude in dict.fromkeys((1.0, grown, _grown(scale))):
        if abs(magnitude - own) <= 1e-6:
            continue
        does = f"multiplies cos and sin by {magnitude:.4g}"
        if magnitude == 1:
            does = "leaves out the attention factor"
        needs = f"this model multiplies cos and sin by {own:.4g}" if abs(own - 1) > 1e-6 else "this model has none"
        fix = f"multiply cos and sin by {own:.4g}" if abs(own - 1) > 1e-6 else "leave cos and sin as they are"
        yield Edit(with_float(p8=magnitude / grown), f"{does}; {needs}", f"{magnitude == 1}", fix=fix)


@at_nodes("ROPE", fix="round YaRN's correction range down and up, as llama.cpp does", source="vllm#27722, tvm#18576")
def rope_yarn_unrounded(site: Site) -> Iterator[Edit]:
    """YaRN's correction range is not rounded to whole pairs."""
    s = Parameters.of(site.ints, site.floats)
    if not s.ext_factor:
        return
    low, high = s.yarn_range
    kept = _kept(s)
    keeps = s.scale + (1 - s.scale) * s.ext_factor * yarn_ramp(s.n_dims // 2, low, high)
    if np.array_equal(kept, keeps):
        return
    pairs = f"{math.floor(low)} to {math.ceil(high)}"
    says = f"blends YaRN's frequencies over pairs {low:.2f} to {high:.2f}; this model rounds these to {pairs}"
    fix = f"blend over pairs {pairs}, as llama.cpp does; truncate = false in a config.json asks for what you have"
    yield Edit(_with_factors(kept / keeps), says, fix=fix)


@at_nodes("ROPE", fix="choose LongRoPE's factors by the context's length, for all tokens", source=SCALING)
def rope_long_factors(site: Site) -> Iterator[Edit]:
    """LongRoPE's factors are those of a short context in a long one, or the other way round."""
    name = site.weight(2)
    for own, other in (("long", "short"), ("short", "long")):
        if name.startswith(f"rope_factors_{own}"):
            says = f"takes LongRoPE's factors of a {other} context ({name.replace(own, other)}), where {name} is right"
            fix = f"take {name}: the context is {'longer' if own == 'long' else 'no longer'} than the original one"
            yield Edit(with_weight(site, 2, name.replace(own, other)), says, fix=fix)


@at_nodes("ROPE", fix="divide frequencies by rope_freqs.weight", source=SCALING)
def rope_factors_ignored(site: Site) -> Iterator[Edit]:
    """The file's frequency factors (rope_freqs.weight, Llama 3.1 and later) are ignored."""
    if site.number(2) is not None:
        fix = f"divide frequencies by {site.named(2)}"
        yield Edit(with_source(2, None), f"ignores the frequency factors ({site.named(2)})", fix=fix)


@at_nodes("ROPE", fix="divide frequencies by rope_freqs.weight; do not multiply", source=SCALING)
def rope_factors_inverted(site: Site) -> Iterator[Edit]:
    """Frequencies are multiplied by the frequency factors instead of divided."""
    if site.number(2) is not None:
        fix = f"divide frequencies by {site.named(2)}; do not multiply"
        yield Edit(with_source(2, lambda n: 1 / n.x(2)), "multiplies frequencies by the frequency factors", fix=fix)


@at_nodes("ROPE", fix="rotate only the first rope.dimension_count values of each head", source="mlx-lm#1698")
def rope_partial_ignored(site: Site) -> Iterator[Edit]:
    """Whole heads are rotated where the model rotates only a part of each."""
    own, width = int(site.ints[DIMS]), site.node.shape[-1]
    if own < width:
        says, fix = f"rotates all {width} values of a head; this model rotates {own}", f"rotate the first {own} alone"
        yield Edit(with_int(p1=width), says, fix=fix)


@at_nodes(
    "ROPE", fix="rotate rope.dimension_count values of each head (key_length where it is missing)", source="mlx-lm#1698"
)
def rope_partial(site: Site) -> Iterator[Edit]:
    """Only a part of each head is rotated where the model rotates more."""
    own = int(site.ints[DIMS])
    fix = f"rotate {own} values of each head: rope.dimension_count (key_length where it is missing)"
    for part in (2, 4):
        if own % (2 * part) == 0:
            says = f"rotates the first {own // part} values of a head; this model rotates {own}"
            yield Edit(with_int(p1=own // part), says, f"1/{part}", fix=fix)
            says = f"rotates the first {own // part // 2} of {own // 2} pairs"
            first = np.arange(own // 2) < own // part // 2
            yield Edit(_with_factors(np.where(first, 1.0, np.inf)), says, f"{part}", fix=fix)
            exponents = 2 * np.arange(own // part // 2) * (1 / own - 1 / (own // part))
            kept = _with_factors(float(site.floats[BASE]) ** exponents)  # the frequencies of all pairs
            yield Edit(after(kept, with_int(p1=own // part)), says, f"{part} narrow", fix=fix)


def _with_factors(factors: Array) -> Alter:
    """Frequencies divided by more factors."""

    def alter(n: Op) -> Op:
        own = n.optional(2)
        values = np.asarray(factors if own is None else own.reshape(-1)[: len(factors)] * factors, np.float32)
        return replace(n, sources=(*n.sources[:2], Operand(values.reshape(1, 1, 1, 1, -1))))

    return alter


@at_nodes("ROPE", fix="rotate by +theta: (x cos - y sin, x sin + y cos)")
def rope_direction(site: Site) -> Iterator[Edit]:
    """RoPE rotates in the opposite direction: the sign of sin is flipped."""
    yield Edit(with_source(1, lambda n: -n.x(1)), "rotates by -theta: the sign of sin is flipped")


@at_nodes("ROPE", fix="count positions from 0", source="tiny-llm#46, onnxruntime-genai#2354")
def rope_position(site: Site) -> Iterator[Edit]:
    """Positions are off by one or two."""
    for shift in (1, -1, 2, -2):
        says = f"rotates by the position {'+' if shift > 0 else '-'} {abs(shift)}; positions count from 0"
        yield Edit(plus(1, shift), says, f"{shift:+d}")


@at_nodes(
    "ROPE",
    fix="in decode steps, and in every batch, go on counting where the one before ended",
    source="tiny-llm#46, onnxruntime-genai#2354",
)
def rope_position_restarted(site: Site) -> Iterator[Edit]:
    """Positions are wrong in decode steps: they restart at 0, stand still, or lag by one."""
    if int(site.ints[MODE]) & MROPE:
        return
    for says, positions in wrong_positions(site.case.run):
        yield Edit(instead(1, positions.reshape(1, *site.shape(1))), says, says)


@at_nodes("ROPE", fix="rotate Q and K before the scores are taken")
def rope_missing(site: Site) -> Iterator[Edit]:
    """RoPE is left out."""
    yield Edit(through, "does not rotate at all")


@at_nodes("ROPE", fix="rotate once")
def rope_twice(site: Site) -> Iterator[Edit]:
    """RoPE is applied twice."""
    first, tokens = site.case.run.edges[1], len(site.case.run.tokens)
    yield Edit(gives(partial(_again, site, 0)), "rotates twice")
    if first < tokens:
        which = "in decode steps" if first >= site.case.run.n_prefill else "after the first batch"
        yield Edit(gives(partial(_again, site, first)), f"rotates twice {which}", "later")


def _again(site: Site, first: int, x: Array) -> Array:
    """Heads that are rotated, rotated once more from a token on."""
    turned = site.computed(site.node, x)
    return np.concatenate([np.broadcast_to(x, turned.shape)[:, :, :first], turned[:, :, first:]], axis=2)


@at_nodes("ROPE", fix="leave the rows of Q and K as the file has them", source="TinyLlama#24, llama.cpp#22611")
def rope_permuted(site: Site) -> Iterator[Edit]:
    """Q or K is permuted once more, or not back, before it is rotated."""
    for to_halves in (True, False) if site.node.shape[-1] % 2 == 0 else ():
        way = "pairs into halves" if to_halves else "halves into pairs"
        says = f"rotates heads whose values were put from {way} first"
        yield Edit(changed(0, partial(reordered, to_halves=to_halves)), says, str(to_halves))


@at_nodes(
    "ROPE",
    fix='nothing, if Q and K are both so: scores are the same; done = ["permuted"] in a name map says it beforehand',
    harmless=True,
)
def rope_other_order(site: Site) -> Iterator[Edit]:
    """Heads hold the right values in Hugging Face's order (halves) where the file has GGUF's (pairs)."""
    if site.node.shape[-1] % 2 == 0:
        for to_halves in (True, False):
            other = gives(partial(reordered, to_halves=to_halves))
            yield Edit(other, "has the right values in the other order within each head", str(to_halves))


def _rope_of(site: Site) -> GraphNode | None:
    """The rotation that a node's result goes into, through its norm if it has one."""
    for _ in range(3):
        turned, normed = site.user("ROPE"), site.user("RMS_NORM", "MUL", "ADD")
        if turned is not None or normed is None:
            return turned
        site = site.at(normed)
    return None


@at_nodes(
    "MUL_MAT",
    "ADD",
    "VIEW",
    fix="leave Q's and K's rows as they are; permute them only if RoPE then rotates halves",
    source="TinyLlama#24, llama.cpp#22611",
)
def qk_permuted(site: Site) -> Iterator[Edit]:
    """The rows of Q or K are permuted within each head: between GGUF's order (pairs) and Hugging Face's (halves)."""
    node, rope = site.node, _rope_of(site)
    made = node.op == "VIEW" or bool(site.weight(0 if node.op == "MUL_MAT" else 1))
    if rope is None or not made or rope.shape[-1] % 2 or node.shape[-1] % rope.shape[-1]:
        return
    dim = rope.shape[-1]
    biased = node.op == "MUL_MAT" and site.user("ADD") is not None
    for to_halves in (True, False):
        way = "Hugging Face's order (halves)" if to_halves else "GGUF's order (pairs)"
        says = f"has the rows of each head permuted into {way}; right only if RoPE rotates that layout"
        says = f"{says}; the bias is not permuted" if biased else says
        other = (
            "pairs (2i, 2i+1)"
            if int(np.frombuffer(rope.params, np.int32)[MODE]) & NEOX
            else f"halves (i, i+{dim // 2})"
        )
        fix = f"leave the rows as the file has them, unless RoPE then rotates {other}"
        yield Edit(gives(partial(_by_heads, dim, to_halves)), says, f"{to_halves}{' bias' * biased}", fix=fix)


def _by_heads(dim: int, to_halves: bool, x: Array) -> Array:
    return reordered(x.reshape(*x.shape[:-1], -1, dim), to_halves).reshape(x.shape)


@at_nodes("MUL_MAT", "ADD", "VIEW", fix="rotate Q and K alone")
def rope_on_v(site: Site) -> Iterator[Edit]:
    """RoPE is applied to V as well."""
    rope = site.nearest("ROPE")
    if rope is None or not any(_keeps_values(site, user) for user in site.users()):
        return

    def turned(x: Array) -> Array:
        heads = x.reshape(len(x), 1, len(site.case.run.tokens), -1, rope.shape[-1])
        return site.computed(rope, heads).reshape(-1, *x.shape[1:])

    if int(np.prod(site.node.shape[-2:])) % rope.shape[-1] == 0:
        yield Edit(gives(turned), "is rotated by RoPE, as only Q and K should be")


def _keeps_values(site: Site, user: GraphNode) -> bool:
    """Whether a node writes into the cache of V."""
    leaf = site.engine.graph.leaves.get(user.view[0]) if user.op == "SET_ROWS" and user.view else None
    return leaf is not None and leaf.name.startswith("cache_v")


def wrong_positions(run: Recording) -> Iterator[tuple[str, Array]]:
    """Positions that go wrong after the first batch, or after the prompt, each way in words."""
    count, seen, right = len(run.positions), set[bytes](), run.positions
    begun = np.repeat([start for start, _ in run.batches], np.diff(run.edges))  # the first token of each token's batch
    within = np.arange(count) - begun
    for n in dict.fromkeys((run.edges[1], run.n_prefill)):
        if not 0 < n < count:
            continue
        decode, end = n >= run.n_prefill, right[n - 1]
        which, what = ("decode step", "the prompt") if decode else ("batch after the first", "the first batch")
        tails = {
            f"lags by one position in every {which}": right - 1,
            f"restarts at position 0 in every {which}": within,
            f"restarts counting positions from 0 {'in decode' if decode else f'after {what}'}": np.arange(count) - n,
            f"stays at {what}'s length in every {which}": end + 1 + within,
            f"stays at {what}'s last position in every {which}": end + within,
            f"is one position ahead in every {which}": right + 1,
        }
        for says, tail in tails.items():
            positions = np.concatenate([right[:n], tail[n:]]).astype(right.dtype)
            if positions.tobytes() not in seen | {right.tobytes()}:
                seen.add(positions.tobytes())
                yield says, positions


def reordered(x: Array, to_halves: bool) -> Array:
    """Each head's values: neighbours moved to halves, or halves to neighbours."""
    *lead, d = x.shape
    split = x.reshape(*lead, d // 2, 2) if to_halves else x.reshape(*lead, 2, d // 2)
    return np.ascontiguousarray(np.swapaxes(split, -1, -2)).reshape(x.shape)
