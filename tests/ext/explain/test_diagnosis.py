"""The diagnosis as a whole: silence on right engines, several bugs at once, bugs that nobody knows, spans, words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from command import run
from faulty import BUGS, with_maths
from llamaref import Engine
from places import ROOT
from proof.injected import BUGS as INJECTED
from proof.injected.base import together
from proof.injected.runs import record_faulty
from proof.strangers.engine import Bug
from traces import only, save

from llamadiff import compare
from llamadiff.candidates.reference import record
from llamadiff.engines.run_spec import How, Run
from llamadiff.ext.explain.registry import FAMILIES
from llamadiff.llamacpp.request import Settings
from llamadiff.numerics.halves import round_f16
from llamadiff.report.json import to_object
from llamadiff.verbs.verbs import diff
from llamadiff.words.diagnosis_text import clause

TOKENS = (1, 17, 5, 80, 42, 9, 33, 61)
RANDOM = ("llama.F16", "llama.Q8_0", "qwen2.F16", "qwen3.Q4_K_M", "qwen3moe.Q8_0", "stablelm.F16")


def judged(path: Path, wrong: Engine | Bug, *patterns: str, **options):
    """A faulty engine against the right one."""
    trace = record_faulty(wrong, path, TOKENS) if isinstance(wrong, Bug) else record(wrong, TOKENS, "mine")
    some = only(trace, *patterns) if patterns else trace
    return diff(record(Engine(path), TOKENS, "engine"), some, path, How(**options))


def named(result) -> set[str]:
    return {cause.name for d in result.diagnosis for cause in d.causes}


# right engines


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "F32"])
@pytest.mark.parametrize("arch", ["llama", "moe", "qwen2", "qwen3", "qwen3moe", "stablelm"])
def test_no_bug_is_named_on_the_right_engine(arch, kind, small_model):
    path = small_model(arch, kind)
    for patterns in ((), ("l_out", "result_output"), ("result_output",)):
        assert judged(path, Engine(path), *patterns, explain=20).diagnosis == ()


CLEAN = {
    "as it is": Settings(), "f16 cache": Settings("F16", "F16"), "flash attention": Settings(flash_attn=True),
    "repacked": Settings(repack=True),
}  # fmt: skip


@pytest.mark.parametrize("settings", CLEAN.values(), ids=CLEAN)
@pytest.mark.parametrize("name", RANDOM)
def test_no_bug_is_named_on_llama_cpp(name, settings, random_model, machine):
    path = random_model(name)
    machine.needs(settings, path)
    result = compare(path, Run(tokens=TOKENS[:6], n_predict=4, settings=settings))
    assert (result.verdict in ("match", "noise"), result.diagnosis) == (True, ())


def test_a_cache_in_float16_that_nobody_stated_is_noise(small_model):
    class HalfCache(Engine):
        def attention(self, i, q, k, v, step):
            tap = SimpleNamespace(store=lambda kind, x: round_f16(x), operands=step.tap.operands)
            return super().attention(i, q, k, v, replace(step, tap=_Stored(step.tap, tap)))

    result = judged(small_model(), HalfCache(small_model()))
    assert result.verdict == "noise"
    assert named(result) == {"cache-rounded"}
    assert all(d.harmless for d in result.diagnosis)
    assert "reads K from a cache of type F16" in result.summary
    assert {row.explained for row in result.rows if row.tap == "kq-0"} == {"reads K from a cache of type F16"}


class _Stored:
    """A tap that keeps cached rows otherwise, and records what it was given."""

    def __init__(self, tap, other):
        self.tap, self.store, self.operands, self.accumulate = tap, other.store, other.operands, tap.accumulate

    def __call__(self, name, x):
        return x if name.startswith("kv_") else self.tap(name, x)


# several bugs


# causes of which each of the first and each of the second come together -> who has them
FIRST = {
    "rope-layout": "rope: other layout", "heads-tiled": "heads tiled in scores", "mask-shifted": "mask shows the next",
    "residual-missing": "no residual", "activation-other": "ReLU",
}  # fmt: skip
SECOND = {
    "gate-up-swapped": "gate and up swapped", "norm-missing": "norm: none at the end",
    "weight-transposed": "transposed: down", "norm-other-weight": "norm: next layer's weight",
}  # fmt: skip
ON_ONE_OP = {
    "rope-layout + rope-direction": ("rope: other layout", "rope: other direction"),
    "norm-weight-twice + norm-mean-subtracted": ("norm: weight twice", "norm: LayerNorm for RMSNorm"),
    "rope-layout + rope-base": ("rope: other layout", "rope: base 500000"),
    "mask-shifted + attention-scale": ("mask shows the next", "scale missing"),
}


@pytest.mark.parametrize("one", FIRST)
@pytest.mark.parametrize("other", SECOND)
def test_two_bugs_at_once_are_both_named(one, other, small_model):
    both = together(INJECTED[FIRST[one]], INJECTED[SECOND[other]])
    assert named(judged(small_model("llama", "Q8_0"), both)) >= {one, other}


@pytest.mark.parametrize("name", ON_ONE_OP)
def test_two_bugs_on_one_op_are_both_named(name, small_model):
    result = judged(small_model(), together(*(INJECTED[each] for each in ON_ONE_OP[name])))
    causes = {frozenset(cause.name.split(" + ")) for cause in result.diagnosis[0].causes}
    assert frozenset(name.split(" + ")) in causes
    assert result.diagnosis[0].nmse <= 1e-9


def test_a_bug_in_some_layers_is_placed_there(small_model):
    class Layer1(Engine):
        def norm(self, x, name):
            y = super().norm(x, name)
            return y * self.w.vector(f"{name}.weight") if name == "blk.1.ffn_norm" else y

    result = judged(small_model(), Layer1(small_model()))
    assert [(d.causes[0].name, d.layers) for d in result.diagnosis] == [("norm-weight-twice", (1,))]
    every = judged(small_model(), BUGS[0])
    assert "Qcur_rope and Kcur_rope in both layers" in every.summary


# constants


CONSTANTS = {
    "norm-epsilon": (3.3e-4, {"epsilon": lambda e, right: 3.3e-4}),
    "rope-base": (123456.0, {"base": lambda e, right: 123456.0}),
    "rope-scaling-applied": (3.0, {"theta": lambda e, right, p: right(p / 3.0)}),
    "attention-scale-other": (0.2, {"softmax_scale": lambda e, right: 0.2}),
    "softcap-applied": (1.5, {"capped": lambda e, right, x: 1.5 * np.tanh(x / 1.5)}),
    "residual-multiplied": (0.22, {"add": lambda e, right, branch, residual: np.float32(0.22) * branch + residual}),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_are_solved_for(name, small_model):
    value, edits = CONSTANTS[name]
    first = judged(small_model(), Bug(name, edits)).diagnosis[0]
    assert [cause.name for cause in first.causes] == [name]
    assert first.causes[0].value == pytest.approx(value, rel=1e-3)


def test_the_familiar_value_stands_beside_the_one_found(small_model):
    result = judged(small_model(), INJECTED["norm: epsilon 1e-6 for 1e-5"])
    assert "uses epsilon 1e-06, where 1e-05 is right" in result.summary


# unlisted bugs


def _one_head(e, x):
    factors = np.ones(x.shape[1:], x.dtype)
    factors[1] = np.linspace(1, 2, x.shape[-1])
    return x * factors


UNLISTED = {  # the tap, what is done to its values, what is said of them
    "reversed": ("attn_out-0", lambda e, x: x[..., ::-1], "the channels are in reverse order"),
    "truncated": ("ffn_up-0", lambda e, x: x * (np.arange(x.shape[-1]) < 384), "only channels 384 to 511 are wrong"),
    "one token": ("ffn_norm-0", lambda e, x: x * (1 + (e.positions == 3)[:, None]), "only token 3 is wrong"),
    "constant": ("result_norm", lambda e, x: x + np.float32(0.1), "it is off by the constant 0.1"),
    "one head": ("Qcur_rope-0", _one_head, "only head 1 is wrong"),
}


def unlisted(name):
    tap, fault, _ = UNLISTED[name]
    return Bug(name, faults={tap.removesuffix("-0"): fault})


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
@pytest.mark.parametrize("name", UNLISTED)
def test_a_bug_that_nobody_knows_is_placed_and_described(name, kind, small_model):
    tap, _, fact = UNLISTED[name]
    result = judged(small_model("llama", kind), unlisted(name))
    first = result.diagnosis[0]
    assert (result.first_divergence.tap, first.tap, first.causes) == (tap, tap, ())
    assert fact in result.profile
    assert len({cause.name for cause in first.nearest}) == len(first.nearest) <= 3
    assert all(1e-6 < cause.nmse < first.right[tap] for cause in first.nearest)
    assert "none of the" in result.summary
    entry = to_object(result)["diagnosis"][0]
    assert (entry["cause"], entry["known"], len(entry["nearest"])) == ("unknown", False, len(first.nearest))


# spans


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
@pytest.mark.parametrize("patterns", [("embd", "l_out", "result_output"), ("result_output",)], ids=["l_out", "logits"])
@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.cause != "norm-epsilon"], ids=lambda bug: bug.name)
def test_bugs_are_named_through_what_was_not_recorded(bug, patterns, kind, small_model):
    result = judged(small_model(bug.models[0], kind), bug, *patterns, explain=60)
    assert result.diagnosis[0].causes[0].name == bug.cause
    assert result.diagnosis[0].causes[0].at.startswith(bug.words[0])
    assert result.diagnosis[0].nmse <= 1e-9


@pytest.mark.slow
def test_a_constant_is_solved_for_through_the_whole_model(small_model):
    result = judged(small_model(), Bug("base", CONSTANTS["rope-base"][1]), "result_output", explain=60)
    assert result.diagnosis[0].causes[0].name == "rope-base"
    assert result.diagnosis[0].causes[0].value == pytest.approx(123456.0, rel=1e-3)


def test_the_whole_model_is_searched_only_when_asked(small_model):
    result = judged(small_model(), BUGS[0], "result_output")
    assert result.diagnosis == ()
    assert any("--explain 600" in step for step in result.next_steps)


@pytest.mark.slow
def test_an_unlisted_bug_is_unknown_through_spans_too(small_model):
    result = judged(small_model(), unlisted("reversed"), "result_output", explain=60)
    assert result.diagnosis[0].causes == ()
    assert result.diagnosis[0].nearest


# surface


def test_alternatives_are_all_named(small_model):
    """Without QK-norm or bias, multiplying before the norm and skipping the norm are one."""
    result = judged(small_model(), INJECTED["gate and up swapped"], "l_out", "embd", explain=60)
    assert [cause.name for cause in result.diagnosis[0].causes] == ["gate-up-swapped", "activation-of-up"]
    assert "or it " in result.summary
    assert "this model cannot tell them apart" in result.summary
    entry = to_object(result)["diagnosis"][0]
    assert [other["cause"] for other in entry["alternatives"]] == ["activation-of-up"]


def test_words_that_hold_of_one_tap_name_it(small_model):
    """Each layer has weights of its own; both rotate alike."""
    of_weights = judged(small_model(), INJECTED["gate and up swapped"]).diagnosis[0]
    assert set(of_weights.taps) == {f"ffn_{word}-{layer}" for word in ("gate", "up") for layer in (0, 1)}
    assert clause(of_weights) == "multiplies by blk.0.ffn_up.weight, not blk.0.ffn_gate.weight (at ffn_gate-0)"
    of_all = judged(small_model(), BUGS[0]).diagnosis[0]
    assert len(of_all.taps) == 4
    assert clause(of_all) == of_all.causes[0].says


def test_a_norm_is_called_by_its_name(small_model):
    class NoMean(Engine):
        def layer_norm(self, x, name):
            return super().layer_norm(x + (1 if name == "output_norm" else 0), name) + (name == "output_norm")

    result = judged(small_model("stablelm"), NoMean(small_model("stablelm")))
    assert [row.tap for row in result.wrong] == ["result_norm"]
    assert "LayerNorm by output_norm.weight" in result.summary


def test_the_command_says_why(small_model, tmp_path):
    path = small_model()
    right = save(record(Engine(path), TOKENS, "engine"), tmp_path / "b.safetensors")
    wrong = record_faulty(BUGS[0], path, TOKENS)
    trace = save(wrong, tmp_path / "c.safetensors")
    logits = save(only(wrong, "result_output"), tmp_path / "l.safetensors")
    for arguments in ([trace], [logits, "--explain", "600"]):
        done = run("diff", str(right), *map(str, arguments), "--model", str(path), "-o", "json:-")
        assert done.returncode == 1, done.stderr
        assert json.loads(done.stdout)["diagnosis"][0]["cause"] == "rope-layout"
    shown = " ".join(run("diff", str(right), str(trace), "--model", str(path)).stdout.split())
    assert "RoPE, layers 0, 1: rotates (i, i+32); this model needs (2i, 2i+1)" in shown
    assert "rotate (2i, 2i+1)" in shown


def test_every_file_of_bugs_is_registered():
    files = {path.stem for path in (ROOT / "llamadiff/ext/explain/bugs").glob("[!_]*.py")}
    assert files == set(FAMILIES)


# other architectures


@pytest.mark.parametrize("patterns", [(), ("embd", "l_out", "result_output")], ids=["every tap", "l_out"])
@pytest.mark.parametrize(
    "arch",
    ["olmo2", "smollm3", "granite", "gemma", "gemma2", "gemma3", "phi3", "gpt2", "gpt-oss", "mamba2", "deepseek2"],
)
def test_other_architectures_are_diagnosed_or_left_unknown(arch, patterns, small_model):
    path = small_model(arch)
    assert judged(path, Engine(path), *patterns, explain=20).diagnosis == ()
    result = judged(path, with_maths(add=lambda branch, residual: branch)(path), *patterns, explain=20)
    assert result.first_divergence.tap == ("l_out-0" if patterns or arch == "mamba2" else "ffn_inp-0")
    assert named(result) <= {"residual-missing"}
