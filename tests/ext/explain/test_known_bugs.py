"""Every known bug, injected into a copy of the engine: it is found where it is, and called by its name."""

from __future__ import annotations

import pytest
from explaining import FLOOR, INJECTED, Explained
from proof.injected import ALL, INJECTIONS
from proof.injected.base import OF_HEADS, Injection

from llamadiff.ext.explain.registry import known_bugs
from llamadiff.result.comparison import Comparison
from llamadiff.trace.taps import parse

BLOCKS = {
    "nibbles-interleaved", "nibbles-swapped", "quants-offset", "high-bits-ignored", "high-bits-misplaced",
    "minima-wrong", "scales-misread", "quants-linear", "quants-order", "scale-missing", "block-size-wrong",
    "tensor-offset-wrong",
}  # fmt: skip
WRONG = [case for case in INJECTED if not (case.values[0].harmless or case.values[0].choice)]
CHOICES = [case for case in INJECTED if case.values[0].choice]
HARMLESS = [case for case in INJECTED if case.values[0].harmless]


@pytest.fixture(scope="module")
def explained(small_model):
    return Explained(small_model)


@pytest.fixture
def compared(explained):
    """The comparison of a faulty run with the right one."""
    return lambda *case: explained.compared(case)


@pytest.mark.parametrize(("injection", "model", "kind"), WRONG)
def test_a_bug_is_named(injection: Injection, model: str, kind: str, compared):
    result = compared(injection, model, kind)
    first = result.first_divergence
    assert first is not None
    present = {parse(row.tap).kind.word for row in result.rows}
    assert parse(first.tap).kind.word == next(word for word in injection.words if word in present)
    assert first.layer in (injection.layer, None)
    assert {parse(row.tap).kind.word for row in result.wrong} <= set(injection.words)
    found = result.diagnosis[0]
    assert found.tap == first.tap
    assert injection.cause in [cause.name for cause in found.causes]
    assert found.nmse <= FLOOR
    assert [other.tap for other in result.diagnosis if not other.known] == []


@pytest.mark.parametrize(("injection", "model", "kind"), HARMLESS)
def test_a_harmless_difference_is_noise_and_its_cause_is_said(injection: Injection, model: str, kind: str, compared):
    result = compared(injection, model, kind)
    assert result.verdict == "noise"
    noise = [row for row in result.rows if row.verdict == "noise"]
    assert {parse(row.tap).kind.word for row in noise} <= set(injection.words)
    assert {row.explained or row.local.arithmetic for row in noise} == {injection.says}
    assert known_bugs()[injection.cause].harmless
    explained = any(row.explained for row in noise)  # if not, all products show it, or the bits of recorded values do
    assert named(result) == [injection.cause] * explained
    assert all(clause in result.summary for clause in own_ways(result))


def named(result: Comparison) -> list[str]:
    """The causes that the diagnosis names, each once."""
    return sorted({cause.name for found in result.diagnosis for cause in found.causes})


def own_ways(result: Comparison) -> set[str]:
    """What is the candidate's own way, in the words that the sentence has for it."""
    roundings = {rounding.words() for rounding in result.manner.roundings.values()}
    return roundings | {row.explained for row in result.rows if row.explained}


@pytest.mark.parametrize(("injection", "model", "kind"), CHOICES)
def test_a_choice_that_cancels_is_named_and_no_mistake(injection: Injection, model: str, kind: str, compared):
    result = compared(injection, model, kind)
    assert result.verdict == "match"
    assert len(result.manner.choices) == 1
    assert result.manner.choices[0].lines in result.summary


# of what predicts a token more beside a model, which none of these has: tests/ext/heads/test_head_mistakes.py
# by edits alone: other architectures than the reference engine's have them (test_graph_bugs.py)
OF_OTHERS = {
    "adapter-missing", "adapter-scale-other", "adapter-scaled",  # tests/ext/file/test_applied.py
    "alibi-wrong", "clamp-missing", "convolution-reversed", "convolution-shifted", "decay-wrong", "delta-net-wrong",
    "gate-after-norm", "gate-missing", "l2-norm-missing", "multiplier-missing", "multiplier-other",
    "shared-expert-missing", "sinks-ignored", "skip-missing", "softcap-missing", "softcap-other", "state-behind",
    "state-lost", "decay-missing-in-batch", "recurrence-input-misplaced", "step-size-limited",
    "recurrence-group-wrong", "expert-groups-wrong",
    "state-inputs-swapped", "step-size-wrong", "window-ignored",
    "rope-long-factors",  # tests/ext/rows/test_mistakes_at_length.py
    *OF_HEADS,
}  # fmt: skip


def test_every_known_bug_is_injected():
    injected = {injection.cause for injection in INJECTIONS}
    assert injected == set(known_bugs()) - BLOCKS - OF_OTHERS


def test_names_are_unique():
    names = [injection.name for injection in ALL]
    assert len(set(names)) == len(names)
