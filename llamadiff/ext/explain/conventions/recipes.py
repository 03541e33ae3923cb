"""Ops of the reference engine laid open, on inputs that a candidate recorded: arithmetic is read from these."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from llamaref import ops
from numpy.typing import NDArray

from llamadiff.ext.explain.case import Case, NotRecordedError
from llamadiff.numerics.rounding_tap import Carrier

Array = NDArray[Any]
DENSE = (
    "Qcur_proj", "Kcur_proj", "Vcur_proj", "attn_out", "ffn_moe_logits", "ffn_gate", "ffn_up", "ffn_out",
    "result_output",
)  # fmt: skip
EXPERTS = ("ffn_moe_gate", "ffn_moe_up", "ffn_moe_down")
PUT_IN = {"k": "Kcur_rope", "v": "Vcur_proj"}  # what goes into the cache


@dataclass(frozen=True)
class Op:
    """What an op was ``given``, [b, token, ...] each, and what it makes of that in each arithmetic of a carrier."""

    given: tuple[Array, ...]
    compute: Callable[[Carrier], Array]


@dataclass(frozen=True)
class Product:
    """``x`` [b, token, in] by ``rows`` of a weight matrix, as they are decoded, plus a bias.

    ``chosen`` [b, token, used] numbers the experts of each token.
    """

    case: Case
    x: Array
    name: str
    rows: Any
    bias: Array | None = None
    scale: Array | None = None
    chosen: Array | None = None

    def compute(self, carrier: Carrier) -> Array:
        """Scale before the bias in attention, after it in the FFN (llama.cpp, llama-graph.cpp)."""
        w = self.case.engine.w
        kind = w.type(self.name)
        if self.chosen is not None:
            chosen = np.broadcast_to(self.chosen, (len(carrier.ways), *self.chosen.shape[1:]))
            x, *sums = carrier.operands(kind, np.broadcast_to(self.x, (*chosen.shape, self.x.shape[-1])))
            y = w.experts(self.name, x, chosen, *sums, rows=self.rows)
            return y if self.scale is None else y * self.scale[chosen][..., None]
        x, *sums = carrier.operands(kind, self.x)
        y, late = w.product(self.name, x, *sums, rows=self.rows), ".ffn_" in self.name
        y = y + self.bias if self.bias is not None and late else y
        y = y * self.scale if self.scale is not None else y
        return y + self.bias if self.bias is not None and not late else y


def recipe_of(case: Case) -> Op | Product:
    """The op of a case's tap. Raises NotRecordedError where an input is missing, or for an op that is not laid open."""
    build = _RECIPES.get(case.tap.kind.word)
    if build is None:
        raise NotRecordedError(case.tap.name)
    return build(case)


def dense(case: Case) -> Product:
    """The product of a tap."""
    assert case.weight is not None
    if case.weight.endswith("_exps.weight"):  # the experts' weighted sum
        raise NotRecordedError(case.tap.name)
    stem = case.weight.removesuffix(".weight")
    rows, bias = _fused(case) if stem.endswith("attn_qkv") else (slice(None), case.vector(f"{stem}.bias"))
    if case.channels is not None:
        rows = case.channels if isinstance(rows, slice) else rows[case.channels]
        bias = bias if bias is None else bias[case.channels]
    return Product(case, case.tap_input(), case.weight, rows, bias, case.engine.scale(stem))


def _fused(case: Case) -> tuple[Array, Array | None]:
    """Rows of the fused matrix that are this tap's, and its part of the bias."""
    c, part = case.config, case.tap.kind.word[0]
    sizes = {"Q": c.n_head * c.head_k, "K": c.n_head_kv * c.head_k, "V": c.n_head_kv * c.head_v}
    rows = np.split(np.arange(sum(sizes.values())), np.cumsum([*sizes.values()])[:-1])["QKV".index(part)]
    whole = case.vector(f"blk.{case.layer}.attn_qkv.bias")
    own = case.vector(f"blk.{case.layer}.attn_{part.lower()}.bias")
    return rows, whole[rows] if whole is not None else own


def experts(case: Case) -> Product:
    """The chosen experts' products."""
    assert case.weight is not None
    x = case["ffn_moe_swiglu"] if case.tap.kind.word == "ffn_moe_down" else case["ffn_norm"][..., None, :]
    scale = case.engine.scale(case.weight.removesuffix(".weight"))
    rows = slice(None) if case.channels is None else case.channels
    return Product(case, x, case.weight, rows, scale=scale, chosen=case["ffn_moe_topk"])


def scores(case: Case) -> Op:
    """Q [b, t, head, dim] against the cache's K, one head for each of Q's."""
    q, k = case["Qcur_rope"], _cached(case, "k")
    return Op((q, k), lambda carrier: ops.attention_scores(*carrier.operands("cache_k", q, k)))


def values(case: Case) -> Op:
    """Probabilities [b, head, t, s] against the cache's V, one head for each of Q's."""
    probs, v = case["kq_soft_max"], _cached(case, "v")
    return Op((probs, v), lambda carrier: ops.attention_values(*carrier.operands("cache_v", probs, v)))


def _cached(case: Case, side: str) -> Array:
    """The cache's rows, recorded or what was put in: [b, s, head, dim]."""
    try:
        rows = case[f"kv_{side}"]
    except NotRecordedError:
        rows = cache(case, side).compute(case.carrier)
    return np.repeat(rows, case.config.n_head // case.config.n_head_kv, axis=2)


def cache(case: Case, side: str = "") -> Op:
    """Rows as they were put in: K or V [b, s, kv_head * dim] -> [b, s, kv_head, dim]."""
    side = side or case.tap.kind.word[-1]
    x = case[PUT_IN[side]]
    x = x.reshape(*x.shape[:2], case.config.n_head_kv, -1)
    return Op((x,), lambda carrier: carrier.store(f"cache_{side}", x))


def rope(case: Case) -> Op:
    """The rotation of a tap, as the model has it."""
    side = case.tap.kind.word[0]
    normed = f"{side}cur_normed-{case.tap.layer}" in case.run.shapes
    x = case[f"{side}cur_normed" if normed else f"{side}cur_proj"]
    x = x.reshape(1, len(case.run.tokens), -1, case.config.head_k)
    rotate = ops.rope_pairs if case.run.model.rope_pairs else ops.rope_halves

    def rotated(carrier: Carrier) -> Array:
        step = case.engine.step(case.run.tokens, [*case.run.positions], tap=carrier)
        return rotate(np.repeat(x, len(step.cos), axis=0), step.cos, step.sin)

    return Op((x,), rotated)


def softmax(case: Case) -> Op:
    """Scaled, masked, normalised."""
    x, scale, places = case["kq"], 1.0 / math.sqrt(case.config.head_k), case.run.positions
    return Op((x * np.asarray(scale, x.dtype),), lambda carrier: ops.causal_softmax(x, scale, places, places))


def probabilities(case: Case) -> Op:
    """Softmax over all experts."""
    x = case["ffn_moe_logits"]
    return Op((x,), lambda carrier: ops.softmax(x))


def swiglu(case: Case) -> Op:
    """silu(gate) * up."""
    moe = "moe_" if case.tap.kind.word == "ffn_moe_swiglu" else ""
    gate, up = case[f"ffn_{moe}gate"], case[f"ffn_{moe}up"]
    return Op((gate, up), lambda carrier: ops.swiglu(gate, up))


_RECIPES: dict[str, Callable[[Case], Op | Product]] = {
    **dict.fromkeys(DENSE, dense),
    **dict.fromkeys(EXPERTS, experts),
    **dict.fromkeys(("kv_k", "kv_v"), cache),
    **dict.fromkeys(("Qcur_rope", "Kcur_rope"), rope),
    **dict.fromkeys(("ffn_swiglu", "ffn_moe_swiglu"), swiglu),
    "kq": scores,
    "kq_soft_max": softmax,
    "kqv_out": values,
    "ffn_moe_probs": probabilities,
}
