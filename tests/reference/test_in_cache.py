"""Ops of rows, some rows at a time: to the bit what they give of all rows at once."""

from __future__ import annotations

import numpy as np
import pytest
from llamaref import in_cache, ops

T, H, D = 7, 3, 10
RNG = np.random.default_rng(0)


def drawn(*shape):
    return (3 * RNG.standard_normal(shape)).astype(np.float32)


X, GATE, HEADS, SCORES = drawn(2, T, D), drawn(2, T, D), drawn(2, T, H, D), drawn(2, H, T, T + 2)
GATE[0, 0] = [np.nan, np.inf, -np.inf, 0, -0.0, 1e30, -1e30, 90, -90, -104]
WEIGHT, BIAS, SINKS, KEYS = drawn(D), drawn(D), drawn(H), np.arange(T + 2)
COS, SIN = drawn(T, 4).astype(np.float64), drawn(2, T, 4).astype(np.float64)

OPS = {
    "rms_norm": lambda: ops.rms_norm(HEADS, WEIGHT, 1e-5),
    "rms_norm of groups": lambda: ops.rms_norm(HEADS, drawn_once(H, D), 1e-5),
    "layer_norm": lambda: ops.layer_norm(X, WEIGHT, BIAS, 1e-5),
    "layer_norm of heads": lambda: ops.layer_norm(HEADS, drawn_once(H, D), None, 1e-5),
    "rope_pairs": lambda: ops.rope_pairs(HEADS, COS, COS),
    "rope_pairs in lanes": lambda: ops.rope_pairs(HEADS, SIN, SIN),
    "rope_halves": lambda: ops.rope_halves(HEADS, COS, COS),
    "softmax": lambda: ops.softmax(SCORES),
    "causal_softmax": lambda: ops.causal_softmax(SCORES, 0.3, KEYS[2:], KEYS),
    "causal_softmax_of_many": lambda: ops.causal_softmax_of_many(SCORES, 0.3, KEYS[2:], KEYS, SINKS),
    "sinks": lambda: ops.causal_softmax(SCORES, 0.3, KEYS[2:], KEYS, SINKS),
    "softcap": lambda: ops.softcap(SCORES, 20.0),
    "swiglu": lambda: ops.swiglu(GATE, X),
    "swiglu_oai": lambda: ops.swiglu_oai(GATE, X),
    "gelu": lambda: ops.gelu(GATE),
}


def drawn_once(*shape):
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("op", OPS)
def test_rows_are_the_same_however_many_at_a_time(op, monkeypatch):
    monkeypatch.setattr(in_cache, "VALUES", 1 << 40)
    with np.errstate(all="ignore"):
        whole = OPS[op]()
        for values in (1, 25, 60):
            monkeypatch.setattr(in_cache, "VALUES", values)
            found = OPS[op]()
            assert (found.shape, found.dtype) == (whole.shape, whole.dtype)
            assert np.array_equal(found, whole, equal_nan=True)


def test_no_more_rows_are_taken_at_once_than_stay_in_cache():
    taken = []

    def noted(rows):
        taken.append(len(rows))
        return rows

    in_cache.by_rows(noted, np.zeros((5, 40, 1 << 12), np.float32))
    assert (max(taken), sum(taken)) == (in_cache.VALUES >> 12, 200)
    taken.clear()
    in_cache.by_rows(noted, np.zeros((3, 2 * in_cache.VALUES), np.float32))
    assert taken == [1, 1, 1]


def test_a_sigmoid_never_overflows():
    with np.errstate(all="raise", under="ignore"):
        found = ops.sigmoid(np.array([-1e30, -100, -1, 0, 1, 100, 1e30], np.float32))
    np.testing.assert_allclose(found, [0, 3.78e-44, 0.26894143, 0.5, 0.73105857, 1, 1], rtol=2e-2)
    assert np.isnan(ops.sigmoid(np.array([np.nan], np.float32)))[0]


def test_a_softmax_of_many_is_off_by_last_digits():
    right = ops.causal_softmax(SCORES.astype(np.float64), 2.0, KEYS[2:], KEYS, SINKS)
    found = ops.causal_softmax_of_many(SCORES, 2.0, KEYS[2:], KEYS, SINKS)
    assert found.dtype == np.float32
    assert np.square(found - right).sum() < 1e-13 * np.square(right).sum()
    same = ops.causal_softmax_of_many(SCORES.astype(np.float64), 2.0, KEYS[2:], KEYS, SINKS)
    np.testing.assert_allclose(same, right, rtol=1e-14)
