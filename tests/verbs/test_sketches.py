"""Captures of a few kilobytes: what they hold, how sure they are, what they catch, and what they never acquit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from command import run
from faulty import BUGS
from llamaref import Engine
from optional import needs_slices
from places import ROOT
from proof.injected.base import Injection
from proof.injected.runs import record_faulty
from safetensors.numpy import save_file

from llamadiff import Trace
from llamadiff.candidates.reference import record
from llamadiff.engines.run_spec import How, Run
from llamadiff.judge.sketching import at_most, drift_from, estimate_difference, signs, sketch_of, sketch_rows
from llamadiff.llamacpp.shipped import shipped_model
from llamadiff.numerics.metrics import Rows, nmse
from llamadiff.system.errors import UserError
from llamadiff.trace.metadata import KEY, Info
from llamadiff.trace.sketch import write_sketch
from llamadiff.trace.taps import parse
from llamadiff.verbs.verbs import check, diff
from llamadiff.verbs.verbs import record as capture

TOKENS = (1, 17, 5, 80, 42, 9, 33)
RNG = np.random.default_rng(3)


def sketch_file(path: Path, trace: Trace) -> Trace:
    write_sketch(path, trace.info, sketch_of(trace))
    return Trace.open(path)


@pytest.fixture(scope="module")
def recorded(small_model, tmp_path_factory):
    """llama.cpp's run of a small model, as a sketch."""

    @cache
    def get(arch):
        path = tmp_path_factory.mktemp("sketches") / "s.safetensors"
        return capture(small_model(arch), Run(tokens=TOKENS), path, sketch=True)

    return get


# -- the arithmetic


def test_signs_are_as_often_minus_as_plus_and_independent():
    r = np.concatenate([signs(1, row, 4096, 8) for row in range(4)])
    assert set(np.unique(r)) == {-1.0, 1.0}
    assert abs(r.mean()) < 0.01
    between = r @ r.T / 4096 - np.eye(len(r))
    assert abs(between).max() < 5 / np.sqrt(4096)


def test_signs_are_those_that_the_documents_state():
    """So that an engine in another language can make the same sketch."""

    def bits(seed, row, column):
        mask = (1 << 64) - 1
        z = (column + ((row << 32) ^ (seed << 52)) + 0x9E3779B97F4A7C15) & mask
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    plain = [[-1 if bits(7, 3, column) >> j & 1 else 1 for column in range(50)] for j in range(5)]
    assert signs(7, 3, 50, 5).astype(int).tolist() == plain


def test_the_estimate_has_the_right_mean_and_spread():
    k, draws = 4, 4000
    x = RNG.standard_normal((draws, 64))
    d = np.abs(RNG.standard_normal(64))
    ratios = np.array(
        estimate_difference(sketch_rows(Rows(x + d), 1, k), sketch_rows(Rows(x), 1, k)).per_token
    ) * np.square(x).sum(1)
    ratios /= np.square(d).sum()
    assert ratios.mean() == pytest.approx(1, abs=4 * np.sqrt(2 / k / draws))
    assert ratios.std() <= np.sqrt(2 / k) * 1.1
    assert (ratios > at_most(k)).mean() <= 1e-3


@pytest.mark.parametrize("k", [1, 4, 8])
def test_what_cancels_is_missed_as_seldom_as_stated(k):
    """The worst error there is: two equal values. Each projection misses it in one of two draws."""
    x = np.zeros((4000, 32))
    y = x.copy()
    y[:, 3] = y[:, 20] = 1.0
    errors = np.array(estimate_difference(sketch_rows(Rows(y), 1, k), sketch_rows(Rows(x), 1, k)).per_token)
    assert (errors == 0).mean() == pytest.approx(0.5**k, abs=0.03)


def test_an_estimate_is_near_the_drift(recorded, small_model):
    path = small_model("llama")
    own = record_faulty(BUGS[0], path, TOKENS)
    whole = record(Engine(path), TOKENS, "right")
    sketch = sketch_of(whole)
    for name in ("Qcur_rope-0", "l_out-1", "result_output", "kq_soft_max-1"):
        axis = parse(name).row_axis
        drift = drift_from(sketch, name, Rows(own[name], axis))
        assert drift.nmse == pytest.approx(nmse(own[name], whole[name], axis), rel=1.5)
        assert np.isnan(drift.max_abs)


def test_a_cosine_does_not_contradict_the_drift():
    rng, n = np.random.default_rng(5), 256
    for _ in range(100):
        values = rng.standard_normal((4, n)).astype(np.float32)
        other = 1.3 * values + 0.3 * rng.standard_normal((4, n)).astype(np.float32)
        own, theirs = (sketch_rows(Rows(each), 1, 4) for each in (values, other))
        found = estimate_difference(theirs, own)
        assert found.nmse > 0.01
        assert -1 <= found.cosine < 1 - 1e-4
        assert estimate_difference(own, own).cosine == pytest.approx(1)


def test_what_is_not_finite_is_far(small_model):
    whole = record(Engine(small_model()), TOKENS, "right")
    spoilt = np.array(whole["embd"])
    spoilt[2, 3] = np.nan
    sketch = sketch_of(whole)
    assert drift_from(sketch, "embd", Rows(spoilt)).nmse == np.inf


# -- what they catch


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_each_injected_bug_is_caught(bug: Injection, small_model, recorded):
    """By the engine, as ever; and the sketch itself shows the leap."""
    path, baseline = small_model(bug.models[0]), recorded(bug.models[0])
    own = record_faulty(bug, path, TOKENS)
    result = check(baseline, path, How(diagnose=False), own)
    assert result.verdict == "wrong"
    assert parse(result.first_divergence.tap).kind.word == bug.words[0]
    assert "is a sketch (4 projections a token)" in result.summary
    rows = {row.tap: row for row in result.rows}
    assert rows[result.first_divergence.tap].drift is not None
    assert rows["result_output"].ratio_to_noise > at_most(4)
    alone = diff(baseline, own)
    assert alone.verdict == "unchecked"
    assert "taps that differ by more than a sketch leaves in doubt" in alone.headline


def test_a_right_engine_is_right(small_model, recorded):
    own = record(Engine(small_model("llama")), TOKENS, "my engine")
    result = check(recorded("llama"), small_model("llama"), candidate=own)
    assert result.verdict == "match"
    assert result.rows[0].baseline is not None
    assert max(row.ratio_to_noise or 0 for row in result.rows) < at_most(4)


@pytest.mark.parametrize(
    ("factor", "verdict"), [pytest.param(0.125, "match", marks=needs_slices("explain")), (0.3, "wrong")]
)
def test_a_choice_that_cancels_is_known_without_the_baselines_tensors(factor, verdict, small_model, recorded):
    """The attention scale is in Q; another factor is no choice."""
    own = record(Engine(small_model("llama")), TOKENS, "my engine")
    scaled = {name: own[name] * np.float32(factor if name.startswith(("Qcur_rope", "kq-")) else 1) for name in own}
    candidate = Trace(own.info, scaled, dict(own.dtypes))
    result = check(recorded("llama"), small_model("llama"), How(diagnose=False), candidate)
    assert result.verdict == verdict
    assert len(result.manner.choices) == (verdict == "match")


def test_captures_of_the_shipped_model_are_small(tmp_path):
    """And still catch a bug: of the demonstration's model, all three runs in less than 50 kB."""
    sizes = []
    for source in sorted((ROOT / "captures").glob("*.safetensors")):
        sketch_file(tmp_path / source.name, Trace.open(source))
        sizes.append((tmp_path / source.name).stat().st_size)
    assert len(sizes) == 3
    assert sum(sizes) < 50_000
    for bug in BUGS:
        if bug.models[0] == "llama":
            model = shipped_model()
            baseline = Trace.open(tmp_path / "tiny.F16.safetensors")
            own = record_faulty(bug, model, baseline.info.tokens)
            assert check(baseline, model, How(diagnose=False), own).verdict == "wrong", bug.name


# -- what they never acquit


def test_a_sketch_alone_is_unchecked(small_model, recorded):
    result = check(recorded("llama"), small_model("llama"))
    assert result.verdict == "unchecked"
    assert all(row.verdict == "unchecked" for row in result.rows)
    assert "no op can be judged from it" in result.summary
    assert "does not say that they are right" in result.summary


def test_a_sketch_of_another_run_is_left(small_model, recorded):
    baseline = recorded("llama")
    other = replace(baseline.info, tokens=(1, 17, 5, 81, 42, 9, 33))
    result = check(baseline.saying(other), small_model("llama"))
    assert result.verdict == "unchecked"
    assert "the engine's own run leaves it at embd" in result.summary


def test_the_same_run_is_not_called_the_same(small_model, recorded, tmp_path):
    whole = capture(small_model("llama"), Run(tokens=TOKENS), tmp_path / "w.safetensors")
    result = diff(recorded("llama"), whole)
    assert result.verdict == "unchecked"
    assert result.headline.startswith("a sketch cannot show that two runs are the same")


# -- files


def test_the_command_writes_one(small_model, tmp_path):
    target = tmp_path / "s.safetensors"
    done = run("capture", small_model(), "--tokens", "1,17,5", "--sketch", "-o", target)
    assert (done.returncode, done.stdout) == (0, "")
    assert "taps of 3 tokens, checked: MATCH" in done.stderr
    trace = Trace.open(target)
    assert (len(trace), trace.sketch.shapes["kq-1"]) == (0, (4, 3, 3))
    assert run("check", target, "--model", small_model()).returncode == 2


@pytest.mark.parametrize("place", ["candidate", "baseline"])
def test_a_sketch_is_no_candidate(place, small_model, recorded):
    path = recorded("llama").path
    words = ("check", path, "--candidate", path) if place == "candidate" else ("diff", path, path)
    done = run(*words, "--model", small_model("llama"))
    assert done.returncode == 2
    assert "is a sketch, which keeps no tensors; give it" in done.stderr


@pytest.mark.parametrize(
    ("about", "words"),
    [
        (
            {"seed": 1, "projections": 0, "taps": {"embd": [2, 8]}},
            "sketch: projections is 0; expected a whole number >= 1",
        ),
        ({"seed": 1, "projections": 1 << 40, "taps": {"embd": [2, 8]}}, "expected a whole number <= 64"),
        ({"seed": -1, "projections": 4, "taps": {"embd": [2, 8]}}, "seed is -1; expected"),
        ({"seed": 1, "projections": 4, "taps": {"embd": [2, -8]}}, "the shape of embd: [1] is -8; expected"),
        ({"seed": 1, "projections": 4, "taps": {"nonsense": [2, 8]}}, "taps has 'nonsense'"),
        ({"seed": 1, "projections": 4, "taps": []}, "taps is []; expected an object"),
        ({"seed": 1, "projections": 4, "taps": {"embd": [2, 8], "l_out-0": [2, 8]}}, "[2, 2, 8] is expected"),
        ({"seed": 1, "projections": 5, "taps": {"embd": [2, 8]}}, "[1, 2, 9] is expected"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(about, words, tmp_path):
    info = Info((1, 2), (0, 1), 2, sketch=about)
    target = tmp_path / "t.safetensors"
    save_file({"sketch": np.zeros((1, 2, 8), np.float32)}, target, {KEY: info.to_json()})
    with pytest.raises(UserError) as refused:
        Trace.open(target)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
