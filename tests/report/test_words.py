"""What a report says of wrong taps: which comes first, what was only recorded wrongly, what is left unknown."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from faulty import BUGS, with_maths
from llamaref import Engine, ops
from optional import needs_slices
from proof.injected.runs import record_faulty
from traces import changed, only

from llamadiff.candidates.reference import record
from llamadiff.engines.run_spec import How
from llamadiff.verbs.verbs import diff
from report.snapshots import printed

TOKENS = (1, 17, 5, 80, 42, 9, 33, 61)


@pytest.fixture(scope="module")
def path(small_model):
    return small_model("llama", "F16")


@pytest.fixture(scope="module")
def right(path):
    return record(Engine(path), TOKENS, "right")


# which comes first


def changing(**changes):
    """An engine whose norms with these weights (``blk_0_attn_norm``) give something else, and go on with it."""

    class Changing(Engine):
        def norm(self, x, name):
            y = super().norm(x, name)
            change = changes.get(name.removesuffix(".weight").replace(".", "_"))
            return change(y) if change is not None else y

    return Changing


def off_in_one_value(y):
    y = y.copy()
    y[..., 3, 7] += 2e-4 * np.sqrt(np.mean(y**2))
    return y


def rolled(y):
    return np.roll(y, 3, axis=-1)


@needs_slices("explain")
def test_what_matters_comes_before_what_is_hardly_off(path, right):
    engine = changing(blk_0_attn_norm=off_in_one_value, output_norm=rolled)
    result = diff(right, record(engine(path), TOKENS, "mine"), path)
    assert result.first_divergence.tap == "attn_norm-0"
    assert result.headline == "RMSNorm by output_norm.weight: the channels are rolled: each is 3 places later"
    assert result.proof[0].startswith("result_norm: own error")
    assert "; attn_norm-0 differs by an NMSE of" in result.summary
    assert result.summary.count("for no known reason") == 1
    assert result.profile == ("the channels are rolled: each is 3 places later",)
    assert any(step.startswith("result_norm[") for step in result.next_steps)


def test_what_is_hardly_off_leads_where_it_is_alone(path, right):
    logits = np.asarray(right["result_output"]).copy()
    logits[3, 7] += 5e-3 * np.sqrt(np.mean(logits**2))
    result = diff(right, changed(right, result_output=logits), path)
    assert result.proof[0].startswith("result_output: own error")
    assert "arithmetic" not in result.summary


@needs_slices("explain")
def test_every_unknown_op_has_its_facts_and_its_advice(path, right):
    def bent(gate, up):
        return ops.swiglu(gate, up) * np.where(gate < -0.05, 1.4 + 0.3 * np.sin(40 * gate), 1)

    one_row = changing(output_norm=lambda y: np.where(np.arange(len(TOKENS))[:, None] == 2, rolled(y), y))
    engine = one_row(path, maths=SimpleNamespace(**{**vars(ops), "swiglu": bent}))
    result = diff(right, record(engine, TOKENS, "mine"), path)
    assert result.first_divergence.tap == "ffn_swiglu-0"
    text = " ".join(printed(result, 120).split())
    assert "it is wrong only where ffn_gate-0 <= -0.05" in text
    assert "error result_norm: " in text
    assert "only token 2 is wrong" in text
    assert any(step.startswith("result_norm: check epsilon") for step in result.next_steps)


# wrong records


RECORDS = {
    "x1.5": lambda x: 1.5 * x,
    "noise": lambda x: x + np.random.default_rng(3).standard_normal(x.shape) * x.std(),
    "transposed": lambda x: np.ascontiguousarray(x.reshape(len(x), -1).T).reshape(x.shape),
    "backwards": lambda x: x[::-1],
}
SAID = {"transposed": "it was written as [ff, token]", "backwards": "token 0 has the values of token 7"}


@pytest.mark.parametrize("error", RECORDS)
@pytest.mark.parametrize("tap", ["embd", "attn_norm-0", "Vcur_proj-1", "kv_k-0", "kq-1", "ffn_up-0", "ffn_out-1"])
def test_a_wrong_record_is_told_from_a_wrong_op(tap, error, path, right):
    values = RECORDS[error](np.asarray(right[tap])).astype(np.float32)
    result = diff(right, changed(right, **{tap.replace("-", "_"): values}), path)
    assert [(row.tap, row.misrecorded) for row in result.wrong] == [(tap, True)]
    assert f"{tap}: right recorded it wrongly and computed it rightly" in result.summary
    assert result.diagnosis == ()
    assert any(f"look at what writes {tap}" in step for step in result.next_steps)


@needs_slices("explain")
@pytest.mark.parametrize("error", SAID)
def test_a_wrong_record_says_what_it_holds_instead(error, path, right):
    values = RECORDS[error](np.asarray(right["ffn_up-0"])).astype(np.float32)
    assert SAID[error] in diff(right, changed(right, ffn_up_0=values), path).summary


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_no_wrong_op_is_called_a_wrong_record(bug, small_model):
    model = small_model(bug.models[0], "F16")
    faulty = record_faulty(bug, model, TOKENS)
    result = diff(record(Engine(model), TOKENS, "right"), faulty, model)
    assert result.wrong
    assert not any(row.misrecorded for row in result.wrong)
    assert "recorded it wrongly" not in result.summary


@needs_slices("explain")
def test_a_wrong_op_leads_a_wrong_record(path, right):
    faulty = record_faulty(BUGS[0], path, TOKENS)
    up = np.asarray(faulty["ffn_up-0"])
    result = diff(right, changed(faulty, ffn_up_0=1.5 * up), path)
    assert result.leading.tap == result.diagnosis[0].tap != "ffn_up-0"
    assert "; ffn_up-0: mine recorded it wrongly and computed it rightly" in result.summary


# causes


@needs_slices("explain")
def test_the_first_layer_is_explained_from_its_output_alone(path, right):
    def stretched(rope, positions, factors=None):
        return ops.rope_angles(rope, positions * 1.3, factors)

    faulty = record(with_maths(rope_angles=stretched)(path), TOKENS, "mine")
    result = diff(right, only(faulty, "l_out", "result_output"), path)
    assert [row.tap for row in result.wrong] == ["l_out-0", "l_out-1"]
    assert list(result.diagnosis[0].taps) == ["l_out-0", "l_out-1"]


@needs_slices("explain")
def test_what_comes_nearest_is_nearer_than_the_right_op(path, right):
    noise = np.random.default_rng(5).standard_normal(right["result_norm"].shape).astype(np.float32)
    engine = changing(output_norm=lambda y: y + 1e-2 * noise)
    result = diff(right, record(engine(path), TOKENS, "mine"), path)
    [unknown] = [d for d in result.diagnosis if not d.known]
    assert all(cause.nmse < result.first_divergence.local.nmse for cause in unknown.nearest)


@needs_slices("explain")
def test_one_bug_in_two_places_is_said_once(small_model):
    """Each of the two norms has the other's weight."""
    path = small_model("qwen2", "F16")

    class Swapped(Engine):
        def norm(self, x, name):
            other = {"attn_norm": "ffn_norm", "ffn_norm": "attn_norm"}
            stem = name.removesuffix(".weight").split(".")[-1]
            return super().norm(x, name.replace(stem, other.get(stem, stem)))

    result = diff(record(Engine(path), TOKENS, "right"), record(Swapped(path), TOKENS, "mine"), path)
    assert result.summary.count("replaying that") == 1
    assert "; ffn_norm-0 likewise: it uses blk.0.attn_norm.weight for blk.0.ffn_norm.weight" in result.summary


@needs_slices("explain")
def test_unknown_causes_are_one_line(path, right):
    rng = np.random.default_rng(7)
    names = ("attn_norm-0", "Qcur_rope-1", "ffn_swiglu-1", "result_norm")
    wrong = {name.replace("-", "_"): (np.asarray(right[name]) * rng.uniform(0.5, 2, right[name].shape)).astype(
        np.float32) for name in names}  # fmt: skip
    result = diff(right, only(changed(right, **wrong), *names, "embd", "Qcur_proj", "ffn_gate", "ffn_up", "l_out",
                              "result_output"), path)  # fmt: skip
    assert [d.known for d in result.diagnosis] == [False] * 7
    assert printed(result, 120).count("known bugs") <= 2  # the sentence, and one line below it


FUSED = ("kq-", "kq_soft_max-")
STEPS = {  # what was not recorded of an attention that is wrong -> what to write next, or to look at
    ("kv_", *FUSED): "write kv_k-0 and kv_v-0 next, the rows that attention reads; a fused attention has no scores to "
    "write: check its scale, mask and heads, up to kqv_out-0",
    FUSED: "the rows that attention reads were recorded; a fused attention has no scores to write: check its scale, "
    "mask and heads, up to kqv_out-0",
    ("kq-0", "kq_soft_max-0"): "write kq-0, kq_soft_max-0 next: one of these ops is wrong, or kqv_out-0 itself",
}


@pytest.mark.parametrize("lacking", STEPS, ids=" ".join)
def test_what_an_engine_has_no_tensors_of_is_not_asked_for(lacking, path, right):
    def blurred(*args):
        return ops.attention_values(*args) * 1.2 + 0.01

    faulty = record(Engine(path, maths=SimpleNamespace(**{**vars(ops), "attention_values": blurred})), TOKENS, "mine")
    recorded = [name for name in faulty if not name.startswith(lacking)]
    result = diff(right, only(faulty, *recorded), path, how=How(diagnose=False))
    assert result.next_steps[0] == STEPS[lacking]
    assert sum(step.startswith("write ") for step in result.next_steps) == STEPS[lacking].startswith("write ")


def test_nothing_is_called_wrong_where_little_was_recorded_and_all_of_it_is_right(path, right):
    result = diff(right, only(right, "attn_norm-0", "l_out-0", "result_output"), path)
    assert result.verdict == "match"
    [step] = result.next_steps
    assert step.startswith("if the text is still wrong, look at what comes after the logits")
    assert diff(right, only(right, "attn_norm-0", "l_out-0"), path, How(partial=True)).next_steps == ()
