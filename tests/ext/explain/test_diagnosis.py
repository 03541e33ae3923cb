"""The diagnosis as a whole: silence on right engines, several bugs at once, bugs that nobody knows, spans, words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from command import run
from faulty import BUGS, GateUpSwapped, NoQkNorm
from llamaref import Engine, ops
from places import ROOT
from several import CLASSES, IN_SPANS, MATHS, ON_ONE_OP, faulty

from llamadiff import Trace, compare
from llamadiff.candidates.reference import record
from llamadiff.engines.run_spec import How, Run
from llamadiff.ext.explain.registry import FAMILIES, known_bugs
from llamadiff.llamacpp.request import Settings
from llamadiff.numerics.halves import round_f16
from llamadiff.report.json import to_object
from llamadiff.trace.writer import TraceWriter
from llamadiff.verbs.verbs import diff
from llamadiff.words.diagnosis_text import clause

TOKENS = (1, 17, 5, 80, 42, 9, 33, 61)
RANDOM = ("llama.F16", "llama.Q8_0", "qwen2.F16", "qwen3.Q4_K_M", "qwen3moe.Q8_0", "stablelm.F16")


def only(trace: Trace, *patterns: str) -> Trace:
    kept = {name: trace[name] for name in trace if name.startswith(patterns)}
    return Trace(trace.info, kept, dict.fromkeys(kept, "F32"))


def judged(path: Path, engine: Engine, *patterns: str, **options):
    """A faulty engine against the right one."""
    trace = record(engine, TOKENS, "my engine")
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


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("settings", CLEAN.values(), ids=CLEAN)
def test_no_bug_is_named_on_llama_cpp_with_small_models(settings, kind, small_model, machine):
    machine.needs(settings, small_model("llama", kind))
    assert compare(small_model("llama", kind), Run(tokens=TOKENS, settings=settings)).diagnosis == ()


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


@pytest.mark.parametrize("one", MATHS)
@pytest.mark.parametrize("other", CLASSES)
def test_two_bugs_at_once_are_both_named(one, other, small_model):
    path = small_model("llama", "Q8_0")
    assert named(judged(path, faulty(path, (CLASSES[other],), MATHS[one]))) >= {one, other}


@pytest.mark.parametrize("name", ON_ONE_OP)
def test_two_bugs_on_one_op_are_both_named(name, small_model):
    result = judged(small_model(), faulty(small_model(), (), ON_ONE_OP[name]))
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
    every = judged(small_model(), faulty(small_model(), (), MATHS["rope-layout"]))
    assert "Qcur_rope and Kcur_rope in both layers" in every.summary


# constants


CONSTANTS = {
    "norm-epsilon": (3.3e-4, {"rms_norm": lambda x, w, eps: ops.rms_norm(x, w, 3.3e-4)}),
    "rope-base": (123456.0, {"rope_angles": lambda r, *rest: ops.rope_angles(replace(r, base=123456.0), *rest)}),
    "rope-scaling-applied": (3.0, {"rope_angles": lambda r, *rest: ops.rope_angles(replace(r, factor=3.0), *rest)}),
    "attention-scale-other": (0.2, {"causal_softmax": lambda s, scale, *rest: ops.causal_softmax(s, 0.2, *rest)}),
    "softcap-applied": (
        1.5,
        {"causal_softmax": lambda s, scale, *r: ops.causal_softmax(1.5 * np.tanh(s * scale / 1.5), 1.0, *r)},
    ),
    "residual-multiplied": (0.22, {"add": lambda branch, residual: np.float32(0.22) * branch + residual}),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_are_solved_for(name, small_model):
    value, maths = CONSTANTS[name]
    first = judged(small_model(), faulty(small_model(), (), maths)).diagnosis[0]
    assert [cause.name for cause in first.causes] == [name]
    assert first.causes[0].value == pytest.approx(value, rel=1e-3)


def test_the_familiar_value_stands_beside_the_one_found(small_model):
    result = judged(
        small_model(), faulty(small_model(), maths={"rms_norm": lambda x, w, eps: ops.rms_norm(x, w, 1e-6)})
    )
    assert "uses epsilon 1e-06; the file says 1e-05" in result.summary


# unlisted bugs


class _Reversed(Engine):
    """Channels of the attention output in reverse order."""

    def linear(self, x, name, tap):
        y = super().linear(x, name, tap)
        return y[..., ::-1] if name.endswith("attn_output") else y


class _Truncated(Engine):
    """The last quarter of up is zero."""

    def linear(self, x, name, tap):
        y = super().linear(x, name, tap)
        if name.endswith("ffn_up"):
            y[..., 384:] = 0
        return y


class _OneToken(Engine):
    """One token's row of a norm is doubled."""

    def norm(self, x, name):
        y = super().norm(x, name)
        if name.endswith("ffn_norm"):
            y[:, 3] *= 2
        return y


class _Shifted(Engine):
    """A constant is added to the final norm."""

    def norm(self, x, name):
        return super().norm(x, name) + np.float32(0.1 if name == "output_norm" else 0)


def _one_head(x, cos, sin):
    y = ops.rope_pairs(x, cos, sin)
    y[..., 1, :] *= np.linspace(1, 2, y.shape[-1], dtype=y.dtype)
    return y


UNLISTED = {
    "reversed": ("attn_out-0", (_Reversed,), {}, "the channels are in reverse order"),
    "truncated": ("ffn_up-0", (_Truncated,), {}, "only channels 384 to 511 are wrong"),
    "one token": ("ffn_norm-0", (_OneToken,), {}, "only token 3 is wrong"),
    "constant": ("result_norm", (_Shifted,), {}, "it is off by the constant 0.1"),
    "one head": ("Qcur_rope-0", (), {"rope_pairs": _one_head}, "only head 1 is wrong"),
}


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
@pytest.mark.parametrize("name", UNLISTED)
def test_a_bug_that_nobody_knows_is_placed_and_described(name, kind, small_model):
    tap, classes, maths, fact = UNLISTED[name]
    path = small_model("llama", kind)
    result = judged(path, faulty(path, classes, maths))
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
@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.name != "epsilon x10"], ids=lambda bug: bug.name)
def test_bugs_are_named_through_what_was_not_recorded(bug, patterns, kind, small_model):
    path = small_model(bug.arch, kind)
    result = judged(path, bug.build(path), *patterns, explain=60)
    assert result.diagnosis[0].causes[0].name == IN_SPANS[bug.name]
    assert result.diagnosis[0].causes[0].at.startswith(bug.words[0])
    assert result.diagnosis[0].nmse <= 1e-9


@pytest.mark.slow
def test_a_constant_is_solved_for_through_the_whole_model(small_model):
    maths = {"rope_angles": lambda r, *rest: ops.rope_angles(replace(r, base=123456.0), *rest)}
    result = judged(small_model(), faulty(small_model(), (), maths), "result_output", explain=60)
    assert result.diagnosis[0].causes[0].name == "rope-base"
    assert result.diagnosis[0].causes[0].value == pytest.approx(123456.0, rel=1e-3)


def test_the_whole_model_is_searched_only_when_asked(small_model):
    result = judged(small_model(), faulty(small_model(), (), MATHS["rope-layout"]), "result_output")
    assert result.diagnosis == ()
    assert any("--explain 600" in step for step in result.next_steps)


@pytest.mark.slow
def test_an_unlisted_bug_is_unknown_through_spans_too(small_model):
    result = judged(small_model(), _Reversed(small_model()), "result_output", explain=60)
    assert result.diagnosis[0].causes == ()
    assert result.diagnosis[0].nearest


# surface


def test_alternatives_are_all_named(small_model):
    """Without QK-norm or bias, multiplying before the norm and skipping the norm are one."""
    result = judged(small_model(), GateUpSwapped(small_model()), "l_out", "embd", explain=60)
    assert [cause.name for cause in result.diagnosis[0].causes] == ["gate-up-swapped", "activation-of-up"]
    assert "or it " in result.summary
    assert "this model cannot tell them apart" in result.summary
    entry = to_object(result)["diagnosis"][0]
    assert [other["cause"] for other in entry["alternatives"]] == ["activation-of-up"]


def test_words_that_hold_of_one_tap_name_it(small_model):
    """Each layer has weights of its own; both rotate alike."""
    of_weights = judged(small_model(), GateUpSwapped(small_model())).diagnosis[0]
    assert set(of_weights.taps) == {f"ffn_{word}-{layer}" for word in ("gate", "up") for layer in (0, 1)}
    assert clause(of_weights) == "multiplies by blk.0.ffn_up.weight, not blk.0.ffn_gate.weight (at ffn_gate-0)"
    of_all = judged(small_model(), faulty(small_model(), (), MATHS["rope-layout"])).diagnosis[0]
    assert len(of_all.taps) == 4
    assert clause(of_all) == of_all.causes[0].says


def test_qk_norm_is_named_on_its_own_tap(small_model):
    path = small_model("qwen3")
    first = judged(path, NoQkNorm(path)).diagnosis[0]
    assert (first.tap, first.causes[0].name, list(first.taps)[:2]) == (
        "Qcur_normed-0", "norm-missing", ["Qcur_normed-0", "Kcur_normed-0"])  # fmt: skip


def _written(trace: Trace, path: Path) -> Path:
    with TraceWriter(path) as writer:
        for name in trace:
            writer.add(name, trace[name])
        writer.finish(trace.info)
    return path


def test_the_command_says_why(small_model, tmp_path):
    path = small_model()
    right = _written(record(Engine(path), TOKENS, "engine"), tmp_path / "b.safetensors")
    wrong = record(faulty(path, (), MATHS["rope-layout"]), TOKENS, "my engine")
    trace = _written(wrong, tmp_path / "c.safetensors")
    logits = _written(only(wrong, "result_output"), tmp_path / "l.safetensors")
    for arguments in ([trace], [logits, "--explain", "600"]):
        done = run("diagnose", str(right), *map(str, arguments), "--model", str(path), "-o", "json:-")
        assert done.returncode == 1, done.stderr
        assert json.loads(done.stdout)["diagnosis"][0]["cause"] == "rope-layout"
    shown = " ".join(run("diagnose", str(right), str(trace), "--model", str(path)).stdout.split())
    assert "rope-layout: RoPE, layers 0, 1: rotates (i, i+32); this model needs (2i, 2i+1)" in shown
    assert "rotate the other layout" in shown


def test_the_bugs_are_listed():
    done = run("bugs")
    assert done.returncode == 0
    assert all(f"\n{name}" in f"\n{done.stdout}" for name in known_bugs())


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
    result = judged(path, faulty(path, maths=MATHS["residual-missing"]), *patterns, explain=20)
    assert result.first_divergence.tap == ("l_out-0" if patterns or arch == "mamba2" else "ffn_inp-0")
    assert named(result) <= {"residual-missing"}
