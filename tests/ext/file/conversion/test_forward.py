"""The original checkpoint runs beside llama.cpp: what the file holds otherwise is laid to the file, by its tensor."""

from __future__ import annotations

import numpy as np
import pytest
from ext.file.conversion.converter import convert
from models.gguf_file import read_gguf, write_gguf
from optional import needs

from llamadiff import compare

TOKENS = (1, 17, 5, 80, 42, 9, 33)
pytestmark = needs("torch", "transformers")


def run(checkpoint, architecture, path, kind, mistake=None):
    folder = checkpoint(architecture)
    file = convert(folder, architecture, path / "m.gguf", kind, mistake)
    return compare(file, TOKENS, candidate=f"transformers:{folder}")


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_K_M"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "stablelm", "qwen3moe"])
def test_the_original_is_right_whatever_the_file_is_quantized_to(architecture, kind, checkpoint, tmp_path):
    result = run(checkpoint, architecture, tmp_path, kind)
    assert result.verdict == "match", result.summary
    assert max(row.local.nmse for row in result.rows if row.local is not None) < 1e-11
    assert "judged by the weights of" in result.summary
    assert "what rounding in products explains" not in result.summary


BLAMED = {
    ("llama", "head-count"): "the file's blk.0.attn_k.weight: is permuted with 8 heads; the model has 2",
    ("llama", "permutation-missing"): "the file's blk.0.attn_q.weight: is not permuted",
    ("qwen2", "gate-up-swapped"): "the file's blk.0.ffn_gate.weight: gate and up are swapped",
    ("qwen2", "rope-base"): "the file's qwen2.rope.freq_base: is not in the file: llama.cpp takes 10000",
    ("qwen3", "epsilon"): "the file's qwen3.attention.layer_norm_rms_epsilon: is 0.001",
    ("llama", "rope-scaling"): "the file's rope_freqs.weight: is missing",
    ("qwen3moe", "expert-order"): "the file's blk.0.ffn_gate_exps.weight: the experts are in another order",
    ("stablelm", "head-is-embedding"): "the file's output.weight: is the embedding",
    ("llama", "tied-head"): "the file's output.weight: is missing",
}


@pytest.mark.parametrize(("architecture", "mistake"), BLAMED)
@pytest.mark.parametrize("kind", ["F16", "Q4_K_M"])
def test_the_file_is_blamed_and_not_the_engine(architecture, mistake, kind, checkpoint, tmp_path):
    result = run(checkpoint, architecture, tmp_path, kind, mistake)
    assert result.verdict == "wrong"
    assert f"before any layer, {BLAMED[architecture, mistake]}" in result.summary
    assert result.wrong == ()
    assert result.diagnosis == ()
    assert "recorded of transformers is right" in result.summary
    assert not any("sampling" in step for step in result.next_steps)


def test_what_is_wrong_with_the_file_is_not_called_odd_besides(checkpoint, tmp_path):
    folder = checkpoint("qwen2")
    fields, tensors = read_gguf(convert(folder, "qwen2", tmp_path / "m.gguf", "F32"))
    for layer in (0, 1):
        bias, kind = tensors[f"blk.{layer}.attn_k.bias"]
        tensors[f"blk.{layer}.attn_k.bias"] = (np.full_like(bias, layer), kind)
    zeros = write_gguf(tmp_path / "zeros.gguf", fields, tensors, "qwen2")
    result = compare(zeros, TOKENS, candidate=f"transformers:{folder}")
    assert "the file's blk.0.attn_k.bias: all values are zero; -" in result.summary
    assert not any("blk.0.attn_k.bias" in step for step in result.next_steps)


def test_a_fault_of_the_engine_is_still_its_own(checkpoint, tmp_path, monkeypatch):
    """Its own epsilon, beside a file that is right."""
    from llamadiff.ext.pytorch import transformers

    right = transformers.loaded

    def spoiled(*arguments):
        model = right(*arguments)
        model.model.layers[1].input_layernorm.variance_epsilon = 0.1
        return model

    monkeypatch.setattr(transformers, "loaded", spoiled)
    result = run(checkpoint, "llama", tmp_path, "Q4_K_M")
    assert [row.tap for row in result.wrong] == ["attn_norm-1"]
    assert "epsilon" in result.summary
    assert "the file's" not in result.summary.split("; the candidate was judged")[0]
