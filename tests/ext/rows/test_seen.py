"""Which keys a token saw is read back from what attention gave it."""

from __future__ import annotations

import numpy as np
import pytest

from llamadiff.ext.rows.seen import Query, Seen, _patterns

KEYS = 700
ROWS = (30, 260, 320, 511, 512, 600, 699)


def query(position, sees, sinks=False):
    """What a right engine would give if the token saw these keys, in two groups of two heads."""
    rng = np.random.default_rng(3)
    v = rng.standard_normal((2, KEYS, 8))
    weights = np.exp(np.random.default_rng(position).standard_normal((2, 2, KEYS)))
    beside = np.full((2, 2), 5.0 * sinks)
    w = np.where(sees(position, np.arange(KEYS)), weights, 0.0)
    recorded = w @ v / (w.sum(axis=-1) + beside)[..., None]
    return Query(ROWS.index(position), position, 0, weights, v, beside, recorded)


MISTAKES = {
    "sees the last 200 keys alone": lambda p, k: (k <= p) & (k > p - 200),
    "sees keys from 20 on alone": lambda p, k: (k <= p) & (k >= 20),
    "sees keys from the last multiple of 256 on alone": lambda p, k: (k <= p) & (k >= p // 256 * 256),
    "sees no key after 255": lambda p, k: (k <= p) & (k <= 255),
    "does not see the last block of 64 keys, which is not full": lambda p, k: (
        (k <= p) & ((k < (p + 1) // 64 * 64) | (p < 64))
    ),
    "does not see its own key": lambda p, k: k < p,
    "sees 1 key after its own": lambda p, k: k <= p + 1,
    "does not see key 17": lambda p, k: (k <= p) & (k != 17),
    "does not see keys 128 to 143": lambda p, k: (k <= p) & ((k < 128) | (k >= 144)),
    "sees the first 4 keys and the last 100 alone": lambda p, k: (k <= p) & ((k < 4) | (k > p - 100)),
}


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("says", MISTAKES)
def test_what_all_wrong_tokens_have_in_common_is_said(says, sinks):
    queries = [query(position, MISTAKES[says], sinks) for position in ROWS]
    wrong = [each for each in queries if each.left(each.right) > 1e-5]
    seen = [each.seen() for each in wrong]
    assert wrong
    assert None not in seen
    fitting = [words for words, rule in _patterns(seen, [each.right for each in wrong])
               if all(each.fits(rule(each.right)) for each in wrong)]  # fmt: skip
    assert fitting[0] == says


def test_of_no_run_of_keys_nothing_is_said():
    assert query(600, lambda p, k: (k <= p) & (k % 7 != 3)).seen() is None
    strange = query(600, lambda p, k: k <= p)
    strange.recorded[0, 0] += 0.1
    assert strange.seen() is None


def test_what_a_right_token_sees_is_all():
    right = query(600, lambda p, k: k <= p)
    assert right.left(right.right) < 1e-20
    assert right.left(Seen(600, 1, 600)) > 1e-5


def test_keys_that_are_left_out_are_masked():
    assert np.flatnonzero(Seen(9, 2, 6, (3, 5)).mask(12)).tolist() == [2, 5, 6]
