"""transformers as a third opinion: right in float32 and in 16 bits, and its real differences are named."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from models.small import write_model
from optional import needs

from llamadiff import UserError, compare
from llamadiff.engines.reference_model import Model
from llamadiff.ext.pytorch import transformers as source
from llamadiff.ext.pytorch.transformers import loaded
from llamadiff.llamacpp.shipped import shipped_model
from llamadiff.trace.taps import parse

TOKENS = (1, 17, 5, 80, 42, 9, 33)
DENSE = {"ffn_gate", "ffn_up", "ffn_swiglu"}
GATED = {"llama": DENSE, "qwen2": DENSE, "qwen3": DENSE, "qwen3moe": set(), "stablelm": DENSE}


@needs("torch", "transformers")
@pytest.mark.parametrize("kind", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("arch", GATED)
def test_a_third_engine_is_right(arch, kind, small_model):
    result = compare(small_model(arch), TOKENS, candidate=f"transformers:{kind}")
    assert result.verdict == ("match" if kind == "f32" else "noise"), result.summary
    assert all(d.harmless for d in result.diagnosis)
    assert result.candidate["name"] == "transformers"
    words = {row.tap.rsplit("-", 1)[0] for row in result.rows}
    assert words >= {"embd", "attn_norm", "Qcur_proj", "Kcur_proj", "Vcur_proj", "kqv_out", "attn_out", "ffn_inp"}
    assert words >= {"ffn_norm", "ffn_out", "l_out", "result_norm", "result_output"}
    assert words >= GATED[arch]


@needs("torch", "transformers")
@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize("quantized", [False, True])
def test_it_is_right_on_the_trained_model(kind, quantized):
    result = compare(shipped_model(quantized), "Once upon a time", candidate=f"transformers:{kind}")
    assert result.verdict == ("match" if kind == "f32" else "noise"), result.summary
    assert len(result.rows) == 42
    assert {parse(tap).kind.word for tap in result.missing} == {"Qcur_rope", "Kcur_rope", "kq", "kq_soft_max"}
    assert result.extra == ()


@needs("torch", "transformers")
def test_what_it_really_does_otherwise_is_named(tmp_path):
    """transformers has no bias on qwen2's head; the file and llama.cpp do."""
    bias = {"output.bias": np.linspace(-1, 1, 96).astype(np.float32)}
    path = write_model(tmp_path / "m.gguf", "qwen2", bias=True, kv_heads=4, tensors=bias)
    result = compare(path, TOKENS, candidate="transformers:")
    assert [row.tap for row in result.wrong] == ["result_output"]
    assert result.diagnosis[0].causes[0].name == "bias-missing"
    assert "every token is off by the same vector, as when a bias is dropped" in result.profile


SPECS = {
    "transformers:f8": "no such file",
    "transformers:.@f8": "'f8' is no type",
    "transformers:/no/such": "no such file",
}


@pytest.mark.parametrize("spec", SPECS)
def test_what_is_no_model_is_said(spec, small_model):
    with pytest.raises(UserError, match=SPECS[spec]):
        compare(small_model(), TOKENS, candidate=spec)


@needs("torch", "transformers")
def test_what_cannot_be_loaded_is_said(small_model):
    with pytest.raises(UserError, match="cannot load it"):
        compare(small_model(), TOKENS, candidate="transformers:.")


@needs("torch", "transformers")
def test_what_does_not_run_is_said(small_model, monkeypatch):
    import torch

    class Model(torch.nn.Module):
        def forward(self, ids):
            return ids.ne(None)

    monkeypatch.setattr(source, "loaded", lambda *_: Model())
    with pytest.raises(UserError, match=r"cannot run it \(TypeError: ne\(\)"):
        compare(small_model(), TOKENS, candidate="transformers:")


@needs("torch", "transformers")
@pytest.mark.parametrize("of", ["a file", "a checkpoint"])
def test_what_links_lead_to_is_loaded(of, small_model, tmp_path):
    """As Hugging Face's cache has it: names are links, to files that are named by their hashes."""
    import transformers

    snapshot, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    if of == "a file":
        blobs.mkdir()
        shutil.copy(small_model("llama"), blobs / "model.gguf")
    else:
        shape = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=96, **shape))
        model.save_pretrained(blobs)
    snapshot.mkdir()
    for number, path in enumerate(sorted(blobs.iterdir())):
        (snapshot / path.name).symlink_to(path.rename(path.with_name(f"{number:064x}")))
    found = loaded(snapshot / "model.gguf" if of == "a file" else snapshot, "f32", Model(small_model("llama")).sizes)
    assert found.config.model_type == "llama"
