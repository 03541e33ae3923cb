"""A LoRA adapter by itself, and beside the model that it is for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from models.gguf_file import read_gguf, write_gguf
from models.other_files import ADAPTED, merged, write_adapter
from models.small import write_model

from llamadiff.ext.file.opening import judge_weights

Q = "blk.0.attn_q.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("m") / "m.gguf")


@pytest.mark.parametrize("stems", [ADAPTED, ("token_embd", "output"), ("attn_k",)])
def test_one_that_fits_has_no_finding(stems, model, tmp_path):
    adapter = write_adapter(tmp_path / "a.gguf", model, tuple(stem for stem in stems if stem != "token_embd"))
    if "token_embd" in stems:
        adapter = changed(
            adapter, **{"token_embd.weight.lora_a": small(96, 4), "token_embd.weight.lora_b": small(256, 4)}
        )
    for report in (judge_weights(adapter), judge_weights(adapter, model), judge_weights(model, adapter)):
        assert (report.verdict, report.oddities) == ("match", ())
    assert "it adds to" in judge_weights(adapter, model).notes[-1]


def small(*shape: int) -> np.ndarray:
    return 0.01 * np.random.default_rng(2).standard_normal(shape).astype(np.float32)


def changed(path: Path, arch: str = "llama", **tensors: np.ndarray | None) -> Path:
    """An adapter with other tensors, or without some."""
    fields, held = read_gguf(path)
    held = {name: each for name, each in {**held, **tensors}.items() if each is not None}
    return write_gguf(path.with_name("changed.gguf"), fields, held, arch)


WRONG = {
    "a half is missing": ({f"{Q}.lora_b": None}, Q, "has no .lora_b: llama.cpp refuses the adapter"),
    "two ranks": ({f"{Q}.lora_a": small(5, 256)}, Q, "lora_a has 5 rows, lora_b rows of 4: both are the rank"),
    "of another size": ({f"{Q}.lora_b": small(255, 4)}, Q, "lora_b is [255, 4], the model's matrix is [256, 256]"),
    "of another model": (
        {"blk.9.attn_q.weight.lora_a": small(4, 256), "blk.9.attn_q.weight.lora_b": small(256, 4)},
        "blk.9.attn_q.weight",
        "is in no tensor of the model: llama.cpp refuses the adapter",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_one_that_does_not_fit_says_where(what, model, tmp_path):
    tensors, where, says = WRONG[what]
    adapter = changed(write_adapter(tmp_path / "a.gguf", model), **tensors)
    report = judge_weights(adapter, model)
    assert report.verdict == "wrong"
    assert (where, says) in {(finding.where, finding.says) for finding in report.findings}


def test_another_architecture_and_a_missing_alpha_are_said(model, tmp_path):
    adapter = write_adapter(tmp_path / "a.gguf", model, architecture="qwen2")
    assert {finding.where for finding in judge_weights(adapter, model).findings} == {"general.architecture"}
    (suspicion,) = judge_weights(write_adapter(tmp_path / "b.gguf", model, alpha=0.0)).suspicions
    assert "adapter.lora.alpha is 0.0: llama.cpp then adds B A" in suspicion.says
    large = judge_weights(write_adapter(tmp_path / "c.gguf", model, ("attn_q",), size=1.0), model)
    assert {each.where for each in large.suspicions} == {Q, "blk.1.attn_q.weight"}


def test_zeros_of_an_adapter_are_suspicious_and_no_more(model, tmp_path):
    """As one has that was made and not trained."""
    adapter = changed(write_adapter(tmp_path / "a.gguf", model), **{f"{Q}.lora_b": np.zeros((256, 4), np.float32)})
    report = judge_weights(adapter, model)
    assert (report.verdict, [each.where for each in report.suspicions]) == ("match", [f"{Q}.lora_b"])


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_one_that_was_merged_is_named_by_its_rank(scale, model, tmp_path):
    adapter = write_adapter(tmp_path / "a.gguf", model, ("attn_q",))
    into = write_model(tmp_path / "merged.gguf", tensors=merged(adapter, model, scale))
    findings = judge_weights(into, model).findings
    assert {each.where for each in findings} == {Q, "blk.1.attn_q.weight"}
    assert all("differs by a matrix of rank 4, " in each.says for each in findings)
