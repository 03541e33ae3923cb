"""Engines with several bugs at once: in their methods, in their maths, and two on one op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from faulty import GateUpSwapped, NoFinalNorm, maths_with, shifted_mask, tiled
from llamaref import Engine, ops


def faulty(path: Path, classes: Sequence[type] = (), maths: Mapping[str, Any] | None = None) -> Engine:
    """An engine with several bugs."""
    changed = maths_with(maths or {})
    engine: Engine = type("Faulty", (*classes, Engine), {})(path, maths=changed)
    return engine


class _TransposedOutput(Engine):
    def linear(self, x, name, tap):
        if name.endswith("ffn_down"):
            return x @ self.w.whole(f"{name}.weight").reshape(x.shape[-1], -1)
        return super().linear(x, name, tap)


class _NextLayersNorm(Engine):
    def norm(self, x, name):
        return super().norm(x, name.replace("blk.0.ffn_norm", "blk.1.ffn_norm"))


MATHS = {
    "rope-layout": {"rope_pairs": ops.rope_halves},
    "heads-tiled": {"attention_scores": tiled},
    "mask-shifted": {"causal_softmax": shifted_mask},
    "residual-missing": {"add": lambda branch, residual: branch},
    "activation-other": {"swiglu": lambda gate, up: np.maximum(gate, 0) * up},
}
CLASSES = {
    "gate-up-swapped": GateUpSwapped, "norm-missing": NoFinalNorm, "weight-transposed": _TransposedOutput,
    "norm-other-weight": _NextLayersNorm,
}  # fmt: skip
PAIRS = list(product(MATHS, CLASSES))


def _base_and_layout(x, cos, sin):
    return ops.rope_halves(x, cos, sin)


def _weight_and_mean(x, weight, eps):
    return ops.layer_norm(x, weight * weight, None, eps)


ON_ONE_OP = {
    "rope-layout + rope-direction": {"rope_pairs": lambda x, cos, sin: ops.rope_halves(x, cos, -sin)},
    "norm-weight-twice + norm-mean-subtracted": {"rms_norm": _weight_and_mean},
    "rope-layout + rope-base": {
        "rope_pairs": ops.rope_halves,
        "rope_angles": lambda rope, *rest: ops.rope_angles(replace(rope, base=5e5), *rest),
    },
    "mask-shifted + attention-scale": {
        "causal_softmax": lambda scores, scale, queries, keys: shifted_mask(scores, 1.0, queries, keys)
    },
}

# a bug of faulty.py -> what it is called where the ops before and after it were not recorded
IN_SPANS = {
    "rope layout": "rope-layout", "rope base": "rope-base", "missing bias": "bias-missing",
    "missing qk-norm": "norm-missing", "gqa tiled": "heads-tiled", "gate and up swapped": "gate-up-swapped",
    "residual dropped": "residual-missing", "mask off by one": "mask-shifted", "final norm skipped": "norm-missing",
}  # fmt: skip
