"""Rows of RoPE that were rotated by other positions: these are told at any distance, and by their law."""

from __future__ import annotations

import numpy as np
import pytest
from llamaref.config import Rope

from llamadiff.ext.explain.pattern.described import _is_before
from llamadiff.ext.explain.pattern.deviation import Deviation
from llamadiff.ext.explain.pattern.turned import turns
from llamadiff.trace.taps import parse

POSITIONS = np.array([*range(6), 255, 256, 257, 500, 2047, 2048, 2049, 2051, 4099, 4100, 4101, 32767, 32768, 32769])
DIM = 64


def _said(law, right=POSITIONS, base=10000.0):
    x = np.random.default_rng(1).standard_normal((len(right), 3, DIM))

    def rotated(positions):
        theta = np.asarray(positions, float)[:, None] * base ** (-np.arange(0, DIM, 2) / DIM)
        pairs = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * theta)[:, None]
        return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape).astype(np.float32).astype(float)

    facts = list(turns(Deviation(
        parse("Qcur_rope-0"), rotated(law(right)), rotated(right), 1e-10, rope=Rope(DIM, base), positions=[*right],
    )))  # fmt: skip
    return [(fact.says, fact.values) for fact in facts]


@pytest.mark.parametrize(("law", "says"), [
    (lambda p: p.astype(np.float16), "its positions are rounded to float16, which holds whole numbers up to 2048"),
    (lambda p: np.minimum(p, 499), "positions beyond 499 are taken for 499"),
    (lambda p: p % 2048, "its positions begin again at 0 after each 2048"),
    (lambda p: p % 256, "its positions begin again at 0 after each 256"),
    (lambda p: p - 2, "every token is rotated by its position -2"),
    (lambda p: p.astype(np.int16), "token 18 is rotated by position -32768, where 32768 is right, token 19 is rotated "
     "by position -32767, where 32769 is right"),
    (lambda p: np.where((p > 255) & (p < 4100), 0, p), "positions from 256 to 4099 are taken for 0"),
    (lambda p: p - (p > 255), "positions from 256 to 32769 are taken for 255 to 32768"),
])  # fmt: skip
def test_positions_are_told_by_their_law_or_one_by_one(law, says):
    ((said, values),) = _said(law)
    assert values == tuple(int(p) for p in law(POSITIONS))
    assert said == says


def test_positions_without_a_law_are_listed():
    ((said, _),) = _said(lambda p: np.where(p == 500, 7, p))
    assert said == "token 9 is rotated by position 7, where 500 is right"


@pytest.mark.parametrize("law", [lambda p: p, lambda p: p * 1.37])
def test_right_positions_and_those_between_are_not_told(law):
    assert _said(law) == []


@pytest.mark.parametrize(("name", "tap", "before"), [
    ("ffn_inp-1", "l_out-0", False), ("ffn_inp-0", "l_out-0", True), ("embd", "l_out-0", True),
    ("result_norm", "l_out-0", False), ("l_out-1", "result_norm", True), ("node_7", "l_out-0", True),
])  # fmt: skip
def test_what_is_computed_from_a_tap_is_not_before_it(name, tap, before):
    assert _is_before(name, parse(tap), listed=True) == before
