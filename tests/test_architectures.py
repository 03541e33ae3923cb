"""Real llama.cpp against the engine: every option of every architecture, every tap, to the last digits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from conftest import OPTIONS as SMALL
from llamaref import Engine, Weights
from small import write_model

from llamadiff import Trace, UserError, compare
from llamadiff.candidates.engine import record
from llamadiff.llamacpp.request import Settings
from llamadiff.pipeline import diff

TOKENS = (1, 17, 5, 80, 42, 9)
EXACT = 1e-11
PROJECTIONS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def scales(names, size=1):
    return {f"blk.{i}.{name}.scale": np.linspace(0.5, 0.9, size).astype(np.float32) for i in range(2) for name in names}


def biases(**sizes):
    return {
        f"blk.{i}.{name}.bias": np.linspace(-1, 1, n).astype(np.float32) for i in range(2) for name, n in sizes.items()
    }


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
OPTIONS = {
    **{kind: {"kind": kind} for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "TQ1_0")},
    "experts": {"experts": 4, "kind": "Q8_0"},
    "experts f16": {"experts": 4},
    "biases": {"bias": True},
    "all biases": {"tensors": biases(attn_output=256, ffn_gate=512, ffn_up=512, ffn_down=256)},
    "tied": {"tied": True},
    "fused qkv": {"fused_qkv": True, "bias": True},
    "explicit head size": {"heads": 2, "kv_heads": 1},
    "linear": {"extra": {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}},
    "old linear key": {"extra": {"rope.scale_linear": 4.0}},
    "scaling none": {"extra": {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}},
    "yarn": {"extra": YARN},
    "yarn attn factor": {"extra": {**YARN, "rope.scaling.attn_factor": 1.3}},
    "rope base": {"extra": {"rope.freq_base": 500000.0}},
    "frequency factors": {"tensors": {"rope_freqs.weight": np.linspace(1, 8, 32).astype(np.float32)}},
    "scales": {"kind": "Q8_0", "tensors": scales(PROJECTIONS)},
    "expert scales": {"experts": 4, "tensors": scales(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), 4)},
    "qwen2": {"arch": "qwen2", "bias": True, "kv_heads": 4},
    "qwen2 output bias": {"arch": "qwen2", "kv_heads": 4, "tensors": {"output.bias": np.ones(96, np.float32)}},
    "qwen2 yarn": {"arch": "qwen2", "kv_heads": 4, "extra": YARN},
    "qwen3": {"arch": "qwen3", "qk_norm": True},
    "qwen3moe": {"arch": "qwen3moe", "qk_norm": True, "experts": 4, "kind": "Q8_0"},
    "qwen3 quantized": {"arch": "qwen3", "qk_norm": True, "kind": "Q4_0"},
}  # fmt: skip


def judged(result):
    """Every tap of the model was recorded and is right."""
    assert not result.missing
    assert result.verdict == "match", result.summary
    for row in result.rows:
        assert row.local.nmse <= EXACT, (row.tap, row.local)
    return result


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_tap_is_exact(options, tmp_path):
    result = judged(compare(write_model(tmp_path / "m.gguf", **options), tokens=TOKENS, n_predict=2))
    assert not result.only_baseline_read
    assert not result.only_engine_read
    assert result.logits.kl < 0.01


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_a_16_bit_cache_is_exact_too(kind, small_model):
    judged(compare(small_model("qwen3", "Q8_0"), tokens=TOKENS, n_predict=2, settings=Settings(kind, kind)))


NAMES = ("llama", "moe", "qwen2", "qwen3", "qwen3moe", "stablelm", "phi3", "phi3-long", "gpt2", "gpt-oss",
         "gpt-oss-mxfp4", "deepseek2", "deepseek2-old", "mamba2")  # fmt: skip


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_is_exact(name, kind, small_model):
    judged(compare(small_model(name, kind), tokens=TOKENS, n_predict=2))


def test_flash_attention_is_noise_and_hides_the_scores(small_model):
    result = compare(small_model(), tokens=TOKENS, n_predict=2, settings=Settings("F16", "F16", flash_attn=True))
    assert result.verdict == "noise"
    assert {row.tap for row in result.rows if row.verdict == "noise"} == {"kqv_out-0", "kqv_out-1"}
    assert result.missing == ("kq-0", "kq_soft_max-0", "kq-1", "kq_soft_max-1")
    assert result.rows[7].span == ("kq-0", "kq_soft_max-0")


def test_a_quantized_cache_is_judged_with_its_rounding(small_model):
    result = compare(small_model(), tokens=TOKENS, settings=Settings("Q8_0", "Q8_0", flash_attn=True))
    assert result.verdict in ("match", "noise")


@pytest.mark.parametrize("arch", ["qwen2", "stablelm"])
def test_scales_that_the_architecture_does_not_ask_for_are_left_out(arch, tmp_path):
    options = {**SMALL[arch], "tensors": scales(("ffn_up", "ffn_gate", "ffn_down"))}
    result = compare(write_model(tmp_path / "m.gguf", **options), tokens=TOKENS)
    assert result.verdict == "match"
    assert not result.only_engine_read


def test_a_tensor_that_only_one_side_reads_is_named(small_model):
    path = small_model()
    right = record(Engine(path), TOKENS, "llama.cpp")
    read = [name for name in Weights(path) if name != "blk.0.ffn_up.weight"]
    result = diff(replace(right, producer={"name": "llama.cpp", "weights_read": read}), right, path)
    assert result.only_engine_read == ("blk.0.ffn_up.weight",)
    assert "llama.cpp does not read blk.0.ffn_up.weight" in result.summary


def replace(trace, **changes):
    return Trace(dataclasses.replace(trace.info, **changes), {name: trace[name] for name in trace}, trace.dtypes)


def test_partial_rotary_stops_llama_cpp_and_not_the_user(tmp_path):
    path = write_model(tmp_path / "m.gguf", "qwen3", qk_norm=True, extra={"rope.dimension_count": 32})
    with pytest.raises(UserError, match=r"SIGABRT.*n_embd_head == n_rot"):
        compare(path, tokens=TOKENS)


SHARED = Path(__file__).parent.parent.parent / "shared" / "models"
ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "stablelm", "phi3", "gpt2", "gpt-oss", "deepseek2", "mamba2")
RANDOM = [path for arch in ARCHITECTURES
          for path in sorted((SHARED / "random").glob(f"{arch}.*.gguf"))]  # fmt: skip
SHARED_MODELS = [SHARED / "stories260K.gguf", *RANDOM]


@pytest.mark.parametrize("path", [path for path in SHARED_MODELS if path.exists()], ids=lambda path: path.name)
def test_shared_models_are_exact(path):
    """Runs where the shared models lie beside the checkout."""
    given = {"prompt": "Once upon a time"} if path.name.startswith("stories") else {"tokens": TOKENS}
    judged(compare(path, n_predict=8, **given))
