"""Which keys a query saw is read back from its output, whatever that is; and what is said of it is true."""

from __future__ import annotations

import numpy as np
import pytest

from llamadiff.ext.rows.seen import Attention, seen_in
from llamadiff.ext.rows.seen_words import sentence

KEYS, HEADS, KV_HEADS, DIM = 400, 4, 2, 64
POSITIONS = np.arange(300, 340)


def _attention(seen, window=0, zeros=0):
    """An output of what ``seen`` (position, key) says is seen."""
    rng = np.random.default_rng(2)
    q = rng.standard_normal((len(POSITIONS), HEADS, DIM))
    k, v = rng.standard_normal((2, KEYS, KV_HEADS, DIM))
    heads = np.arange(HEADS) // (HEADS // KV_HEADS)
    p = np.exp(np.einsum("thd,jhd->htj", q, k[:, heads]) / 8) * np.array(
        [[seen(t, j) for j in range(KEYS)] for t in POSITIONS]
    )
    out = np.einsum("htj,jhd->thd", p / (p.sum(-1, keepdims=True) + zeros), v[:, heads])
    return Attention(q, k, v, out.astype(np.float32), POSITIONS, 1 / 8, window, 0.0)


@pytest.mark.parametrize(("seen", "says"), [
    (lambda t, j: t - 100 < j <= t, "see the last 100 keys alone, their own included, where all are right"),
    (lambda t, j: j <= t and (j < 3 or t - j < 90), "see the first 3 keys and the last 90 alone, where all are right"),
    (lambda t, j: j <= t and j not in (7, 100, 222), "see all but keys 7, 100, 222"),
    (lambda t, j: j <= t and not 64 <= j < 128, "see all but keys 64-127"),
    (lambda t, j: j <= t + 2, "see the 2 keys behind their own too"),
    (lambda t, j: 200 <= j <= t, "see no key before key 200, where all are right"),
    (lambda t, j: j < 256, "see no key behind key 255"),
    (lambda t, j: j < (t + 1) // 16 * 16, "see no key of the last block of 16, which is not full"),
    (lambda t, j: 320 * (t >= 320) <= j <= t and (t >= 320 or j >= 160), "see no key before the last multiple of 160"),
])  # fmt: skip
def test_what_was_seen_is_told(seen, says):
    found, looked_at = seen_in(_attention(seen))
    assert len(found) == looked_at > 10
    for one in found:
        assert one.keys == tuple(j for j in range(KEYS) if seen(one.position, j))
    assert says in sentence(found, looked_at)


def test_rows_of_zeros_are_counted():
    found, looked_at = seen_in(_attention(lambda t, j: j <= t, zeros=24))
    assert {one.zeros for one in found} == {24}
    assert "see 24 rows of zeros besides" in sentence(found, looked_at)


def test_a_window_that_is_right_is_held_against():
    found, looked_at = seen_in(_attention(lambda t, j: t - 33 < j <= t, window=32))
    assert "the last 33 keys alone, their own included, where the last 32 are right" in sentence(found, looked_at)


def test_of_right_outputs_nothing_is_said():
    assert seen_in(_attention(lambda t, j: j <= t)) == ([], 0)


def test_of_outputs_that_are_no_mean_of_values_nothing_is_said():
    right = _attention(lambda t, j: j <= t)
    noise = 1e-2 * np.random.default_rng(3).standard_normal(right.out.shape)
    found, looked_at = seen_in(Attention(**{**vars(right), "out": right.out + noise}))
    assert (found, looked_at > 10) == ([], True)
