"""Residual connections, and how people get them wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.diagnose.case import Case, NotRecordedError
from llamadiff.diagnose.registry import Change, bug, recipe
from llamadiff.trace import taps

Array = NDArray[Any]
RESIDUALS = ("ffn_inp", "l_out")


@dataclass(frozen=True)
class Residual:
    """a * branch + b * residual, both [b, token, embd]."""

    branch: Array
    residual: Array
    a: float = 1.0
    b: float = 1.0

    def compute(self, case: Case) -> Array:
        kind = self.branch.dtype.type
        return np.asarray(kind(self.a) * self.branch + kind(self.b) * self.residual)


@recipe("ffn_inp")
def after_attention(case: Case) -> Residual:
    """The attention branch onto the layer's input."""
    return Residual(case["attn_out"], case.before())


@recipe("l_out")
def after_ffn(case: Case) -> Residual:
    """The FFN branch onto the residual after attention."""
    return Residual(case["ffn_out"], case["ffn_inp"])


@bug(*RESIDUALS, fix="add the residual")
def residual_missing(r: Residual, case: Case) -> Iterator[Change]:
    """The residual is not added: the branch goes on alone."""
    yield Change(replace(r, b=0.0), "leaves out the residual: the branch goes on alone")


@bug(*RESIDUALS, fix="add the branch")
def branch_missing(r: Residual, case: Case) -> Iterator[Change]:
    """The branch is not added: the residual goes on alone."""
    yield Change(replace(r, a=0.0), f"leaves out {_branch(case)}: the residual goes on alone")


@bug(*RESIDUALS, fix="add branch and residual once each")
def residual_doubled(r: Residual, case: Case) -> Iterator[Change]:
    """The residual or the branch is added twice, or subtracted."""
    yield Change(replace(r, b=2.0), "adds the residual twice", "residual")
    yield Change(replace(r, a=2.0), f"adds {_branch(case)} twice", "branch")
    yield Change(replace(r, b=-1.0), "subtracts the residual", "minus residual")
    yield Change(replace(r, a=-1.0), f"subtracts {_branch(case)}", "minus branch")


@bug(*RESIDUALS, fix="add what came in before the norm")
def residual_normed(r: Residual, case: Case) -> Iterator[Change]:
    """The residual is taken after the norm: post-norm where the model is pre-norm."""
    word = "attn_norm" if case.tap.kind.word == "ffn_inp" else "ffn_norm"
    yield Change(replace(r, residual=case[word]), f"adds {word}-{case.layer}, the residual after its norm")


@bug(*RESIDUALS, fix="carry the residual from one addition to the next")
def residual_elsewhere(r: Residual, case: Case) -> Iterator[Change]:
    """The residual is taken from another place: the layer's input, its predecessor's, the embedding."""
    places = {"l_out": ("the layer's input", "attn_out"), "ffn_inp": ("the embeddings",)}
    if case.tap.kind.word == "l_out":
        yield Change(replace(r, residual=case.before()), f"adds {places['l_out'][0]} for ffn_inp-{case.layer}", "input")
        yield Change(
            replace(r, residual=case["attn_out"]), f"adds attn_out-{case.layer} for ffn_inp-{case.layer}", "branch"
        )
    elif case.layer > 0:
        first = case.values(taps.input_of(0, case.run.shapes))
        yield Change(replace(r, residual=first), "adds the embeddings for the layer's input", "embd")
    if case.layer > 1 or (case.layer == 1 and case.tap.kind.word == "l_out"):
        earlier = taps.input_of(case.layer - 1, case.run.shapes)
        try:
            residual = case.values(earlier)
        except NotRecordedError:
            return
        yield Change(replace(r, residual=residual), "adds the residual of the layer before", "earlier")


@bug(*RESIDUALS, fix="add the branch as it leaves its last product")
def branch_normed(r: Residual, case: Case) -> Iterator[Change]:
    """The sum is normalised: post-norm where the model is pre-norm."""
    from llamadiff.diagnose.bugs.norms import norm

    word = "attn_norm" if case.tap.kind.word == "ffn_inp" else "ffn_norm"
    right = norm(case.of(f"{word}-{case.layer}"))
    yield Change(replace(right, x=r.compute(case)), f"normalises the sum by {word}'s weight", "sum")
    bare = replace(right, x=r.compute(case), weight=np.ones_like(right.weight))
    yield Change(bare, "normalises the sum, without a weight", "bare")
    branch = replace(right, x=r.branch).compute(case)
    yield Change(replace(r, branch=branch), f"normalises {_branch(case)} before it is added", "branch")


@bug(*RESIDUALS, general=True, fix="multiply neither branch nor residual: this model has no multipliers")
def residual_multiplied(r: Residual, case: Case) -> Iterator[Change]:
    """Branch or residual is multiplied by a constant."""
    if case.recorded is None:
        return
    a, b = _least_squares(r, case)
    says = f"adds {a:.5g} times {_branch(case)} and {b:.5g} times the residual; both count once"
    yield Change(replace(r, a=a, b=b), says, value=a if abs(a - 1) > abs(b - 1) else b)


def _least_squares(r: Residual, case: Case) -> tuple[float, float]:
    assert case.recorded is not None
    x, y = r.branch[0].astype(np.float64).ravel(), r.residual[0].astype(np.float64).ravel()
    z = case.recorded.astype(np.float64).ravel()
    good = np.isfinite(x) & np.isfinite(y) & np.isfinite(z)
    found, *_ = np.linalg.lstsq(np.stack([x[good], y[good]], axis=1), z[good], rcond=None)
    return float(found[0]), float(found[1])


def _branch(case: Case) -> str:
    return f"{'attn_out' if case.tap.kind.word == 'ffn_inp' else 'ffn_out'}-{case.layer}"
