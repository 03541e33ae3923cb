"""Over what was not recorded the arithmetic is one: what it does not explain is not let pass, nor called right."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from faulty import with_maths
from llamaref import Engine, ops
from traces import only

from llamadiff.candidates.reference import record
from llamadiff.engines.run_spec import How
from llamadiff.verbs.verbs import diff

TOKENS = (1, 17, 5, 80, 42, 9, 33, 64, 5, 2, 71, 28)
LOGITS, LAYERS = ("result_output",), ("l_out", "result_output")


def blind(scores, scale, queries, keys):
    """The last token does not see its own key."""
    hidden = (keys[None, :] == keys[-1]) & (queries[:, None] == queries[-1])
    return ops.causal_softmax(np.where(hidden, -np.inf, scores), scale, queries, keys)


def epsilon(x, weight, eps):
    return ops.rms_norm(x, weight, eps * 10)


def base(rope, positions, factors=None):
    return ops.rope_angles(replace(rope, base=rope.base * 1.2), positions, factors)


def scale(scores, scale, queries, keys):
    return ops.causal_softmax(scores, scale * 1.01, queries, keys)


FAULTS = {
    "blind to its own key": with_maths(causal_softmax=blind),
    "epsilon": with_maths(rms_norm=epsilon),
    "base": with_maths(rope_angles=base),
    "scale": with_maths(causal_softmax=scale),
}


@pytest.fixture(scope="module")
def right(small_model):
    """kind -> the model's path and a right engine's trace."""
    kept = {}

    def get(kind: str):
        if kind not in kept:
            path = small_model("llama", kind)
            kept[kind] = path, record(Engine(path), TOKENS, "engine")
        return kept[kind]

    return get


@pytest.mark.parametrize("words", [LOGITS, LAYERS], ids=["logits", "layers"])
@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_span_does_not_pass(fault, kind, words, right):
    path, trace = right(kind)
    result = diff(trace, only(record(FAULTS[fault](path), TOKENS, "mine"), *words), path, how=How(diagnose=False))
    assert result.verdict in ("wrong", "unchecked"), result.summary


@pytest.mark.parametrize("words", [LOGITS, LAYERS], ids=["logits", "layers"])
@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
def test_a_right_engine_passes(kind, words, right):
    path, trace = right(kind)
    assert diff(trace, only(trace, *words), path).verdict in ("match", "noise")
