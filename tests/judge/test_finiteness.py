"""NaN and Inf: wrong where they arise, unchecked where they come from elsewhere, right nowhere."""

from __future__ import annotations

import io
import math

import jsonschema
import numpy as np
import pytest
from faulty import with_maths
from llamaref import Engine, ops
from models.small import write_model
from optional import needs_slices
from places import REPORT_SCHEMA
from traces import Mixed

from llamadiff import compare
from llamadiff.candidates.reference import record
from llamadiff.engines.run_spec import Run
from llamadiff.numerics import metrics
from llamadiff.report.json import to_object
from llamadiff.report.terminal.report import make_console, render
from llamadiff.result.logits import compare_logits
from llamadiff.trace.metadata import Info
from llamadiff.trace.reader import Trace
from llamadiff.verbs.verbs import diff

TOKENS = (1, 17, 5, 80, 42, 9, 33)
LAST = len(TOKENS) - 1


def spoilt(value, token, channel, layer=0):
    """An engine whose activation of one layer has one value that it should not have."""
    layers = iter(range(99))

    def swiglu(gate, up):
        y = np.array(ops.swiglu(gate, up))
        if next(layers) == layer:
            y[..., token, channel] = value
        return y

    return with_maths(swiglu=swiglu)


def changed(trace, **arrays):
    """A copy with some taps replaced. Names with _ for -."""
    new = {name: np.array(arrays.get(name.replace("-", "_"), trace[name])) for name in trace}
    return Trace(trace.info, new, dict.fromkeys(new, "F32"))


def printed(result):
    file = io.StringIO()
    render(result, make_console(file, 200))
    return " ".join(file.getvalue().split())


@pytest.fixture(scope="module")
def path(small_model):
    return small_model()


@pytest.fixture(scope="module")
def right(path):
    return record(Engine(path), TOKENS, "right")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("token", [0, 3, LAST])
def test_what_depends_on_it_is_unchecked(value, token, right, path):
    result = diff(right, record(spoilt(value, token, 5)(path), TOKENS, "mine"), path)
    assert result.verdict == "wrong"
    assert [row.tap for row in result.wrong] == ["ffn_swiglu-0"]
    names = [row.tap for row in result.rows]
    before, after = names[: names.index("ffn_swiglu-0")], names[names.index("ffn_swiglu-0") + 1 :]
    verdicts = {row.tap: row.verdict for row in result.rows}
    assert {verdicts[name] for name in before} == {"match"}
    assert {verdicts[name] for name in after} == {"unchecked"}
    local = result.first_divergence.local
    assert (local.token, local.index, local.not_finite) == (token, (token, 5), 1)
    assert f"at [{token}, 5], where" in result.summary
    assert f"{len(after)} taps, from ffn_out-0 on, are computed from NaN or Inf" in result.summary
    assert f"the other {len(before)} recorded taps are right" in result.summary


def test_rows_without_it_are_judged(right, path):
    faulty = record(spoilt(np.nan, 3, 5)(path), TOKENS, "mine")
    out = next(row for row in diff(right, faulty, path).rows if row.tap == "l_out-0").local
    assert (out.verdict, out.open_tokens) == ("unchecked", (3,))
    assert out.opened == 256
    assert out.nmse < 1e-12
    assert math.isnan(out.per_token[3])
    assert max(out.per_token[:3]) < 1e-12
    values = np.array(faulty["l_out-0"])
    values[1, 7] += 0.5
    result = diff(right, changed(faulty, l_out_0=values), path)
    assert [row.tap for row in result.wrong][:2] == ["ffn_swiglu-0", "l_out-0"]
    wrong = next(row for row in result.rows if row.tap == "l_out-0").local
    assert (wrong.index, wrong.open_tokens) == ((1, 7), (3,))


def test_values_that_hide_it_are_unchecked(right, path):
    """Finite values after a NaN: nobody can say what is right there."""
    up = np.array(right["ffn_up-0"])
    up[2, 9] = np.nan
    result = diff(right, changed(right, ffn_up_0=up), path)
    verdicts = {row.tap: row.verdict for row in result.rows}
    assert [row.tap for row in result.wrong] == ["ffn_up-0"]
    assert verdicts["ffn_swiglu-0"] == "unchecked"
    assert verdicts["ffn_out-0"] == "match"
    assert "ffn_swiglu-0 is computed from NaN or Inf and could not be judged" in result.summary


def test_no_fact_says_that_nan_is_nan(right, path):
    everywhere = np.full_like(np.array(right["Qcur_proj-0"]), np.nan)
    broken = changed(right, Qcur_proj_0=everywhere, Qcur_proj_1=everywhere)
    result = diff(right, broken, path)
    assert result.first_divergence.tap == "Qcur_proj-0"
    assert not any("the values are those of" in fact for fact in result.profile)
    assert not any(fact.kind == "equals" for row in result.wrong for fact in row.local.facts)


def test_several_origins_are_named(right, path):
    rope, up = np.array(right["Qcur_rope-0"]) * 2, np.array(right["ffn_up-1"])
    up[4, 2] = np.inf
    result = diff(right, changed(right, Qcur_rope_0=rope, ffn_up_1=up), path)
    assert result.first_divergence.tap == "Qcur_rope-0"
    assert result.headline == "matrix product by ffn_up.weight, layer 1: wrong on the inputs it was given"
    assert "Inf at [4, 2]" in result.summary
    assert "Qcur_rope-0: right recorded it wrongly" in result.summary


def test_several_ops_origins_are_named(right, path):
    """Two ops that are wrong, of which the second turns to Inf."""
    doubled = with_maths(rope_pairs=lambda *how: 2 * ops.rope_pairs(*how))
    faulty = record(doubled(path), TOKENS, "mine")
    up = np.array(faulty["ffn_up-1"])
    up[4, 2] = np.inf
    result = diff(right, changed(faulty, ffn_up_1=up), path)
    assert result.first_divergence.tap == result.leading.tap == "Qcur_rope-0"
    assert "ffn_up-1 has Inf at [4, 2]" in result.summary


def test_a_right_engine_beside_a_baseline_of_nan_is_right(right, path):
    result = diff(record(spoilt(np.nan, 3, 5)(path), TOKENS, "llama.cpp"), right, path)
    assert (result.verdict, {row.verdict for row in result.rows}) == ("wrong", {"match"})
    assert result.headline.startswith("llama.cpp's ffn_swiglu-0 is off on its own inputs")
    assert (result.logits.not_finite, result.logits.top1_agree, result.logits.top) == (("baseline",), None, ())
    logits = np.array(right["result_output"])
    logits[:] = np.inf
    unknown = diff(changed(right, result_output=logits), right, path)
    assert "drifts inf" not in unknown.summary


# -- what a legal arithmetic, or the model itself, makes of large values -----------------------------------


@pytest.fixture(scope="module")
def large(small_model):
    """A model whose activations are beyond float16, and llama.cpp's type of weights that stay in float32."""
    return small_model("llama-large", "F32")


def test_an_overflow_in_16_bits_is_wrong_and_no_arithmetic(large):
    right = record(Engine(large), TOKENS, "right")
    assert np.abs(right["ffn_swiglu-0"]).max() > 65504
    tap = Mixed(["f16"] * 4)
    Engine(large).forward(TOKENS, tap=tap)
    arrays = {name: array.astype(np.float32) for name, array in tap.arrays.items()}
    half = Trace(Info(TOKENS, tuple(range(7)), 7, None, {"name": "half"}), arrays, dict.fromkeys(arrays, "F32"))
    assert not np.isfinite(half["ffn_out-0"]).all()
    result = diff(right, half, large)
    assert result.first_divergence.tap == "ffn_out-0"
    assert result.first_divergence.local.not_finite > 0
    assert diff(right, right, large).verdict == "match"


def test_a_harmless_rounding_does_not_excuse_an_overflow(large):
    right = record(Engine(large), TOKENS, "right")
    half = with_maths(swiglu=lambda gate, up: ops.swiglu(gate, up).astype(np.float16).astype(np.float32))
    with np.errstate(over="ignore"):
        result = diff(right, record(half(large), TOKENS, "mine"), large)
    assert result.verdict == "wrong"
    assert result.first_divergence.tap == "ffn_swiglu-0"


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory):
    """A model that overflows float32: gate and up of 1e26 each, in layer 1."""
    huge = np.full((512, 256), 1e25, np.float32)
    tensors = {"blk.1.ffn_up.weight": huge, "blk.1.ffn_gate.weight": huge}
    return write_model(tmp_path_factory.mktemp("m") / "m.gguf", kind="F32", tensors=tensors)


def test_a_model_that_overflows_is_unchecked_from_there_on(overflowing):
    result = compare(overflowing, TOKENS)
    verdicts = {row.tap: row.verdict for row in result.rows}
    assert result.verdict == "unchecked"
    assert not result.wrong
    assert verdicts["ffn_up-1"] == "match"
    assert verdicts["ffn_swiglu-1"] == verdicts["result_output"] == "unchecked"
    assert result.summary.startswith("ffn_swiglu-1 cannot be judged")
    assert any("ffn_swiglu-1" in step for step in result.next_steps)
    mine = compare(overflowing, TOKENS, candidate=record(Engine(overflowing), TOKENS, "mine"))
    assert mine.verdict == "unchecked"
    assert "llama.cpp's own run has NaN or Inf there too" in mine.summary
    jsonschema.validate(to_object(mine), REPORT_SCHEMA)
    assert "nan" not in printed(mine)


@needs_slices("graph")
def test_a_graph_that_overflows_is_unchecked_from_there_on(overflowing, path):
    from llamadiff.ext.graph.backend import judge_graph

    result = judge_graph(overflowing, Run(tokens=TOKENS))
    assert result.verdict == "unchecked"
    assert not result.wrong
    assert "since on their inputs NaN or Inf is right" in result.summary
    first = next(row for row in result.rows if row.verdict == "unchecked")
    assert first.layer == 1
    assert "since on their inputs" not in judge_graph(path, Run(tokens=TOKENS)).summary


# -- logits, and traces alone -----------------------------------


def test_logits_that_are_not_finite_claim_nothing(right, path):
    logits = np.array(right["result_output"])
    logits[LAST, 7] = np.nan
    result = diff(right, changed(right, result_output=logits), path)
    assert math.isnan(result.logits.kl)
    assert result.logits.top1_agree is None
    assert (result.logits.agreeing, result.logits.rows) == (LAST, LAST + 1)
    report = to_object(result)
    jsonschema.validate(report, REPORT_SCHEMA)
    assert report["logits"]["kl"] is None
    assert report["logits"]["top1_agree"] is None
    assert report["logits"]["not_finite"] == ["candidate"]
    text = printed(result)
    assert "no KL: the last row of right holds NaN or Inf; first token unknown" in text
    assert "KL 0 nats" not in text


def test_kl():
    b = np.array([1.0, 2.0, 3.0])
    assert metrics.kl_divergence(b, b) == 0.0
    assert math.isnan(metrics.kl_divergence(b, np.array([1.0, np.nan, 3.0])))
    assert math.isnan(metrics.kl_divergence(b, np.array([1.0, np.inf, 3.0])))
    ruled_out = np.array([1.0, -np.inf, 3.0])
    assert metrics.kl_divergence(ruled_out, ruled_out) == 0.0
    assert metrics.kl_divergence(b, ruled_out) == np.inf
    assert compare_logits(ruled_out[None], ruled_out[None], lambda _: None).top1_agree is True


def test_two_traces_with_the_same_nan_do_not_agree(right, path):
    up = np.array(right["ffn_up-0"])
    up[2, 9] = np.nan
    broken = changed(right, ffn_up_0=up)
    result = diff(broken, broken)
    assert result.verdict == "unchecked"
    assert "ffn_up-0 alone differs, or holds NaN or Inf" in result.summary
