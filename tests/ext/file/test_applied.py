"""A LoRA adapter that is applied: by llama.cpp and the reference engine alike, or by neither without a word."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from llamaref import Engine, ModelError, Weights
from llamaref.adapters import adapted
from models.options import OPTIONS
from models.other_files import merged, write_adapter
from models.small import write_model

from llamadiff import UserError
from llamadiff.candidates.reference import record
from llamadiff.engines.model_file import ModelFile
from llamadiff.engines.run_spec import Run
from llamadiff.ext.file.opening import judge_weights
from llamadiff.ext.file.pairs import in_file
from llamadiff.ext.file.views import whole
from llamadiff.llamacpp.request import Settings
from llamadiff.llamacpp.settings_words import settings_of
from llamadiff.result.comparison import Comparison
from llamadiff.trace.reader import Trace
from llamadiff.verbs import verbs

TOKENS = (1, 17, 5, 80, 42, 9)
ALL = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "output")
LARGE = 0.02  # of B's values: what is added is as large as the products


def run(adapter: Path, scale: float = 1.0, **settings: object) -> Run:
    return Run(tokens=TOKENS, settings=Settings(lora=str(adapter), lora_scale=scale, **settings))


def own(model: Path, adapter: Path | None, scale: float = 1.0) -> Trace:
    """The reference engine's run, as a candidate."""
    weights = Weights(model)
    return record(Engine(weights if adapter is None else adapted(weights, adapter, scale)), TOKENS, "mine")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("m") / "m.gguf", layers=1)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, model) -> Path:
    return write_adapter(tmp_path_factory.mktemp("a") / "a.gguf", model, ALL, size=LARGE)


SMALL = {"layers": 1}
RIGHT = {
    "of float32": (SMALL, {}, 1.0),
    "of float16, scaled": (SMALL, {"kind": "F16"}, -0.5),
    "on a quantized model": ({**SMALL, "kind": "Q8_0"}, {"kind": "Q8_0"}, 1.0),
    "of the embedding": (SMALL, {"stems": ("token_embd",)}, 1.0),
    "of experts, with biases": (OPTIONS["gpt-oss"], {"stems": ("attn_q", "ffn_up_exps", "ffn_down_exps")}, 1.0),
}  # fmt: skip


@pytest.mark.parametrize("what", RIGHT)
def test_a_right_one_is_a_match_and_changes_the_logits(what, tmp_path):
    options, of, scale = RIGHT[what]
    model = write_model(tmp_path / "m.gguf", **options)
    adapter = write_adapter(tmp_path / "a.gguf", model, **{"stems": ALL, "size": LARGE, **of})
    result = verbs.compare(model, run(adapter, scale), save=tmp_path / "kept")
    assert (result.verdict, result.wrong) == ("match", ())
    kept, plain = Trace.open(tmp_path / "kept" / "baseline.safetensors"), own(model, None)
    assert np.square(kept["result_output"] - plain["result_output"]).mean() > 1e-3
    stated = kept.info.producer["settings"]
    assert (stated["lora"], stated["lora_scale"], len(stated["lora_sha256"])) == ("a.gguf", scale, 64)


def test_the_engine_adds_what_merging_would(adapter, tmp_path):
    """A @ B is put into the matrices themselves: another way to the same, to float32's last digits."""
    plain = write_model(tmp_path / "f32.gguf", kind="F32", layers=1)
    whole = write_model(tmp_path / "merged.gguf", kind="F32", layers=1, tensors=merged(adapter, plain, 0.5))
    apart = own(plain, adapter, 0.5)["result_output"]
    together = own(whole, None)["result_output"]
    assert np.square(apart - together).mean() < 1e-9 * np.square(together).mean()


@pytest.mark.parametrize("what", [what for what in RIGHT if what != "on a quantized model"])
def test_a_checkpoint_is_held_against_what_is_merged(what, tmp_path):
    options, of, scale = RIGHT[what]
    model = write_model(tmp_path / "m.gguf", **options)
    low = Weights(write_adapter(tmp_path / "a.gguf", model, **{"stems": ALL, "size": LARGE, **of}))
    file = ModelFile(model, settings=Settings(lora=str(tmp_path / "a.gguf"), lora_scale=scale))
    for name in file.tensors:
        plain, found = file.weights.whole(name), whole(in_file(file, name)).reshape(file.weights.shape(name))
        if f"{name}.lora_a" not in low:
            assert np.array_equal(found, plain)
            continue
        a, b = low.whole(f"{name}.lora_a"), low.whole(f"{name}.lora_b")
        sides = (a, b) if name == "token_embd.weight" else (b, a.swapaxes(-1, -2))
        own = np.einsum("...or,...ir->...oi", *sides) * (scale * 8.0 / 4)  # alpha / rank
        assert np.abs(own).max() > 1e-3
        np.testing.assert_allclose(found - plain, own, atol=1e-5)


def test_an_adapter_and_a_checkpoint_are_asked_about_otherwise(adapter, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    with pytest.raises(UserError, match=r"is a LoRA adapter, .* holds a model: llamadiff weights .*a.gguf MODEL.gguf"):
        judge_weights(adapter, tmp_path)


WRONG = {
    "left out": (None, "adapter-missing", "leaves out the adapter: the product with blk.0.attn_q.weight goes on alone"),
    "twice": (2.0, "adapter-scaled", "applies the adapter twice (1.6 B A, once, is right)"),
    "without alpha / rank": (1 / 1.6, "adapter-scaled", "scales the adapter without alpha / rank: by 1, where 1.6 is"),
    "by alpha": (5.0, "adapter-scaled", "scales the adapter by alpha, not alpha / rank: by 8, where 1.6 is right"),
    "the fraction upside down": (1 / 1.6**2, "adapter-scaled", "by rank / alpha, not alpha / rank: by 0.625, where"),
    "by anything": (1.3, "adapter-scale-other", "scales the adapter by 2.08, where 1.6 is right"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_an_engine_that_applies_it_otherwise_is_told_how(what, model, tmp_path):
    factor, cause, says = WRONG[what]
    adapter = write_adapter(tmp_path / "a.gguf", model, ALL, rank=5, size=LARGE)
    result = verbs.compare(model, run(adapter), own(model, None if factor is None else adapter, factor or 1.0))
    (found,) = result.diagnosis
    assert (result.verdict, found.tap, found.causes[0].name) == ("wrong", "Qcur_proj-0", cause)
    assert says in found.causes[0].says
    assert "add 1.6 B (A x) to the product with blk.0.attn_q.weight" in found.causes[0].fix


def test_a_trace_says_so_and_is_checked_with_the_file_beside_it(model, adapter, tmp_path):
    trace = tmp_path / "t.safetensors"
    verbs.record(model, run(adapter, 0.5), trace)
    with pytest.raises(UserError, match=r"with the adapter a\.gguf \(sha256 .*\), and is not there; put it"):
        verbs.check(trace, model)
    shutil.copy(adapter, tmp_path / "a.gguf")
    assert verbs.check(trace, model).verdict == "match"
    assert verbs.diff(trace, own(model, adapter, 0.5), model).verdict == "match"
    assert causes(verbs.diff(trace, own(model, None), model)) == ["adapter-missing"]
    with pytest.raises(UserError, match=r"adapter a\.gguf at scale 0\.5, the baseline with none .*; give"):
        verbs.diff(own(model, None), trace, model)
    with pytest.raises(UserError, match=r"a\.gguf at scale 0\.5, the baseline with a\.gguf at scale 1\.0; give"):
        verbs.compare(model, run(adapter), trace)
    write_adapter(tmp_path / "a.gguf", model)
    with pytest.raises(UserError, match=r"a\.gguf is another file \(sha256"):
        verbs.check(trace, model)


def causes(result: Comparison) -> list[str]:
    return [cause.name for found in result.diagnosis for cause in found.causes]


def test_what_llama_cpp_leaves_out_is_said(tmp_path):
    """Its code of this architecture multiplies by some weights in a way that knows no adapters."""
    model = write_model(tmp_path / "m.gguf", **OPTIONS["deepseek2"])
    adapter = write_adapter(tmp_path / "a.gguf", model, ("attn_q_a", "attn_output"), size=LARGE)
    result = verbs.compare(model, run(adapter))
    assert result.verdict == "wrong"
    assert (
        "llama.cpp leaves it out at 2 of its 4 tensors, blk.0.attn_q_a.weight, blk.1.attn_q_a.weight; merge it"
        in result.summary
    )


REFUSED = {
    "a model": (lambda path, model: model, "is no LoRA adapter"),
    "of another architecture": (lambda path, model: write_adapter(path, model, architecture="qwen2"), "of qwen2, the"),
    "of another size": (lambda path, model: write_adapter(path, write_model(path.with_name("w"), kv_heads=4)), "_b is"),
    "nothing": (lambda path, model: path, "no such file"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_one_that_does_not_fit_is_refused_in_a_line(what, model, tmp_path):
    make, says = REFUSED[what]
    with pytest.raises(ModelError, match=says):
        adapted(Weights(model), make(tmp_path / "a.gguf", model))
    with pytest.raises(UserError, match=says):
        verbs.compare(model, run(tmp_path / "a.gguf" if what != "a model" else model))


@pytest.mark.parametrize(
    ("words", "file", "scale"),
    [
        ("a.gguf", "a.gguf", 1.0),
        ("a.gguf:0.5", "a.gguf", 0.5),
        ("C:\\a.gguf:-2e1", "C:\\a.gguf", -20.0),
        ("a:b", "a:b", 1.0),
    ],
)
def test_its_words(words, file, scale):
    read = settings_of([f"threads=1,lora={words}"])
    assert (read.lora, read.lora_scale, read.threads) == (file, scale, 1)


@pytest.mark.parametrize("words", ["", ":2", "a.gguf:1e30"])
def test_words_that_it_has_not(words):
    with pytest.raises(UserError, match=r"expected FILE or FILE:SCALE"):
        settings_of([f"lora={words}"])


def test_the_file_says_rank_and_scale(adapter):
    assert "a LoRA adapter of rank 4, alpha 8.0, s = 2: give its model" in judge_weights(adapter).notes[0]
