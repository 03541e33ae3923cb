"""The judge: spans, 16-bit dumps, values that are not finite, phases, tolerances; and who is to blame."""

from __future__ import annotations

import numpy as np
import pytest
from faulty import BUGS, with_maths
from llamaref import Engine, ops
from optional import needs_slices
from proof.injected.runs import record_faulty
from traces import changed, only

from llamadiff import UserError, compare
from llamadiff.candidates.reference import record
from llamadiff.engines.run_spec import How, Run
from llamadiff.judge.verdict import of_node, worst_of
from llamadiff.numerics.tolerances import RULES, Rule, rule_for
from llamadiff.trace.reader import Trace
from llamadiff.verbs.tolerance_file import load_rules
from llamadiff.verbs.verbs import diff

TOKENS = (1, 17, 5, 80, 42, 9, 33)
ROPE = BUGS[0]


@pytest.fixture(scope="module")
def traces(small_model):
    """model kind -> its path and the trace of a right engine."""
    return {
        kind: (small_model("llama", kind), record(Engine(small_model("llama", kind)), TOKENS, "engine"))
        for kind in ("F16", "Q8_0")
    }


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_sparse_taps_still_name_the_layer(kind, traces):
    path, right = traces[kind]

    class Layer1(Engine):
        def norm(self, x, name):
            return super().norm(x, name) * (1.2 if name == "blk.1.ffn_norm" else 1)

    faulty = only(record(Layer1(path), TOKENS, "mine"), "embd", "l_out", "result_output")
    result = diff(right, faulty, path)
    assert [row.tap for row in result.wrong] == ["l_out-1"]
    assert result.first_divergence.span[0] == "attn_norm-1"
    assert "ffn_norm-1" in result.first_divergence.span
    assert "attn_norm-1 to l_out-1" in result.summary


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
@pytest.mark.parametrize(
    "patterns", [("l_out",), ("result_output",), ("embd", "l_out", "result_output"), ("kq_soft_max",)]
)
def test_sparse_taps_of_a_right_engine_are_not_blamed(kind, patterns, traces):
    path, right = traces[kind]
    assert diff(right, only(right, *patterns), path, how=How(partial=True)).verdict in ("match", "noise")


def test_spans_follow_the_data_and_not_the_order(traces):
    path, right = traces["F16"]
    result = diff(right, changed(right, Vcur_proj_0=None, kq_0=None), path)
    spans = {row.tap: row.span for row in result.rows if row.span}
    assert spans == {"kq_soft_max-0": ("kq-0",), "kv_v-0": ("Vcur_proj-0",)}
    assert result.missing == ("Vcur_proj-0", "kq-0")


@pytest.mark.parametrize("dtype", [np.float16, "bf16"])
def test_a_dump_in_16_bits_is_noise(dtype, traces):
    from llamadiff.numerics.halves import round_bf16

    path, right = traces["F16"]
    rounded = {name: round_bf16(right[name]) if dtype == "bf16" else right[name].astype(dtype) for name in right}
    dump = Trace(right.info, rounded, dict.fromkeys(rounded, "F32"))
    assert diff(right, dump, path).verdict == "noise"
    faulty = record_faulty(ROPE, path, TOKENS)
    rounded = {name: np.asarray(faulty[name]).astype(np.float16) for name in faulty}
    dump = Trace(right.info, rounded, dict.fromkeys(rounded, "F16"))
    assert [row.tap for row in diff(right, dump, path).wrong] == [
        "Qcur_rope-0",
        "Kcur_rope-0",
        "Qcur_rope-1",
        "Kcur_rope-1",
    ]


def test_one_wrong_element_is_found_with_its_place(traces):
    path, right = traces["Q8_0"]
    out = right["ffn_out-1"].copy()
    out[4, 200] += 0.5
    result = diff(right, changed(right, ffn_out_1=out), path)
    assert [row.tap for row in result.wrong] == ["ffn_out-1"]
    first = result.first_divergence
    assert (first.local.token, first.local.index) == (4, (4, 200))
    assert first.local.recorded - first.local.expected == pytest.approx(0.5, abs=1e-3)
    assert first.local.per_token[4] > 1e-6 > max(first.local.per_token[:4])


@pytest.mark.slow
def test_arithmetic_of_each_phase_is_its_own(traces):
    """A prefill in float32 and decode steps on rounded activations, as kernels really do it."""
    from dataclasses import replace

    from llamadiff.candidates.reference import Recorder

    class Rounding(Recorder):
        def operands(self, kind, *arrays):
            from llamadiff.numerics.eight_bits import round_q8_0

            if kind != "Q8_0":
                return arrays
            return tuple(np.concatenate([a[:, :5], round_q8_0(a[:, 5:])], axis=1) for a in arrays)

    path, right = traces["Q8_0"]
    recorder = Rounding()
    Engine(path).forward(TOKENS, tap=recorder)
    info = replace(right.info, n_prefill=5)
    mixed = Trace(info, recorder.arrays, dict.fromkeys(recorder.arrays, "F32"))
    baseline = Trace(info, {name: right[name] for name in right}, right.dtypes)
    assert diff(baseline, mixed, path).verdict == "match"
    whole = Trace(right.info, recorder.arrays, dict.fromkeys(recorder.arrays, "F32"))
    assert diff(right, whole, path).verdict == "wrong"


def test_the_baseline_is_named_when_it_is_the_one_that_is_off(traces):
    path, right = traces["F16"]
    faulty = record_faulty(ROPE, path, TOKENS, name="llama.cpp")
    for words in ((), ("l_out", "result_output"), ("result_output",)):
        kept = {name: right[name] for name in right if not words or name.startswith(words)}
        result = diff(faulty, Trace(right.info, kept, dict.fromkeys(kept, "F32")), path)
        assert result.verdict == "wrong"
        assert not result.wrong  # of the candidate's taps
        assert result.headline.startswith("llama.cpp's Qcur_rope-0 is off on its own inputs")
        assert result.proof[0].startswith("what was recorded of" if words else "every op of")


@needs_slices("explain")
def test_llama_cpp_is_blamed_for_what_its_trace_shows(small_model, tmp_path):
    from llamadiff.verbs.verbs import check

    compare(small_model(), TOKENS, save=tmp_path)
    recorded = Trace.open(tmp_path / "baseline.safetensors")
    norm = recorded["ffn_norm-1"] * np.float32(1.001)
    result = check(changed(recorded, ffn_norm_1=norm), small_model())
    assert result.first_divergence.tap == "ffn_norm-1"
    assert result.summary.startswith(
        "llama.cpp's RMSNorm by ffn_norm.weight, layer 1: it is 1.001000 times what it should be, everywhere"
    )


def test_saved_traces_compare_to_the_same_verdict(small_model, tmp_path):
    first = compare(small_model(), Run(tokens=TOKENS, n_predict=2), save=tmp_path)
    again = diff(tmp_path / "baseline.safetensors", tmp_path / "engine.safetensors", small_model())
    assert (first.verdict, again.verdict) == ("match", "match")
    plain = diff(tmp_path / "baseline.safetensors", tmp_path / "engine.safetensors")
    assert plain.verdict == "unchecked"
    assert "--model" in plain.summary
    assert diff(tmp_path / "engine.safetensors", tmp_path / "engine.safetensors").verdict == "match"


def test_only_wanted_taps_are_recorded(small_model, tmp_path):
    result = compare(small_model("llama", "Q8_0"), Run(tokens=TOKENS, patterns=("l_out-*",)), save=tmp_path)
    assert list(Trace.open(tmp_path / "baseline.safetensors")) == ["l_out-0", "l_out-1"]
    assert result.verdict in ("match", "noise")
    assert [row.tap for row in result.rows] == ["l_out-0", "l_out-1"]


def test_the_frame_has_a_row_a_tap(small_model):
    frame = compare(small_model(), TOKENS).frame()
    assert list(frame.tap)[:2] == ["embd", "attn_norm-0"]
    assert (frame.verdict == "match").all()
    assert frame.local_nmse.max() < 1e-11
    assert frame.weight_type[frame.tap == "ffn_up-0"].item() == "F16"


def test_first_rule_wins_and_none_is_an_error(tmp_path):
    rules = (Rule(1e-3, tap="l_out-*"), Rule(1e-5, op="ADD"))
    assert rule_for(rules, "l_out-3", "ADD", "F32").match == 1e-3
    assert rule_for(rules, "ffn_inp-3", "ADD", "F32").match == 1e-5
    with pytest.raises(UserError, match="no tolerance fits tap embd"):
        rule_for(rules, "embd", "GET_ROWS", "F32")
    (tmp_path / "t.toml").write_text('[[rule]]\ntap = "Qcur_rope-*"\nmatch = 5\n', encoding="utf-8")
    loaded = load_rules(tmp_path / "t.toml")
    assert loaded == (Rule(5, tap="Qcur_rope-*"), *RULES)


def test_a_tolerance_lets_a_known_bug_pass(traces):
    path, right = traces["F16"]
    rules = (Rule(5, op="ROPE"), *RULES)
    assert diff(right, record_faulty(ROPE, path, TOKENS), path, How(rules)).verdict == "match"


def test_verdicts():
    assert of_node(0.0, 0.0).verdict == "match"
    assert of_node(9e-10, 1e-10).verdict == "noise"
    assert of_node(float("nan"), 1.0).verdict == "wrong"
    assert of_node(float("inf"), 1.0).verdict == "wrong"
    assert of_node(0.0, 1.0, opened=1).verdict == of_node(None, 1.0).verdict == "unchecked"
    assert worst_of(["match", "noise", "match"]) == "noise"
    assert worst_of(["unchecked", "wrong", "match"]) == "wrong"
    assert worst_of([]) == "unchecked"


@needs_slices("explain")
def test_what_the_error_looks_like(traces):
    path, right = traces["F16"]

    def described(**changes):
        return diff(right, changed(right, **changes), path).profile

    up, rope = right["ffn_up-1"], right["Qcur_rope-1"]
    assert "the values are those of its own ffn_gate-1" in described(ffn_up_1=right["ffn_gate-1"])
    assert "the values are those of its own ffn_up-0" in described(ffn_up_1=right["ffn_up-0"])
    assert "the values are those of the baseline's ffn_up-1" in described(ffn_up_0=right["ffn_up-1"])
    assert "it is 3 times what it should be, everywhere" in described(ffn_up_1=3 * up)
    assert "it is off by the constant 0.5" in described(ffn_up_1=up + np.float32(0.5))
    bias = np.linspace(-1, 1, up.shape[1]).astype(np.float32)
    assert "every token is off by the same vector, as when a bias is dropped" in described(ffn_up_1=up + bias)
    turned = np.stack([np.roll(row, 5 * at) for at, row in enumerate(up)])
    assert "every token has the right values in another order" in described(ffn_up_1=turned)
    assert "only head 2 is wrong" in described(Qcur_rope_1=rope * np.array([1, 1, 2, 1], np.float32)[:, None])
    assert "only token 3 is wrong" in described(ffn_up_1=up * (np.arange(7) == 3)[:, None].astype(np.float32) + up)
    periodic = up * np.where(np.arange(up.shape[1]) % 32 == 5, 2, 1).astype(np.float32)
    assert "the wrong channels repeat every 32" in described(ffn_up_1=periodic)
    one = up.copy()
    one[3, 5] *= 2
    said = described(ffn_up_1=one)
    assert "only channel 5 is wrong" in said
    assert "times" not in said  # as any one value is


@needs_slices("explain")
def test_a_small_error_is_no_other_order(traces):
    path, right = traces["F16"]
    up = right["ffn_up-1"]
    assert (
        "the channels are rolled: each is 3 places later"
        in diff(right, changed(right, ffn_up_1=np.roll(up, 3, 1)), path).profile
    )
    slightly = up * (1 + 0.003 * np.sin(np.arange(up.shape[1]))).astype(np.float32)
    result = diff(right, changed(right, ffn_up_1=slightly), path)
    assert result.verdict == "wrong"
    assert result.profile == ()


@needs_slices("explain")
def test_rope_says_which_positions_it_used(traces):
    path, right = traces["F16"]
    shifted = with_maths(
        rope_angles=lambda rope, positions, factors=None: ops.rope_angles(rope, positions + 1, factors)
    )
    result = diff(right, record(shifted(path), TOKENS, "mine"), path)
    assert result.first_divergence.tap == "Qcur_rope-0"
    assert "every token is rotated by its position +1" in result.profile


def restarted(path):
    """An engine whose positions restart at every decode step: prefill of 5, then two steps at position 0."""

    def angles(rope, positions, factors=None):
        return ops.rope_angles(rope, np.where(positions >= 5, 0, positions), factors)

    return with_maths(rope_angles=angles)(path)


@needs_slices("explain")
def test_a_wrong_decode_step_is_said_in_those_words(traces):
    from dataclasses import replace

    path, right = traces["F16"]
    info = replace(right.info, n_prefill=5)
    faulty = record(restarted(path), TOKENS, "mine")
    candidate = Trace(info, {name: faulty[name] for name in faulty}, faulty.dtypes)
    result = diff(Trace(info, {name: right[name] for name in right}, right.dtypes), candidate, path)
    assert result.first_divergence.tap == "Qcur_rope-0"
    assert "the prefill is right, the first decode step is wrong" in result.summary
    said = "token 5 is rotated by position 0, where 5 is right, token 6 is rotated by position 0, where 6 is right"
    assert said in result.profile
    second = changed(candidate, ffn_out_1=1.5 * faulty["ffn_out-1"])
    assert "the prefill is right" not in diff(right, second, path).summary


@needs_slices("explain")
def test_a_cache_is_compared_slot_by_slot(traces):
    path, right = traces["F16"]
    keys = right["kv_k-1"].copy()
    keys[5] = keys[4]  # a stale row
    result = diff(right, changed(right, kv_k_1=keys), path)
    assert [(row.tap, row.misrecorded) for row in result.wrong] == [("kv_k-1", True)]
    assert result.first_divergence.local.token == 5
    assert "only token 5 is wrong" in result.profile


@pytest.mark.slow
def test_a_span_that_overflows_float16_hides_no_bug(tmp_path):
    """Of the arithmetics that a span is tried with, one that overflows measures no noise."""
    from models.small import write_model

    big = {"blk.1.ffn_up.weight": np.full((512, 256), 3000, np.float32)}
    path = write_model(tmp_path / "m.gguf", kind="F32", tensors=big)

    class Layer1(Engine):
        def norm(self, x, name):
            return super().norm(x, name) * (1.2 if name == "blk.1.ffn_norm" else 1)

    right = record(Engine(path), TOKENS, "engine")
    assert np.abs(right["ffn_swiglu-1"]).max() > 65504
    result = diff(right, only(record(Layer1(path), TOKENS, "mine"), "embd", "l_out", "result_output"), path)
    assert [row.tap for row in result.wrong] == ["l_out-1"]
    assert diff(right, only(right, "embd", "l_out", "result_output"), path).verdict in ("match", "noise")
