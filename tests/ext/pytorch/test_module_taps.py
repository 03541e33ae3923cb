"""Modules are found by the tensors that they become in a file; what is changed in one is named."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from llamaref import Weights
from llamaref.known_tensors import usual_names
from models.options import OPTIONS
from models.small import write_model
from optional import needs

from llamadiff import compare
from llamadiff.ext.pytorch import transformers as source
from llamadiff.trace.taps import parse

pytestmark = needs("torch", "transformers")
TOKENS = (1, 17, 5, 80)  # as many as heads: by shapes alone nobody tells which axis is which
# architecture -> transformers' name, what its config says, and what the small model has otherwise than OPTIONS
CONFIGS = {
    "granite": (
        "Granite",
        {"attention_multiplier": 0.1, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 6.0},
        {},
    ),
    "olmo2": ("Olmo2", {}, {"layers": 2, "extra": {}}),
    "gemma2": (
        "Gemma2",
        {"sliding_window": 3, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
         "query_pre_attn_scalar": 64},
        {"layers": 2},
    ),
    "gemma3": ("Gemma3Text", {"query_pre_attn_scalar": 64, "sliding_window": 3}, {"layers": 2}),
    "command-r": (  # llama.cpp's graph judges it, and its file is quantized
        "Cohere",
        {"logit_scale": 0.5},
        {"arch": "command-r", "kind": "Q8_0", "tied": True, "drop": ("ffn_norm",),
         "extra": {"logit_scale": 0.5, "rope.freq_base": 500000.0, "attention.layer_norm_epsilon": 1e-5}},
    ),
    "olmo": (  # whose norms have no weights
        "Olmo",
        {},
        {"arch": "olmo", "drop": ("attn_norm", "ffn_norm", "output_norm"),
         "extra": {"attention.layer_norm_epsilon": 1e-5}},
    ),
}  # fmt: skip
PERMUTED = ("granite", "olmo")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """architecture -> a small file, and a checkpoint that a converter would make it of."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def make(arch):
        path = write_model(folder / f"{arch}.gguf", **{**OPTIONS.get(arch, {}), **CONFIGS[arch][2]})
        return path, checkpoint_of(path, arch, folder / arch)

    return cache(make)


def checkpoint_of(path, arch, folder):
    """A checkpoint with the tensors of a file; where that is quantized, with what quantization might have lost."""
    import torch
    import transformers

    kind, stated, _ = CONFIGS[arch]
    file = Weights(path)
    rows, width = file.shape("token_embd.weight")
    heads = file.fields[f"{arch}.attention.head_count"]
    dim = file.shape("blk.0.attn_q.weight")[0] // heads
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=rows, hidden_size=width, intermediate_size=file.shape("blk.0.ffn_down.weight")[1],
        num_hidden_layers=file.fields[f"{arch}.block_count"], num_attention_heads=heads,
        num_key_value_heads=file.shape("blk.0.attn_k.weight")[0] // dim, head_dim=dim,
        rms_norm_eps=1e-5, layer_norm_eps=1e-5, tie_word_embeddings="output.weight" not in file, **stated,
    )  # fmt: skip
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)
    usual = usual_names(arch, config.num_hidden_layers)
    lost = np.random.default_rng(1)
    for name, values in model.named_parameters():
        tensor = usual(name)
        own = file.whole(tensor).copy()
        if arch in PERMUTED and (".attn_q." in tensor or ".attn_k." in tensor):
            own = own.reshape(-1, dim // 2, 2, width).swapaxes(1, 2).reshape(own.shape)
        if arch.startswith("gemma") and "norm" in tensor:
            own = own - 1
        if file.type(tensor) == "Q8_0":
            own = own + 0.003 * own.std() * lost.standard_normal(own.shape, np.float32)
        values.data = torch.from_numpy(np.ascontiguousarray(own))
    model.save_pretrained(folder)
    return folder


WORDS = {"embd", "kqv_out", "attn_out", "ffn_inp", "ffn_out", "l_out", "result_norm", "result_output"}
ALSO = {
    "granite": {"attn_norm", "ffn_norm", "Qcur_proj"},
    "olmo2": {"Qcur_normed", "attn_post_norm", "ffn_post_norm"},
    "gemma2": {"attn_norm", "attn_post_norm", "ffn_norm", "ffn_post_norm"},
    "gemma3": {"attn_norm", "attn_post_norm", "ffn_norm", "ffn_post_norm", "Qcur_normed", "Kcur_normed"},
    "command-r": {"attn_norm", "Qcur_proj"},
    "olmo": {"attn_norm", "ffn_norm"},
}
LACKS = {"command-r": {"ffn_inp"}, "olmo": {"embd", "ffn_inp", "l_out"}}


@pytest.mark.parametrize("arch", CONFIGS)
def test_a_right_checkpoint_is_right(arch, pair):
    path, folder = pair(arch)
    result = compare(path, TOKENS, candidate=f"transformers:{folder}")
    assert result.verdict == "match", result.summary
    words = {parse(row.tap).kind.word if parse(row.tap) else row.tap for row in result.rows}
    assert words >= WORDS - LACKS.get(arch, set()) | ALSO[arch]


def _epsilon(model):
    for layer in model.model.layers:
        layer.post_attention_layernorm.variance_epsilon = 0.1


def _norm_bypassed(model):
    import torch

    model.model.layers[1].post_feedforward_layernorm = torch.nn.Identity()


def _base(model):
    rope = model.model.rotary_emb
    rope.inv_freq = rope.inv_freq**1.2


def _no_scale(model):
    model.model.embedding_multiplier = 1.0


def _no_cap(model):
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = None


def _head_scale(model):
    model.logit_scale = 1.0


def _q_norm(model):
    model.model.layers[0].self_attn.q_norm.forward = lambda x: x


BUGS = {
    "epsilon": ("granite", _epsilon, "ffn_norm-0", "epsilon"),
    "embedding scale": ("granite", _no_scale, "embd", "does not multiply by 12"),
    "RoPE base": ("olmo2", _base, "kqv_out-0", "base"),
    "QK-norm": ("gemma3", _q_norm, "Qcur_normed-0", "norm"),
    "soft cap": ("gemma2", _no_cap, "kqv_out-0", "cap"),
    "post norm": ("gemma2", _norm_bypassed, "l_out-1", "norm"),
    "logit scale": ("command-r", _head_scale, "result_output", "multipl"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_what_is_changed_in_the_model_is_wrong_there(bug, pair, monkeypatch):
    arch, spoil, tap, says = BUGS[bug]
    path, folder = pair(arch)
    right = source.loaded

    def loaded(*given):
        model = right(*given)
        spoil(model)
        return model

    monkeypatch.setattr(source, "loaded", loaded)
    result = compare(path, TOKENS, candidate=f"transformers:{folder}")
    assert result.verdict == "wrong"
    assert result.wrong[0].tap == tap
    assert says in result.summary.lower()
