"""Ten injected bugs: the first divergence is exactly the tap of the bug, and nothing else is WRONG."""

from __future__ import annotations

import pytest
from faulty import BUGS, Bug
from llamaref import Engine

from llamadiff import compare
from llamadiff.candidates.reference import record
from llamadiff.trace.taps import parse
from llamadiff.verbs.verbs import diff

TOKENS = (1, 17, 5, 80, 42, 9, 33)


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_bug_is_named(bug: Bug, kind, small_model, captured):
    path = small_model(bug.arch, kind)
    result = diff(captured(bug.arch, kind), record(bug.build(path), TOKENS, "my engine"), path)
    assert result.verdict == "wrong"
    assert result.first_divergence is not None
    assert parse(result.first_divergence.tap).kind.word == bug.words[0]
    assert result.first_divergence.layer in (0, None)
    expected = [row.tap for row in result.rows if parse(row.tap).kind.word in bug.words]
    assert [row.tap for row in result.wrong] == expected
    assert result.headline.count(": ") >= 1
    assert result.proof[0].startswith(bug.words[0])


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "moe"])
def test_a_right_engine_is_not_blamed(arch, kind, small_model, captured):
    path = small_model(arch, kind)
    result = diff(captured(arch, kind), record(Engine(path), TOKENS, "my engine"), path)
    assert result.verdict == "match"
    assert not result.wrong


def test_two_bugs_are_both_named(small_model, captured):
    path = small_model("llama", "F16")
    both = type("Both", (BUGS[9].build, BUGS[6].build), {})
    result = diff(captured("llama", "F16"), record(both(path), TOKENS, "my engine"), path)
    assert [row.tap for row in result.wrong] == ["ffn_gate-0", "ffn_up-0", "ffn_gate-1", "ffn_up-1", "result_norm"]


def test_a_bug_in_one_layer_is_named_there(small_model):
    class OneLayer(Engine):
        def norm(self, x, name):
            return super().norm(x, name) * (1.01 if name == "blk.1.ffn_norm" else 1)

    path = small_model("llama", "Q8_0")
    result = compare(path, TOKENS, candidate=record(OneLayer(path), TOKENS, "my engine"))
    assert [row.tap for row in result.wrong] == ["ffn_norm-1"]


def test_a_norm_is_called_by_its_name(small_model):
    class NoMean(Engine):
        def layer_norm(self, x, name):
            return super().layer_norm(x + (1 if name == "output_norm" else 0), name) + (name == "output_norm")

    path = small_model("stablelm")
    result = compare(path, TOKENS, candidate=record(NoMean(path), TOKENS, "mine"))
    assert [row.tap for row in result.wrong] == ["result_norm"]
    assert "LayerNorm by output_norm.weight" in result.summary
