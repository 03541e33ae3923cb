"""Logits are held to limits: given ones, and what rounding explains."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from command import run
from llamaref import Engine

from llamadiff import Trace
from llamadiff.candidates.reference import Recorder, record
from llamadiff.engines.run_spec import USUAL, Gate, How, Run
from llamadiff.engines.select import opened_for
from llamadiff.ext.gate.gate import Bound, arithmetic_of, chance, held_to
from llamadiff.ext.gate.positions import over_positions, percentile_99
from llamadiff.judge.run import run_passes
from llamadiff.numerics.rounding_tap import Carrier
from llamadiff.verbs.verbs import check
from llamadiff.verbs.verbs import record as capture

TOKENS = (1, 17, 5, 80, 42, 9, 33)


def test_chance_is_the_quantile_of_f():
    """Tables of F at 0.1%: 8.75 for 10 and 10 degrees of freedom, 2.95 for 30, 1.87 for 100."""
    assert chance(10) == pytest.approx(8.75, rel=0.06)
    assert chance(30) == pytest.approx(3.22, rel=0.03)
    assert chance(100) == pytest.approx(1.87, rel=0.02)
    assert chance(1) == chance(0) == math.inf


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_rounding_passes_the_gate_and_what_is_more_does_not(kind, small_model, tmp_path):
    path = small_model(kind=kind)
    trace = capture(path, Run(tokens=TOKENS), tmp_path / "t.safetensors")
    right = record(Engine(path), TOKENS, "mine")
    result = check(trace, path, How(gate=Gate()), right)
    assert result.verdict == "match"
    assert result.preflight[-1].name == "logits"
    limit = float(result.preflight[-1].found.split("rounding explains, ")[1].split(")")[0])
    assert result.positions.kl_mean < limit < 100 * result.positions.kl_mean
    # logits that are off, and no tap that shows it: what the gate is for
    shaken = {name: right[name] for name in ("embd", "result_output")}
    shaken["result_output"] = shaken["result_output"] + 0.3 * np.sin(np.arange(shaken["result_output"].size)).reshape(
        shaken["result_output"].shape
    ).astype(np.float32)
    assert check(trace, path, How(gate=Gate()), lambda tokens: shaken).positions.kl_mean > limit


def test_given_limits_are_held(captures, small_model, tmp_path):
    words = ("check", captures / "a.safetensors", "--model", small_model(kind="Q8_0"))
    assert run(*words, "--max-mean-kl", "1", "--max-p99-kl", "1").returncode == 0
    done = run(*words, "--max-mean-kl", "1e-9")
    assert done.returncode == 1
    said = " ".join(done.stdout.split())
    assert "the logits do not pass the gate: over 7 positions the KL has mean" in said
    assert "more than the limit, 1.0e-09" in said
    tail = run(*words, "--max-p99-kl", "1e-9")
    assert "99th percentile" in " ".join(tail.stdout.split())
    assert tail.returncode == 1


def test_the_arithmetic_of_a_side_is_one_that_fits_all(captures, small_model):
    baseline = Trace.open(captures / "a.safetensors")
    model, _ = opened_for(small_model(kind="Q8_0"), baseline, "it")
    findings = run_passes(model, baseline, record(Engine(small_model(kind="Q8_0")), TOKENS, "mine"), USUAL).findings
    assert arithmetic_of(findings, "baseline") == "native"
    assert arithmetic_of(findings, "candidate") == "f32"
    assert arithmetic_of([], "candidate") is None


def test_more_than_rounding_explains_is_unchecked_and_not_wrong(captures, small_model):
    """Every operation is right, and yet the logits are too far off: nobody can tell."""
    result = check(captures / "b.safetensors", small_model(kind="Q8_0"), How(gate=Gate()))
    assert result.verdict == "match"
    over = [Bound("mean", 2e-3, 1e-3, given=False), Bound("99th percentile", 1.0, None, given=False)]
    held = held_to(result, result.positions, over)
    assert held.verdict == "unchecked"
    assert "mean 2.0e-03, more than what rounding explains, 1.0e-03" in held.headline
    assert "percentile" not in held.headline
    assert held.proof[0] == result.headline
    within = [Bound("mean", 1e-3, 2e-3, given=False), Bound("99th percentile", 1.0, 2.0, given=True)]
    assert held_to(result, result.positions, within).verdict == "match"


def test_limits_that_cannot_be_held_are_not_passed(captures, small_model, tmp_path):
    """A sketch has no logits, nor has a candidate that does not record them."""
    path, sketch = small_model(kind="Q8_0"), tmp_path / "s.safetensors"
    own = record(Engine(path), TOKENS, "mine")
    capture(path, Run(tokens=TOKENS), sketch, sketch=True)
    for trace, candidate in ((sketch, own), (captures / "a.safetensors", own.lacking(["result_output"]))):
        how = How(gate=Gate(mean=1.0), partial=True)
        assert check(trace, path, replace(how, gate=Gate()), candidate).verdict == "match"
        result = check(trace, path, how, candidate)
        assert result.verdict == "unchecked"
        assert result.headline.startswith("the logits cannot be held to their limits")


class Rounding(Recorder):
    """Keeps every tap of a run whose operands are rounded as a policy does."""

    def __init__(self, policy):
        super().__init__()
        carrier = Carrier([(policy, {})])
        self.operands, self.store, self.angles = carrier.operands, carrier.store, carrier.angles


@pytest.mark.parametrize("policy", ["bf16", "f16", "native"])
def test_an_engine_that_rounds_more_passes_the_gate(policy, captures, small_model):
    """Its own rounding is measured too; where that is noise, what fits it is taken, or nothing is asserted."""
    path, recorder = small_model(kind="Q8_0"), Rounding(policy)
    Engine(path).forward(TOKENS, range(len(TOKENS)), tap=recorder)
    result = check(captures / "a.safetensors", path, How(gate=Gate()), lambda tokens: recorder.arrays)
    assert result.verdict in ("match", "noise")
    assert result.preflight[-1].verdict == "match"


def test_statistics_over_positions_are_those_of_their_names():
    b = np.log(np.array([[0.7, 0.2, 0.1], [0.5, 0.5, 1e-9], [0.1, 0.2, 0.7]]))
    c = np.log(np.array([[0.7, 0.2, 0.1], [0.4, 0.6, 1e-9], [0.6, 0.2, 0.2]]))
    p = over_positions(b, c)
    kl = [0.0, 0.5 * math.log(0.5 / 0.4) + 0.5 * math.log(0.5 / 0.6), 0.1 * math.log(1 / 6) + 0.7 * math.log(3.5)]
    assert p.kl_mean == pytest.approx(np.mean(kl))
    assert (p.kl_worst, p.worst_at) == (pytest.approx(kl[2]), 2)
    assert p.regret_worst == pytest.approx(math.log(7))  # 0.7 was to be had, 0.1 was taken
    assert p.regret_mean == pytest.approx(math.log(7) / 3)  # of two that are equal, either may be taken
    assert p.agreeing == 2
    assert percentile_99(range(1, 101)) == 99
    assert percentile_99(range(1, 51)) == 50
    assert over_positions(b, np.full_like(b, np.nan)) is None
