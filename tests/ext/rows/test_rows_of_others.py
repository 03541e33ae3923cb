"""Of some tokens of a prompt: those that hold other tokens' values, and how fast RoPE's pairs turn."""

from __future__ import annotations

import numpy as np
import pytest

from llamadiff.ext.explain.pattern.deviation import Deviation
from llamadiff.ext.explain.pattern.instead import other_rows
from llamadiff.ext.explain.read_back.rope import _frequencies
from llamadiff.trace import taps

ROWS = [*range(8), *range(60, 68), 97, *range(124, 132), 300, *range(392, 400)]
RIGHT = np.random.default_rng(2).standard_normal((400, 16))


def said(source):
    """What is said of tokens that hold the values of these: one for each of the prompt."""
    tap = taps.parse("ffn_out-0")
    assert tap is not None
    found = other_rows(Deviation(tap, RIGHT[source][ROWS], RIGHT[ROWS], 1e-12, positions=ROWS))
    return [fact.says for fact in found]


def test_one_step_is_said_with_how_many_bear_it_out():
    before = np.maximum(np.arange(400) - 1, 0)
    assert said(before) == ["28 of 33 wrong tokens have the values of the one before them"]
    assert said(np.arange(400) - 64 * (np.arange(400) >= 124)) == [
        "8 of 17 wrong tokens have the values of the one 64 before them"
    ]


def test_several_steps_are_said_token_by_token():
    source = np.arange(400)
    source[124:128], source[392:400] = [60, 0, 7, 2], [64, 62, 3, 5, 6, 200, 201, 202]
    (words,) = said(source)
    assert words.startswith("9 of 12 wrong tokens have the values of others: token 17 those of token 8")


def test_of_tokens_with_nobodys_values_nothing_is_said():
    elsewhere = 140 + np.arange(400) % 100  # which were not looked at
    assert said(np.where(np.arange(400) >= 124, elsewhere, np.arange(400))) == []


@pytest.mark.parametrize("rows", [ROWS, [*range(8), *range(1000, 1004), 30000, 30001], range(50)], ids=len)
def test_turns_are_read_of_any_tokens_that_begin_with_neighbours(rows):
    positions = np.array(rows, float)
    right = 3.0 ** -np.linspace(0.0, 10.0, 12)
    table = np.exp(1j * positions[:, None] * right) * (
        1 + 1e-5 * np.random.default_rng(1).standard_normal((len(positions), 12))
    )
    assert np.allclose(_frequencies(table, positions), right, rtol=0, atol=2e-5 / positions[-1])
