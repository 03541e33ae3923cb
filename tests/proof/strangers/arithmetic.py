"""How a right engine may compute: roundings, sums, tables, layouts. Every entry of ARITHMETICS is right.

A rounding is a function on an array that gives back what is kept of it. Blocks run along the last axis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

Array = np.ndarray
Rounding = Callable[[Array], Array]
TINY = np.float32(1e-30)


# -- roundings -----------------------------------------------------------------------------------------------------


def exact(x: Array) -> Array:
    return x


def half(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(x.dtype)


def bfloat(x: Array) -> Array:
    """The upper 16 bits of a float32, to the nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    up = bits + ((bits >> 16) & 1) + np.uint32(0x7FFF)
    kept = np.where(np.isfinite(x), up, bits) & np.uint32(0xFFFF0000)
    return kept.view(np.float32).astype(x.dtype)


def _blocks(x: Array, size: int) -> Array:
    """[..., n] -> [..., n / size, size]; rows that are no multiple are one block; size 0: a row."""
    n = x.shape[-1]
    return x.reshape(*x.shape[:-1], -1, size if size and n % size == 0 else n)


def eight(x: Array, size: int = 32, to_whole: Rounding = np.rint, keep: Rounding = exact, late: bool = False) -> Array:
    """Whole numbers up to 127 and one scale for a block; ``keep`` rounds the scale, ``late``: after dividing by it."""
    blocks = _blocks(x, size)
    scale = np.maximum(np.abs(blocks).max(axis=-1, keepdims=True) / 127, TINY).astype(x.dtype)
    kept = keep(scale)
    whole = np.clip(to_whole(blocks / (scale if late else np.maximum(kept, TINY))), -127, 127)
    return (whole * kept).astype(x.dtype).reshape(x.shape)


def eight_of_all(x: Array) -> Array:
    """One scale for the tensor."""
    scale = max(float(np.abs(x).max()) / 127, 1e-30)
    return (np.rint(x / scale) * scale).astype(x.dtype)


def eight_with_zero(x: Array, size: int = 0) -> Array:
    """256 steps from a block's least value to its greatest."""
    blocks = _blocks(x, size)
    least, most = blocks.min(axis=-1, keepdims=True), blocks.max(axis=-1, keepdims=True)
    step = np.maximum((most - least) / 255, TINY)
    return (np.rint((blocks - least) / step) * step + least).astype(x.dtype).reshape(x.shape)


def cut_half(x: Array) -> Array:
    """Float16 by dropping bits: what is kept is never larger."""
    near = x.astype(np.float16)
    larger = np.abs(near.astype(np.float32)) > np.abs(x)
    return np.where(larger, np.nextafter(near, np.float16(0)), near).astype(x.dtype)


def four(x: Array, size: int = 32) -> Array:
    """As Q4_0: the value of largest magnitude becomes -8."""
    blocks = _blocks(x, size)
    where = np.abs(blocks).argmax(axis=-1)[..., None]
    scale = np.take_along_axis(blocks, where, -1) / -8
    scale = np.where(scale == 0, TINY, scale)
    whole = np.clip(np.floor(blocks / scale + 8.5), 0, 15) - 8
    return (whole * half(scale)).astype(x.dtype).reshape(x.shape)


def four_with_least(x: Array, size: int = 32) -> Array:
    """Sixteen steps from a block's least value to its greatest, both in float16."""
    blocks = _blocks(x, size)
    least, most = blocks.min(axis=-1, keepdims=True), blocks.max(axis=-1, keepdims=True)
    step = np.maximum((most - least) / 15, TINY)
    whole = np.clip(np.rint((blocks - least) / step), 0, 15)
    return (whole * half(step) + half(least)).astype(x.dtype).reshape(x.shape)


# -- sums ----------------------------------------------------------------------------------------------------------


def plain(x: Array, w: Array) -> Array:
    """x [t, in], w [out, in] -> [t, out]."""
    return x @ w.T


def kahan(x: Array, w: Array) -> Array:
    """One product after the other, what is lost carried on."""
    total = np.zeros((len(x), len(w)), x.dtype)
    lost = np.zeros_like(total)
    for i in range(x.shape[1]):
        term = x[:, i, None] * w[None, :, i] - lost
        new = total + term
        lost = (new - total) - term
        total = new
    return total


def in_half(x: Array, w: Array, size: int = 0) -> Array:
    """Sums of ``size`` products (0: all) in float16, one after the other; those in float32."""
    n = x.shape[1]
    size = size if size and n > size else n
    total = np.zeros((len(x), len(w)), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, n, size):
            part = np.zeros_like(total, np.float16)
            for i in range(start, min(start + size, n)):
                part = (part.astype(np.float32) + x[:, i, None] * w[None, :, i]).astype(np.float16)
            total += part.astype(np.float32)
    return total.astype(x.dtype)


def in_lanes(x: Array, w: Array, lanes: int = 8) -> Array:
    """As a vector unit sums: every eighth product in a lane of its own, lanes at the end."""
    products = [x[:, lane::lanes] @ w[:, lane::lanes].T for lane in range(lanes)]
    return np.sum(np.stack(products), axis=0, dtype=x.dtype)


def in_double(x: Array, w: Array) -> Array:
    return (x.astype(np.float64) @ w.astype(np.float64).T).astype(x.dtype)


# -- functions -----------------------------------------------------------------------------------------------------


def sigmoid(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return (1 / (1 + np.exp(-x))).astype(x.dtype)


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def silu_of_table(x: Array) -> Array:
    """A table of all 65,536 float16 values: argument and value have that precision."""
    return half(silu(half(x)))


def exp_of_table(x: Array) -> Array:
    """exp looked up at float16 arguments, kept as float16."""
    return half(np.exp(half(x)))


def exp_between(x: Array, steps: int = 64) -> Array:
    """exp by straight lines between 64 points to the unit: off by 3e-5 at most."""
    place = np.where(np.isfinite(x), x, -200) * steps
    low = np.floor(place)
    left, right = np.exp(low / steps), np.exp((low + 1) / steps)
    value = left + (place - low) * (right - left)
    return np.where(np.isneginf(x), 0, value).astype(x.dtype)


def exp_of_bits(x: Array) -> Array:
    """2^n times a polynomial of degree five, as vector code has it: off by 2e-6."""
    scaled = np.maximum(np.where(np.isneginf(x), -200, x), -120) * np.float32(1.4426950408889634)
    whole = np.rint(scaled)
    f = (scaled - whole) * np.float32(0.6931471805599453)
    poly = 1 + f * (1 + f * (0.5 + f * (1 / 6 + f * (1 / 24 + f / 120))))
    return np.where(np.isneginf(x), 0, np.ldexp(poly, whole.astype(np.int32))).astype(x.dtype)


def silu_by(exp: Rounding) -> Rounding:
    """SiLU by another exp; its argument is never above zero."""

    def function(x: Array) -> Array:
        e = exp(-np.abs(x))
        return (x * np.where(x >= 0, 1, e) / (1 + e)).astype(x.dtype)

    return function


# -- the arithmetics -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arithmetic:
    """One way through a whole model.

    ``activations`` and ``weights`` are what a product rounds its operands to, ``multiply`` how it sums; ``results``
    rounds what every op gives; ``queries``, ``keys``, ``values``, ``probabilities`` what attention multiplies (K and V
    as its cache keeps them). ``layout`` are words that the engine knows (engine.py), ``elsewhere`` the taps that come
    out otherwise than llama.cpp has them because of it, ``unrecorded`` those that do not exist. ``lacks`` are places
    that bugs need (bugs.py) and this one has not; ``only`` the models it makes a difference on (none: all).
    """

    name: str
    says: str
    dtype: type = np.float32
    activations: Rounding = exact
    weights: Rounding = exact
    multiply: Callable[[Array, Array], Array] = plain
    results: Rounding = exact
    norms: Rounding = exact
    products: Rounding = exact
    queries: Rounding = exact
    keys: Rounding = exact
    values: Rounding = exact
    probabilities: Rounding = exact
    scores: Rounding = exact
    tables: Rounding = exact
    exp: Rounding = np.exp
    silu: Rounding = silu
    logits: Rounding = exact
    online: int = 0
    layout: frozenset[str] = frozenset()
    elsewhere: tuple[str, ...] = ()
    unrecorded: tuple[str, ...] = ()
    lacks: frozenset[str] = frozenset()
    only: tuple[str, ...] = ()


SCALED = frozenset({"scale"})


def _cache(name: str, says: str, kept: Rounding, **more: Rounding) -> Arithmetic:
    return Arithmetic(name, says, keys=kept, values=kept, **more)  # type: ignore[arg-type]


def _layout(name: str, says: str, *words: str, **more: object) -> Arithmetic:
    return Arithmetic(name, says, layout=frozenset(words), **more)  # type: ignore[arg-type]


def _rounded(name: str, says: str, rounding: Rounding) -> Arithmetic:
    return Arithmetic(name, says, activations=rounding)


ARITHMETICS = (
    # sums
    Arithmetic("float32", "float32 throughout"),
    Arithmetic("float64", "float64 throughout, recorded as float32", dtype=np.float64),
    Arithmetic("double sums", "float32, products summed in float64", multiply=in_double),
    Arithmetic("kahan", "float32, compensated sums", multiply=kahan),
    Arithmetic("lanes", "float32, eight sums side by side", multiply=in_lanes),
    Arithmetic("half sums of 32", "32 products summed in float16, those in float32", activations=half, weights=half,
               multiply=partial(in_half, size=32)),
    Arithmetic("half sums", "all products summed in float16", activations=half, weights=half, multiply=in_half),
    # 16 bits
    Arithmetic("bf16", "bfloat16 throughout: weights, activations, results", activations=bfloat, weights=bfloat,
               results=bfloat, norms=bfloat, products=bfloat, queries=bfloat, keys=bfloat, values=bfloat,
               probabilities=bfloat, scores=bfloat, tables=bfloat),
    Arithmetic("f16", "float16 throughout, summed in float32", activations=half, weights=half, results=half, norms=half,
               products=half, queries=half, keys=half, values=half, probabilities=half, tables=half),
    Arithmetic("f16 operands", "weights and activations in float16, the rest float32", activations=half, weights=half),
    Arithmetic("bf16 operands", "weights and activations in bfloat16, the rest float32",
               activations=bfloat, weights=bfloat),
    Arithmetic("bf16 weights", "weights in bfloat16 once they are loaded", weights=bfloat),
    # 8 bits
    _rounded("int8 row", "activations to 8 bits, a scale a row", partial(eight, size=0)),
    _rounded("int8 tensor", "activations to 8 bits, one scale for all tokens", eight_of_all),
    _rounded("int8 of 16", "activations to 8 bits in blocks of 16", partial(eight, size=16)),
    _rounded("int8 of 32", "activations to 8 bits in blocks of 32, scales in float32", partial(eight, size=32)),
    _rounded("int8 of 64", "activations to 8 bits in blocks of 64", partial(eight, size=64)),
    _rounded("int8 of 128", "activations to 8 bits in blocks of 128", partial(eight, size=128)),
    _rounded("int8 of 256", "activations to 8 bits in blocks of 256", partial(eight, size=256)),
    _rounded("int8 cut", "activations to 8 bits in blocks of 32, cut off instead of rounded",
             partial(eight, size=32, to_whole=np.trunc)),
    _rounded("int8 zero point", "activations to 256 steps between a row's least and greatest", eight_with_zero),
    _rounded("Q8_0", "activations to Q8_0, as ggml", partial(eight, size=32, keep=half, late=True)),
    _rounded("Q8_0 cut scale", "activations to Q8_0, its scale cut off to float16",
             partial(eight, size=32, keep=cut_half, late=True)),
    _rounded("Q8_0 scale first", "activations to Q8_0, divided by the scale as it is kept",
             partial(eight, size=32, keep=half)),
    # caches
    _cache("cache f16", "K and V in float16", half),
    _cache("cache f16 both", "K, V, Q and probabilities in float16, as old ggml", half, queries=half,
           probabilities=half),
    _cache("cache bf16", "K and V in bfloat16", bfloat),
    _cache("cache Q8_0", "K and V in Q8_0", partial(eight, keep=half, late=True)),
    _cache("cache Q8_0 and Q", "K, V and Q in Q8_0", partial(eight, keep=half, late=True),
           queries=partial(eight, keep=half, late=True)),
    _cache("cache int8 of a head", "K and V in 8 bits, a scale a head", partial(eight, size=0)),
    _cache("cache Q4_0", "K and V in 4 bits, as Q4_0", four),
    _cache("cache 4 bits", "K and V in 4 bits, least value and step of 32 in float16", four_with_least),
    # tables and functions
    Arithmetic("angles f16", "cos and sin in a table of float16", tables=half),
    Arithmetic("angles bf16", "cos and sin in a table of bfloat16", tables=bfloat),
    Arithmetic("silu table", "SiLU from a table of float16, as old ggml", silu=silu_of_table),
    Arithmetic("exp table", "exp of the softmax from a table of float16, as old ggml", exp=exp_of_table),
    Arithmetic("exp lines", "exp by straight lines between points, in softmax and SiLU", exp=exp_between,
               silu=silu_by(exp_between)),
    Arithmetic("exp polynomial", "exp by a polynomial, in softmax and SiLU", exp=exp_of_bits,
               silu=silu_by(exp_of_bits)),
    Arithmetic("softmax bf16", "scores in bfloat16 before the softmax, and probabilities after it", scores=bfloat,
               probabilities=bfloat),
    Arithmetic("logits f16", "logits in float16", logits=half),
    # layouts
    _layout("scale in Wq", "the attention scale multiplied into Q's weights (into its norm's, if it has one)",
            "scale in Wq", elsewhere=("Qcur_proj", "Qcur_normed", "Qcur_rope", "kq"), lacks=SCALED),
    _layout("scale in Q", "Q times the attention scale after RoPE", "scale in Q", elsewhere=("Qcur_rope", "kq"),
            lacks=SCALED),
    _layout("scale in K", "K times the attention scale after RoPE", "scale in K",
            elsewhere=("Kcur_rope", "kv_k", "kq"), lacks=SCALED),
    _layout("scale in both", "Q and K each times the scale's root after RoPE", "scale in both",
            elsewhere=("Qcur_rope", "Kcur_rope", "kv_k", "kq"), lacks=SCALED),
    _layout("scale in scores", "the product of Q and K is scaled", "scale in scores", elsewhere=("kq",), lacks=SCALED),
    _layout("norms folded", "norms' weights multiplied into the matrices after them", "norms folded",
            elsewhere=("attn_norm", "ffn_norm", "result_norm"), lacks=frozenset({"norm weights"})),
    _layout("other heads", "rows of Q and K in the other order of RoPE, at load, and rotated so", "other heads",
            elsewhere=("Qcur_proj", "Kcur_proj", "Qcur_normed", "Kcur_normed", "Qcur_rope", "Kcur_rope", "kv_k"),
            lacks=frozenset({"own pairs"})),
    _layout("fused", "one product for V, K and Q, and one whose rows are gate and up in turn", "fused"),
    _layout("transposed cache", "K and V kept [head, dim, token]", "transposed cache"),
    Arithmetic("online", "attention over blocks of four keys, scores never kept", online=4,
               unrecorded=("kq", "kq_soft_max"), lacks=frozenset({"scores"})),
    # some at once
    Arithmetic("online f16", "attention over blocks of eight keys of a float16 cache; scale in Q", online=8, keys=half,
               values=half, layout=frozenset({"scale in Q", "transposed cache"}), elsewhere=("Qcur_rope",),
               unrecorded=("kq", "kq_soft_max"), lacks=frozenset({"scores", "scale"})),
    Arithmetic("all layouts", "heads, norms, scale, fused: all at once", elsewhere=(
        "attn_norm", "ffn_norm", "result_norm", "Qcur_proj", "Kcur_proj", "Qcur_normed", "Kcur_normed", "Qcur_rope",
        "Kcur_rope", "kv_k", "kq"), lacks=frozenset({"scale", "norm weights", "own pairs"}),
               layout=frozenset({"scale in Q", "norms folded", "other heads", "fused", "transposed cache"})),
    Arithmetic("int8 all round", "activations to Q8_0, K, V and Q in Q8_0, angles in float16, SiLU from a table",
               activations=partial(eight, keep=half, late=True), keys=partial(eight, keep=half, late=True),
               values=partial(eight, keep=half, late=True), queries=partial(eight, keep=half, late=True), tables=half,
               silu=silu_of_table),
    # products alone in 16 bits, as torch.autocast has them
    Arithmetic("autocast bf16", "products in bfloat16: operands and results", activations=bfloat, weights=bfloat,
               products=bfloat),
    Arithmetic("autocast f16", "the same in float16", activations=half, weights=half, products=half),
    Arithmetic("autocast f16 fused", "the same, and residuals are added in one kernel", activations=half, weights=half,
               products=half, unrecorded=("attn_out", "ffn_out")),
)  # fmt: skip
BY_NAME = {arithmetic.name: arithmetic for arithmetic in ARITHMETICS}
