"""Attention's softmax, with scale and mask, and how people get it wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from llamaref import ops
from numpy.typing import NDArray

from llamadiff.diagnose.bugs.attention import scale_in_words, scores
from llamadiff.diagnose.case import Case, NotRecordedError
from llamadiff.diagnose.registry import Change, bug, recipe
from llamadiff.diagnose.solve import solve
from llamadiff.diagnose.sought import SCORE_CAP, SCORE_SCALE
from llamadiff.numerics.arithmetic import ROUNDINGS
from llamadiff.numerics.types import HALVES

Array = NDArray[Any]


@dataclass(frozen=True)
class Softmax:
    """Probabilities of ``scores`` [b, head, t, s]: scale, which keys are ``hidden`` [t, s], cap, axis."""

    scores: Array
    scale: float
    hidden: Array
    cap: float = 0.0
    axis: int = -1
    steady: bool = True  # whether the maximum is subtracted
    hides: float = -np.inf  # what hidden scores are set to
    clean: bool = False  # whether hidden probabilities are zero whatever comes out
    after: bool = False  # whether keys are hidden only after the softmax

    def compute(self, case: Case) -> Array:
        x = self.scores * np.asarray(self.scale, self.scores.dtype)
        x = self.cap * np.tanh(x / self.cap) if self.cap else x
        if self.after:
            return np.where(self.hidden, x.dtype.type(0), ops.softmax(x))
        x = np.where(self.hidden, x.dtype.type(self.hides), x)
        if not self.steady:
            e = np.exp(x.astype(np.float32))
            return np.asarray(e / e.sum(axis=self.axis, keepdims=True))
        y = np.swapaxes(ops.softmax(np.swapaxes(x, self.axis, -1)), self.axis, -1)
        return np.where(self.hidden, y.dtype.type(0), y) if self.clean else y


@recipe("kq_soft_max")
def softmax(case: Case) -> Softmax:
    """Scaled, masked, normalised."""
    hidden = case.run.positions[None, :] > case.run.positions[:, None]
    return Softmax(case["kq"], 1.0 / math.sqrt(case.config.head_k), hidden)


@bug("kq_soft_max", fix="scale scores by 1/sqrt(head size), once", source="llama.cpp#13951")
def attention_scale(r: Softmax, case: Case) -> Iterator[Change]:
    """The attention scale is missing, applied twice, or of the wrong size: d_model, or d_model / kv heads."""
    c = case.config
    for scale in (
        1.0,
        1 / c.head_k,
        1 / math.sqrt(c.n_embd),
        1 / math.sqrt(c.n_embd / c.n_head_kv),
        math.sqrt(c.head_k),
    ):
        if not math.isclose(scale, r.scale):
            says = f"scales by {scale_in_words(scale, case)}; this model scales by 1/sqrt({c.head_k}) = {r.scale:.4g}"
            yield Change(replace(r, scale=scale), says, says)


@bug("kq_soft_max", general=True, fix="scale scores by 1/sqrt(head size), once", source="llama.cpp#13951")
def attention_scale_other(r: Softmax, case: Case) -> Iterator[Change]:
    """The attention scale is some other number."""
    familiar = [value for value in SCORE_SCALE.familiar if not math.isclose(value, r.scale)]
    for value in solve(case, lambda s: replace(r, scale=s), SCORE_SCALE, familiar):
        yield Change(replace(r, scale=value), SCORE_SCALE.says(value, r.scale), value=value)


def _whole_scores(r: Softmax, case: Case) -> Iterator[Array]:
    """Scores with those above the diagonal: as recorded, and computed from Q and K where they can be."""
    yield r.scores
    try:
        full = scores(case.of(f"kq-{case.tap.layer}")).compute(case)
    except NotRecordedError:
        return
    hidden = case.run.positions[None, :] > case.run.positions[:, None]
    yield np.where(hidden, full, r.scores)


@bug("kq_soft_max", fix="hide keys at later positions than the query's")
def mask_missing(r: Softmax, case: Case) -> Iterator[Change]:
    """There is no causal mask: every token sees the whole prompt."""
    n = case.run.n_prefill
    seen = {"all": np.zeros_like(r.hidden), "prompt": r.hidden.copy()}
    seen["prompt"][:n, :n] = False
    for number, whole in enumerate(_whole_scores(r, case)):
        for name, hidden in seen.items():
            says = "has no causal mask: queries see later tokens"
            yield Change(replace(r, scores=whole, hidden=hidden), says, f"{name} {number}")


@bug("kq_soft_max", fix="a query sees keys up to and including its own position")
def mask_shifted(r: Softmax, case: Case) -> Iterator[Change]:
    """The causal mask is off by one."""
    p = case.run.positions
    for number, whole in enumerate(_whole_scores(r, case)):
        later = replace(r, scores=whole, hidden=p[None, :] > p[:, None] + 1)
        yield Change(later, "lets queries see the next token: the mask is off by one", f"+1 {number}")
    before = p[None, :] > p[:, None] - 1
    says = "hides each query's own key: the mask is off by one"
    yield Change(replace(r, hidden=before), says, "-1")
    yield Change(replace(r, hidden=before, hides=-1e9), says, "-1 finite")
    before = before.copy()
    before[0, 0] = False
    yield Change(
        replace(r, hidden=before), "hides each query's own key, but the first: the mask is off by one", "-1 first"
    )


@bug("kq_soft_max", fix="set hidden scores to -inf before the softmax")
def mask_after_softmax(r: Softmax, case: Case) -> Iterator[Change]:
    """Later keys are set to zero after the softmax, which has counted them."""
    for number, whole in enumerate(_whole_scores(r, case)):
        yield Change(replace(r, scores=whole, after=True), "hides later keys only after the softmax", str(number))


@bug(
    "kq_soft_max",
    general=True,
    fix="attend to all earlier tokens: this model has no window",
    source="sglang#4823, mlx-vlm#669",
)
def window_applied(r: Softmax, case: Case) -> Iterator[Change]:
    """A sliding window hides early keys, in a model without one."""
    p = case.run.positions
    sizes = range(1, len(p)) if case.recorded is not None else ()
    fits = []
    for size in sizes:
        hidden = r.hidden | (p[None, :] <= p[:, None] - size)
        fits.append((case.nmse(replace(r, hidden=hidden).compute(case)), size))
    for _, size in sorted(fits)[:1]:
        hidden = r.hidden | (p[None, :] <= p[:, None] - size)
        yield Change(
            replace(r, hidden=hidden), f"sees only the last {size} tokens; this model has no window", value=size
        )


@bug("kq_soft_max", general=True, fix="leave the scores as they are: this model has no softcap", source="vllm#30427")
def softcap_applied(r: Softmax, case: Case) -> Iterator[Change]:
    """Scores are capped (cap * tanh(x / cap)) in a model without a softcap."""
    for value in solve(case, lambda cap: replace(r, cap=cap), SCORE_CAP):
        yield Change(replace(r, cap=value), SCORE_CAP.says(value, 0.0), value=value)


@bug("kq_soft_max", fix="take the softmax over keys, the last axis")
def softmax_axis(r: Softmax, case: Case) -> Iterator[Change]:
    """The softmax is taken over the wrong axis: queries, or heads, instead of keys."""
    for clean in (False, True):
        yield Change(replace(r, axis=-2, clean=clean), "sums over queries instead of keys", f"queries {clean}")
        yield Change(replace(r, axis=1, clean=clean), "sums over heads instead of keys", f"heads {clean}")


@bug("kq_soft_max", fix="subtract each row's maximum before exp")
def softmax_overflow(r: Softmax, case: Case) -> Iterator[Change]:
    """The maximum is not subtracted: exp overflows for large scores."""
    yield Change(replace(r, steady=False), "does not subtract the maximum, and overflows")


@dataclass(frozen=True)
class Scaled:
    """Scores scaled and masked, with no softmax."""

    softmax: Softmax

    def compute(self, case: Case) -> Array:
        r = self.softmax
        return np.asarray(np.where(r.hidden, 0, r.scores * np.asarray(r.scale, r.scores.dtype)), r.scores.dtype)


@bug("kq_soft_max", fix="apply the softmax")
def softmax_missing(r: Softmax, case: Case) -> Iterator[Change]:
    """There is no softmax: scaled scores go on."""
    yield Change(Scaled(r), "is left out: scaled scores come out")


@bug("kq_soft_max", harmless=True, fix="nothing: half-precision attention rounds its inputs")
def softmax_of_rounded(r: Softmax, case: Case) -> Iterator[Change]:
    """Scores are rounded to 16 bits before the softmax."""
    for kind in HALVES:
        to = ROUNDINGS[kind]
        yield Change(replace(r, scores=to(r.scores)), f"rounds scores to {kind} first", kind)
        yield Change(
            replace(r, scores=to(r.scores * np.float32(r.scale)), scale=1.0),
            f"rounds scaled scores to {kind}",
            f"{kind} scaled",
        )
