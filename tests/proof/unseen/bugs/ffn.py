"""Activations, gates and residual connections go wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from proof.unseen.bugs.bug import bug
from proof.unseen.engine import Engine

_erf = np.vectorize(math.erf, otypes=[float])


def _activated(function: Callable[[Any], Any]) -> dict[str, Callable[..., Any]]:
    """Another function; where the model clamps gate and up, of a clamped gate no more."""

    def activated(e: Engine, x: Any) -> Any:
        return np.asarray(function(x.astype(np.float64)), np.float32)

    def gated(e: Engine, gate: Any, up: Any) -> Any:
        return activated(e, gate) * up

    return {"activated": activated, "gated": gated}


def _gated(fault: Callable[[Engine, Any, Any], Any]) -> dict[str, Callable[..., Any]]:
    return {"gated": fault}


def _own(e: Engine, x: Any) -> Any:
    return Engine.activated(e, x)


def _oai(limit: float, alpha: float, one: float) -> Callable[..., Any]:
    """The clamped SwiGLU with other constants."""

    def gated(e: Engine, gate: Any, up: Any) -> Any:
        if e.arch.activation != "oai":
            return Engine.gated(e, gate, up)
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        return (gate / (1 + np.exp(-alpha * gate)) * (up + one)).astype(np.float32)

    return gated


def _sum(fault: Callable[[Engine, Any, Any], Any]) -> Callable[..., Any]:
    """Residual connections as fault(engine, branch, residual), the branch times the model's factor."""
    return lambda e, branch, residual: fault(e, branch * np.float32(e.residual_scale()), residual)


def _rms(e: Engine, x: Any) -> Any:
    return Engine.normalised(e, x, e.eps).astype(np.float32)


def _residual_normed(e: Engine, branch: Any, residual: Any) -> Any:
    """The residual through the norm that its branch begins with: attention's, or the FFN's."""
    before, between = e.arch.norms
    stem = before if residual is e.residual else between
    return branch + (Engine.norm(e, residual, stem) if e.has(stem) else residual)


def _from_before(e: Engine, branch: Any, residual: Any) -> Any:
    """The FFN's branch is added to what the layer began with."""
    return branch + e.residual


def _to_embedding(e: Engine, branch: Any, residual: Any) -> Any:
    name = e.arch.names.get("embd", "embd")
    return branch + e.rows[name][-1]


def _beside(fault: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    """Attention, FFN and residual of a layer that has both side by side."""

    def beside(e: Engine, attended: Any, x: Any) -> Any:
        stem = e.arch.norms[1]
        return fault(attended, e.fed_forward(e.tap(stem, e.norm(x, stem))), x)

    return beside


def _one_norm(e: Engine, x: Any, stem: str) -> Any:
    """Attention's norm serves the FFN too."""
    return Engine.norm(e, x, e.arch.norms[0] if e.arch.parallel and stem == e.arch.norms[1] else stem)


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


NOT = ("gpt-oss",)
BUGS = (
    bug("GELU by erf", "activation-other", **_activated(lambda x: x * 0.5 * (1 + _erf(x / math.sqrt(2))))),
    bug("GELU by tanh", "activation-other", **_activated(lambda x:
        x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))),
    bug("quick GELU", "activation-other", **_activated(lambda x: x * _sigmoid(1.702 * x))),
    bug("SiLU", "activation-other", **_activated(lambda x: x * _sigmoid(x))),
    bug("ReLU", "activation-other", **_activated(lambda x: np.maximum(x, 0))),
    bug("ReLU's square", "activation-other", **_activated(lambda x: np.maximum(x, 0) ** 2)),
    bug("sigmoid", "activation-other", **_activated(_sigmoid)),
    bug("tanh", "activation-other", **_activated(np.tanh)),
    bug("no activation", "activation-missing", **_activated(lambda x: x)),
    bug("activation of up", "activation-of-up gate-up-swapped", gated=lambda e, g, u: Engine.gated(e, u, g)),
    bug("activation of the product", "activation-of-up", gated=lambda e, g, u: _own(e, g * u), unlike=NOT),
    bug("no up", "up-missing", gated=lambda e, g, u: _own(e, g), unlike=NOT),
    bug("no gate", "up-missing", gated=lambda e, g, u: u),
    bug("gate plus up", "up-missing", gated=lambda e, g, u: _own(e, g) + u, unlike=NOT),
    bug("halves of gate and up swapped", "activation-of-up gate-up-swapped", halves=lambda e, x:
        Engine.halves(e, x)[::-1]),
    bug("halves of gate and up interleaved", "activation-of-up gate-up-swapped qkv-split", halves=lambda e, x:
        (x[:, 0::2], x[:, 1::2])),
    bug("clamped SwiGLU: not clamped", "activation-other clamp-missing", gated=_oai(1e30, 1.702, 1.0)),
    bug("clamped SwiGLU: alpha 1", "activation-other", gated=_oai(7.0, 1.0, 1.0)),
    bug("clamped SwiGLU: one not added", "activation-other", gated=_oai(7.0, 1.702, 0.0)),
    bug("no residual", "residual-missing", add=_sum(lambda e, b, r: b)),
    bug("no branch", "branch-missing", add=_sum(lambda e, b, r: r)),
    bug("residual twice", "residual-doubled", add=_sum(lambda e, b, r: b + 2 * r)),
    bug("branch twice", "residual-doubled multiplier-other", add=_sum(lambda e, b, r: 2 * b + r)),
    bug("branch subtracted", "residual-doubled", add=_sum(lambda e, b, r: r - b)),
    bug("residual normed", "residual-normed", add=_sum(_residual_normed)),
    bug("residual from before attention", "residual-elsewhere", add=_sum(_from_before)),
    bug("residual from the embedding", "residual-elsewhere", add=_sum(_to_embedding)),
    bug("sum normed without weight", "branch-normed", add=_sum(lambda e, b, r: _rms(e, b + r)),
        unlike=("gpt2", "bloom")),
    bug("branch by 0.22", "residual-multiplied multiplier-other multiplier-missing",  # granite's own 0.22, twice
        add=_sum(lambda e, b, r: np.float32(0.22) * b + r)),
    bug("residual by 0.5", "residual-multiplied", add=_sum(lambda e, b, r: b + r / 2)),
    bug("branches' factor left out", "multiplier-missing", residual_scale=lambda e: 1.0),
    bug("side by side: no residual", "residual-missing", beside=_beside(lambda a, f, x: a + f)),
    bug("side by side: no attention", "branch-missing", beside=_beside(lambda a, f, x: f + x)),
    bug("side by side: no FFN", "branch-missing residual-missing", beside=_beside(lambda a, f, x: a + x)),
    bug("side by side: residual twice", "residual-doubled", beside=_beside(lambda a, f, x: a + f + 2 * x)),
    bug("side by side: one norm", "norm-other-weight", norm=_one_norm),
)  # fmt: skip
