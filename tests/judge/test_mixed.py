"""Traces that keep some taps in 16 bits and the others in float32: a right engine is not accused, a wrong one is."""

from __future__ import annotations

import numpy as np
import pytest
from llamaref import Engine

from llamadiff.candidates.reference import record
from llamadiff.engines.run_spec import How
from llamadiff.trace.reader import Trace
from llamadiff.verbs.verbs import diff

TOKENS = (1, 17, 5, 80, 42, 9, 33, 61)
SOME = ("attn_norm-0", "attn_norm", "kqv_out", "Qcur_rope", "ffn_swiglu", "ffn_up-1", "l_out")


def to_bf16(x):
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


KEPT = {"BF16": to_bf16, "F16": lambda x: x.astype(np.float16)}


@pytest.fixture(scope="module", params=["F16", "Q8_0"])
def right(request, small_model):
    path = small_model("llama", request.param)
    return path, record(Engine(path), TOKENS, "right")


def mixed(trace, some, kind, **changes):
    """A trace that keeps some taps in 16 bits."""
    arrays = {name: np.asarray(changes.get(name.replace("-", "_"), trace[name])) for name in trace}
    halves = {name: KEPT[kind](values) for name, values in arrays.items() if name.startswith(some)}
    return Trace(trace.info, {**arrays, **halves}, dict.fromkeys(arrays, "F32") | dict.fromkeys(halves, kind))


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("some", SOME)
def test_some_taps_in_sixteen_bits_accuse_nobody(some, kind, right):
    path, trace = right
    assert diff(trace, mixed(trace, some, kind), path, how=How(diagnose=False)).verdict == "noise"


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("some", SOME)
def test_they_hide_no_error_elsewhere(some, kind, right):
    path, trace = right
    gate = np.asarray(trace["ffn_gate-1"]).copy()
    gate[3] *= 1.01
    result = diff(trace, mixed(trace, some, kind, ffn_gate_1=gate), path, how=How(diagnose=False))
    assert [row.tap for row in result.wrong] == ["ffn_gate-1"]
