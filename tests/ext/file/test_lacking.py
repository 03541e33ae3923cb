"""Two files, of which one lacks a key: what decides an output is a difference, what llama.cpp takes anyway is none."""

from __future__ import annotations

import numpy as np
import pytest
from models.gguf_file import read_gguf, write_gguf
from models.small import write_model
from optional import needs_slices

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.file.lacking import REFUSED, lacking
from llamadiff.ext.file.opening import judge_weights

LLAMA = {
    "block_count": 1, "embedding_length": 64, "context_length": 32, "feed_forward_length": 64,
    "attention.head_count": 2, "attention.layer_norm_rms_epsilon": (1e-5, 6),
}  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "key", "value", "decides", "takes"),
    [
        ("llama", "rope.freq_base", 5e5, True, "llama.cpp takes 10000"),
        ("llama", "rope.freq_base", 1e4, False, ""),
        ("llama", "attention.head_count_kv", 1, True, "llama.cpp takes 2"),
        ("llama", "attention.head_count_kv", 2, False, ""),
        ("llama", "rope.scaling.type", "linear", False, ""),
        ("granite", "attention.scale", 0.5, True, "llama.cpp takes 0.1767767"),
        ("gemma2", "final_logit_softcapping", 30.0, False, ""),
        ("gemma2", "final_logit_softcapping", 20.0, True, "llama.cpp takes 30"),
        ("gemma2", "rope.freq_base_swa", 5e5, True, "llama.cpp takes 10000"),
        ("llama", "feed_forward_length", 64, None, ""),  # read of no forward pass
        ("llama", "pooling_type", 1, True, "llama.cpp takes none"),
        ("llama", "pooling_type", 0, False, "llama.cpp takes none"),
        ("xverse", "rope.freq_base", 5e5, True, "llama.cpp takes 10000"),  # the table's
        ("xverse", "rope.freq_base", 1e4, False, "llama.cpp takes 10000"),
        ("xverse", "some.other", 3, None, ""),
        ("dots1", "expert_weights_norm", True, True, "llama.cpp takes False"),
        ("deepseek2", "expert_gating_func", 1, False, "llama.cpp takes softmax"),
    ],
)  # fmt: skip
def test_what_llama_cpp_takes(tmp_path, arch, key, value, decides, takes):
    metadata = {f"{arch}.{name}": each for name, each in LLAMA.items() if name != key}
    file = ModelFile(write_gguf(tmp_path / "m.gguf", metadata, arch=arch))
    found = lacking(file, f"{arch}.{key}", value, lambda: False)
    assert (found.decides, found.takes) == (decides, takes)
    refused = lacking(file, f"{arch}.{key}", value, lambda: True)
    assert (refused.takes == REFUSED) is bool(decides)


def test_two_files_of_which_one_lacks_a_key(tmp_path):
    a = write_model(tmp_path / "a.gguf", extra={"rope.freq_base": 5e5})
    b = write_model(tmp_path / "b.gguf")
    says = "is not in b.gguf: llama.cpp takes 10000; a.gguf has 500000; convert b.gguf again"
    for one, other in ((a, b), (b, a)):
        assert [(each.where, each.says) for each in judge_weights(one, other).findings] == [
            ("llama.rope.freq_base", says)
        ]
    same = write_model(tmp_path / "same.gguf", extra={"rope.freq_base": 1e4})
    assert judge_weights(same, b).oddities == ()


def test_factors_of_rope_that_one_file_lacks(tmp_path):
    factors = {"rope_freqs.weight": np.full(8, 2, np.float32)}
    a, b = write_model(tmp_path / "a.gguf", tensors=factors), write_model(tmp_path / "b.gguf")
    says = "is not in b.gguf: llama.cpp then scales no frequency of RoPE; a.gguf has it; convert b.gguf again"
    for one, other in ((a, b), (b, a)):
        assert [(each.where, each.says) for each in judge_weights(one, other).findings] == [("rope_freqs.weight", says)]
    assert judge_weights(a, a).oddities == ()


def test_files_of_one_name_are_told_apart(tmp_path):
    (tmp_path / "old").mkdir()
    a = write_model(tmp_path / "m.gguf", extra={"rope.freq_base": 5e5})
    b = write_model(tmp_path / "old/m.gguf")
    (found,) = judge_weights(a, b).findings
    assert found.says.endswith(f"{a} has 500000; convert {b} again")


BPE = {
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": ["a", "b", *"cdefghijkl"],
    "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.eos_token_id": 3, "tokenizer.ggml.bos_token_id": 4,
    "tokenizer.chat_template": "{{ a }}\n",
}  # fmt: skip
TEMPLATE = "tokenizer.chat_template"


@needs_slices("prompt")
@pytest.mark.parametrize(
    ("changed", "where", "says"),
    [
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre",
         "is not in b.gguf: llama.cpp takes 'default'; a.gguf has 'qwen2'; convert b.gguf again"),
        ({"tokenizer.ggml.eos_token_id": None}, "tokenizer.ggml.eos_token_id",
         "is not in b.gguf: llama.cpp takes 11; a.gguf has 3; convert b.gguf again"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges",
         "is not in b.gguf: llama.cpp does not load it; a.gguf has ['a b']; convert b.gguf again"),
        ({"tokenizer.ggml.add_bos_token": True}, "tokenizer.ggml.add_bos_token",
         "is not in a.gguf: llama.cpp takes False; b.gguf has True; convert a.gguf again"),
        ({"tokenizer.ggml.bos_token_id": None}, "", ""),  # it is put nowhere
        ({"tokenizer.ggml.add_bos_token": False}, "", ""),
        ({"tokenizer.ggml.scores": ([0.5] * 12, 9, 6)}, "", ""),  # BPE reads none
        ({TEMPLATE: None}, TEMPLATE, "is not in b.gguf: llama.cpp takes ChatML for chats; a.gguf has one; convert "
         "again the one that is not the checkpoint's"),
        ({TEMPLATE: "{{ a }}"}, "", ""),  # Jinja drops the newline
        ({TEMPLATE: "{{ a }}\n{{ '\\n' }}\n"}, TEMPLATE,
         "parts at line 1: `{{ a }}` in a.gguf, `{{ a }}\n{{ '\\n' }}` in b.gguf; convert again the one"),
        ({TEMPLATE: "{{ b }}\n"}, TEMPLATE, "parts at line 1: `{{ a }}` in a.gguf, `{{ b }}` in b.gguf; convert again"),
    ],
)  # fmt: skip
def test_tokenizers_of_which_one_lacks_a_key(tmp_path, changed, where, says):
    fields, tensors = read_gguf(write_model(tmp_path / "plain.gguf"))
    other = {key: value for key, value in {**BPE, **changed}.items() if value is not None}
    a, b = (
        write_gguf(tmp_path / f"{name}.gguf", {**fields, **own}, tensors) for name, own in (("a", BPE), ("b", other))
    )
    for one, another in ((a, b), (b, a)):
        found = [each for each in judge_weights(one, another).findings if each.where.startswith("tokenizer")]
        assert [each.where for each in found] == [where] * bool(where)
    if where:
        (found,) = judge_weights(a, b).findings
        assert found.says.startswith(says)
