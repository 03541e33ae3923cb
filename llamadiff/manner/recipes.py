"""Ops of the reference engine laid open, on inputs that a candidate recorded: arithmetic is read from these."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from llamaref import config as settings
from llamaref import ops
from numpy.typing import NDArray

from llamadiff.diagnose.case import Case, NotRecordedError

Array = NDArray[Any]
DENSE = (
    "Qcur_proj", "Kcur_proj", "Vcur_proj", "attn_out", "ffn_moe_logits", "ffn_gate", "ffn_up", "ffn_out",
    "result_output",
)  # fmt: skip
EXPERTS = ("ffn_moe_gate", "ffn_moe_up", "ffn_moe_down")
PUT_IN = {"k": "Kcur_rope", "v": "Vcur_proj"}  # what goes into the cache


class Recipe(Protocol):
    """One op, laid open."""

    def compute(self, case: Case) -> Array:
        """The op's result, [b, token, ...]: one batch entry, or one for each arithmetic."""
        ...


Builder = TypeVar("Builder", bound="Callable[[Case], Recipe]")
_RECIPES: dict[str, Callable[[Case], Recipe]] = {}


def recipe(*words: str) -> Callable[[Builder], Builder]:
    """Register the function that lays these taps' op open."""

    def register(build: Builder) -> Builder:
        _RECIPES.update(dict.fromkeys(words, build))
        return build

    return register


def recipe_of(case: Case) -> Recipe:
    """The recipe of a case's tap. Raises NotRecordedError where an input is missing, or there is no recipe."""
    build = _RECIPES.get(case.tap.kind.word)
    if build is None:
        raise NotRecordedError(case.tap.name)
    return build(case)


@dataclass(frozen=True)
class Product:
    """``x`` [b, token, in] by the rows of a weight matrix, as they are decoded, plus a bias.

    ``rows`` of the matrix make the result's channels; ``chosen`` [b, token, used] numbers the experts of each token.
    """

    x: Array
    name: str
    rows: Array | None = None
    bias: Array | None = None
    scale: Array | None = None
    chosen: Array | None = None

    def compute(self, case: Case) -> Array:
        w = case.engine.w
        kind = w.type(self.name)
        if self.chosen is not None:
            return self._experts(case, self.chosen, kind)
        x, *sums = case.carrier.operands(kind, self.x)
        return self._finished(case, w.product(self.name, x, *sums, rows=self._rows(case)))

    def _rows(self, case: Case) -> Any:
        """Which rows of the matrix are multiplied: this op's, and of them those that are looked at."""
        if self.rows is None:
            return slice(None) if case.channels is None else case.channels
        return self.rows if case.channels is None else self.rows[case.channels]

    def _finished(self, case: Case, y: Array) -> Array:
        """Scale before the bias in attention, after it in the FFN (llama.cpp, llama-graph.cpp)."""
        bias = self.bias if self.bias is None or case.channels is None else self.bias[case.channels]
        late = ".ffn_" in self.name
        y = y + bias if bias is not None and late else y
        y = y * self.scale if self.scale is not None else y
        return y + bias if bias is not None and not late else y

    def _experts(self, case: Case, chosen: Array, kind: str) -> Array:
        ways = len(case.carrier.ways)
        chosen = np.broadcast_to(chosen, (ways, *chosen.shape[1:]))
        x = np.broadcast_to(self.x, (ways, *chosen.shape[1:], self.x.shape[-1]))
        x, *sums = case.carrier.operands(kind, x)
        out = case.engine.w.experts(self.name, x, chosen, *sums, rows=self._rows(case))
        return out if self.scale is None else out * self.scale[chosen][..., None]


@dataclass(frozen=True)
class Mixture:
    """The experts' weighted sum: [b, token, used, embd], [b, token, used]."""

    experts: Array
    weights: Array

    def compute(self, case: Case) -> Array:
        return ops.weighted_sum(self.experts, self.weights)


def mixture(case: Case) -> Mixture:
    """The FFN's output."""
    return Mixture(case["ffn_moe_down"], case["ffn_moe_weights_norm"])


@recipe(*DENSE)
def dense(case: Case) -> Any:
    """The product of a tap."""
    if case.tap.kind.word == "ffn_out" and case.weight is not None and case.weight.endswith("_exps.weight"):
        return mixture(case)
    assert case.weight is not None
    stem = case.weight.removesuffix(".weight")
    rows, bias = _fused(case) if stem.endswith("attn_qkv") else (None, case.vector(f"{stem}.bias"))
    return Product(case.tap_input(), case.weight, rows, bias, case.engine.scale(stem))


@recipe(*EXPERTS)
def experts(case: Case) -> Product:
    """The chosen experts' products."""
    assert case.weight is not None
    x = case["ffn_moe_swiglu"] if case.tap.kind.word == "ffn_moe_down" else case["ffn_norm"][..., None, :]
    scale = case.engine.scale(case.weight.removesuffix(".weight"))
    return Product(x, case.weight, scale=scale, chosen=case["ffn_moe_topk"])


def _segments(case: Case) -> dict[str, int]:
    c = case.config
    return {"Q": c.n_head * c.head_k, "K": c.n_head_kv * c.head_k, "V": c.n_head_kv * c.head_v}


def _fused(case: Case) -> tuple[Array, Array | None]:
    """Rows of the fused matrix that are this tap's, and its part of the bias."""
    part, start = case.tap.kind.word[0], 0
    for name, size in _segments(case).items():
        if name == part:
            rows = np.arange(start, start + size)
        start += size
    whole = case.vector(f"blk.{case.layer}.attn_qkv.bias")
    own = case.vector(f"blk.{case.layer}.attn_{part.lower()}.bias")
    return rows, whole[rows] if whole is not None else own


@dataclass(frozen=True)
class Given:
    """Values that are right as they are: rows that were put into a cache, a softmax of what was recorded."""

    x: Array

    def compute(self, case: Case) -> Array:
        return self.x


@dataclass(frozen=True)
class Scores:
    """Scores of ``q`` [b, t, head, dim] and K ``rows`` [b, s, kv_head, dim]; head h reads K head ``reads[h]``."""

    q: Array
    rows: Array
    reads: Array

    def compute(self, case: Case) -> Array:
        q, k = case.carrier.operands("cache_k", self.q, self.rows[:, :, self.reads])
        return ops.attention_scores(q, k)


@dataclass(frozen=True)
class Values:
    """Sums of V ``rows`` [b, s, kv_head, dim] by ``probs`` [b, head, t, s]; head h reads V head ``reads[h]``."""

    probs: Array
    rows: Array
    reads: Array

    def compute(self, case: Case) -> Array:
        probs, v = case.carrier.operands("cache_v", self.probs, self.rows[:, :, self.reads])
        return ops.attention_values(probs, v)


@recipe("kq")
def scores(case: Case) -> Scores:
    """Q against the cache's K."""
    return Scores(case["Qcur_rope"], _cached(case, "k"), _groups(case))


@recipe("kqv_out")
def values(case: Case) -> Values:
    """Probabilities against the cache's V."""
    return Values(case["kq_soft_max"], _cached(case, "v"), _groups(case))


@recipe("kv_k", "kv_v")
def cache(case: Case) -> Given:
    """Rows as they were put in."""
    side = case.tap.kind.word[-1]
    return Given(_as_cached(case, side, case[PUT_IN[side]]))


def _groups(case: Case) -> Array:
    c = case.config
    return np.arange(c.n_head) // (c.n_head // c.n_head_kv)


def _cached(case: Case, side: str) -> Array:
    """The cache's rows [b, s, kv_head, dim]: recorded, or what was put in."""
    try:
        return case[f"kv_{side}"]
    except NotRecordedError:
        return _as_cached(case, side, case[PUT_IN[side]])


def _as_cached(case: Case, side: str, x: Array) -> Array:
    """K or V [b, s, kv_head * dim] as the cache has it: [b, s, kv_head, dim]."""
    return case.carrier.stored(f"cache_{side}", x.reshape(*x.shape[:2], case.config.n_head_kv, -1))


@dataclass(frozen=True)
class Rotation:
    """Rotation of ``x`` [b, token, head, dim]: which values form a pair, by which angles."""

    x: Array
    pairs: bool
    rope: settings.Rope
    factors: Array | None
    positions: Array

    def compute(self, case: Case) -> Array:
        cos, sin = ops.rope_angles(self.rope, self.positions, self.factors)
        cos, sin = case.carrier.angles(cos, sin, self.rope, self.positions, self.factors)
        rotate = ops.rope_pairs if self.pairs else ops.rope_halves
        return rotate(self.x if len(self.x) == len(cos) else np.repeat(self.x, len(cos), axis=0), cos, sin)


@recipe("Qcur_rope", "Kcur_rope")
def rope(case: Case) -> Rotation:
    """The rotation of a tap, as the model has it."""
    side = case.tap.kind.word[0]
    normed = f"{side}cur_normed-{case.tap.layer}" in case.run.shapes
    x = case[f"{side}cur_normed" if normed else f"{side}cur_proj"].reshape(
        1, len(case.run.tokens), -1, case.config.head_k
    )
    factors = case.engine.rope_factors(len(case.run.tokens))
    return Rotation(x, case.run.model.rope_pairs, case.config.rope, factors, case.run.positions)


@dataclass(frozen=True)
class Softmax:
    """Probabilities of ``scores`` [b, head, t, s]: their scale, and which keys are ``hidden`` [t, s]."""

    scores: Array
    scale: float
    hidden: Array

    def compute(self, case: Case) -> Array:
        x = self.scores * np.asarray(self.scale, self.scores.dtype)
        return np.asarray(ops.softmax(np.where(self.hidden, x.dtype.type(-np.inf), x)))


@recipe("kq_soft_max")
def softmax(case: Case) -> Softmax:
    """Scaled, masked, normalised."""
    hidden = case.run.positions[None, :] > case.run.positions[:, None]
    return Softmax(case["kq"], 1.0 / math.sqrt(case.config.head_k), hidden)


@recipe("ffn_moe_probs")
def probabilities(case: Case) -> Given:
    """Softmax over all experts."""
    return Given(ops.softmax(case["ffn_moe_logits"]))


@dataclass(frozen=True)
class Gated:
    """silu(gate) * up: both [b, token, ff] (experts: [b, token, used, ff])."""

    gate: Array
    up: Array

    def compute(self, case: Case) -> Array:
        return np.asarray(ops.silu(self.gate) * self.up)


@recipe("ffn_swiglu", "ffn_moe_swiglu")
def swiglu(case: Case) -> Gated:
    """silu(gate) * up."""
    moe = "moe_" if case.tap.kind.word == "ffn_moe_swiglu" else ""
    return Gated(case[f"ffn_{moe}gate"], case[f"ffn_{moe}up"])
