"""Real llama.cpp against the engine: every option of every architecture, every tap, to the last digits."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from llamaref import Engine, Weights
from llamaref import ops as maths
from llamaref.models import ARCHITECTURES
from models.options import OPTIONS as SMALL
from models.random_models import NAMES
from models.small import write_model
from models.small_others import deepseek2, mamba2, phi3

from llamadiff import Trace, UserError, compare
from llamadiff.candidates.reference import record
from llamadiff.engines.run_spec import Run
from llamadiff.llamacpp.request import Settings
from llamadiff.verbs.verbs import diff
from llamadiff.verbs.verbs import record as recorded

TOKENS = (1, 17, 5, 80, 42, 9)
EXACT = 1e-11
PROJECTIONS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def gelu(x):
    """x * Phi(x), exact (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""
    wide = x.astype(np.float64)
    return np.asarray(0.5 * wide * (1 + np.vectorize(math.erf)(wide / math.sqrt(2))), x.dtype)


def scales(names, size=1):
    return {f"blk.{i}.{name}.scale": np.linspace(0.5, 0.9, size).astype(np.float32) for i in range(2) for name in names}


def biases(**sizes):
    return {
        f"blk.{i}.{name}.bias": np.linspace(-1, 1, n).astype(np.float32) for i in range(2) for name, n in sizes.items()
    }


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
OLMO2, GEMMA3 = SMALL["olmo2"], SMALL["gemma3"]
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
    "granite without scales": {"arch": "granite", "tied": True, "extra": {"logit_scale": 8.0}},
    "granite without rope": {
        **SMALL["granite"], "extra": {"rope.scaling.finetuned": False, **SMALL["granite"]["extra"]},
    },
    "granite biases": {
        **SMALL["granite"], "bias": True, "tensors": biases(attn_output=256, ffn_gate=512, ffn_up=512, ffn_down=256),
    },
    "granite frequency factors": {
        **SMALL["granite"], "tensors": {"rope_freqs.weight": np.linspace(1, 8, 32).astype(np.float32)},
    },
    "gemma quantized": {**SMALL["gemma"], "kind": "Q4_0", "kv_heads": 1},
    "gemma biases": {**SMALL["gemma"], "bias": True},
    "gemma large": {  # GELU beyond the ends of ggml's table
        **SMALL["gemma"],
        "tensors": {f"blk.{i}.ffn_norm.weight": np.linspace(0.1, 12, 256).astype(np.float32) for i in range(2)},
    },
    "gemma2 defaults": {**SMALL["gemma2"], "extra": {}},
    "gemma2 bases": {
        **SMALL["gemma2"], "extra": {**SMALL["gemma2"]["extra"], "rope.freq_base": 1e6, "rope.freq_base_swa": 5000.0},
    },
    "gemma2 yarn": {
        **SMALL["gemma2"], "extra": {**YARN, **SMALL["gemma2"]["extra"], "rope.freq_base_swa": 5000.0},
    },
    "gemma2 pattern": {
        **SMALL["gemma2"], "extra": {"attention.sliding_window": 2, "attention.sliding_window_pattern": 3},
    },
    "gemma2 27B": {
        **SMALL["gemma2"], "layers": 46, "heads": 2, "kv_heads": 1, "extra": {"attention.sliding_window": 2},
    },
    "gemma3 without window": {**GEMMA3, "layers": 2, "extra": {"rope.freq_base": 1e6}},
    "gemma3 linear": {
        **GEMMA3, "layers": 3,
        "extra": {
            **GEMMA3["extra"], "rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base_swa": 5000.0,
            "attention.sliding_window_pattern": [True, False, True],
        },
    },
    "gemma3 yarn": {
        **GEMMA3, "layers": 3,
        "extra": {
            **GEMMA3["extra"], **YARN, "rope.scaling.attn_factor": 1.3, "attention.sliding_window_pattern": 2,
        },
    },
    "gemma3 cap": {
        **GEMMA3, "layers": 2, "tied": False, "extra": {**GEMMA3["extra"], "final_logit_softcapping": 2.0},
    },
    "smollm3 yarn": {**SMALL["smollm3"], "tied": True, "extra": YARN},
    "smollm3 fused": {**SMALL["smollm3"], "fused_qkv": True, "bias": True},
    "gpt2 head": {**SMALL["gpt2"], "tied": False, "kind": "Q4_0"},
    "gpt2 large": {  # GELU beyond the ends of ggml's table
        **SMALL["gpt2"],
        "tensors": {
            **SMALL["gpt2"]["tensors"],
            **{f"blk.{i}.ffn_norm.weight": np.linspace(0.1, 12, 256).astype(np.float32) for i in range(2)},
        },
    },
    "gpt-oss mxfp4": SMALL["gpt-oss-mxfp4"],
    "gpt-oss bases": {
        **SMALL["gpt-oss"], "extra": {**SMALL["gpt-oss"]["extra"], **YARN, "rope.freq_base_swa": 5000.0},
    },
    "mamba2 one group": mamba2(n_heads=4, groups=1),
    "mamba2 narrow": mamba2(n_heads=2, width=2),
    "mamba2 tied": {**SMALL["mamba2"], "tied": True, "kind": "Q4_0"},
    "deepseek2 yarn of V2": deepseek2(absorbed=True, **{"rope.scaling.yarn_log_multiplier": 0.1}),
    "deepseek2 linear": deepseek2(
        absorbed=True, **{"rope.scaling.type": "linear", "rope.scaling.attn_factor": 1.3, "expert_weights_norm": False}
    ),
    "deepseek2 short": deepseek2(absorbed=True, **{"rope.scaling.factor": 0.5, "expert_weights_scale": 1.0}),
    "deepseek2 old sigmoid": {**deepseek2(absorbed=False, **{"expert_gating_func": 2}), "tied": True, "kind": "Q8_0"},
    "deepseek2 old linear": deepseek2(absorbed=False, **{"rope.scaling.type": "linear"}),
    "phi3 grouped": {**SMALL["phi3"], "kv_heads": 2},
    "phi3 fused": {**SMALL["phi3"], "fused_qkv": True, "extra": {"attention.sliding_window": 3}},
    "phi3 longrope": {
        **SMALL["phi3-long"],
        "extra": {**SMALL["phi3-long"]["extra"], "rope.scaling.type": "longrope", "rope.scaling.factor": 4.0},
    },
    "phi3 in part": {**phi3(n_rot=32), "tied": True},
    "phi3 yarn": {**SMALL["phi3"], "extra": YARN},
    "olmo2 without window": {**OLMO2, "extra": {}},
    "olmo2 yarn": {**OLMO2, "extra": {**YARN, "rope.scaling.attn_factor": 1.3, **OLMO2["extra"]}},
    "olmo2 pattern": {**OLMO2, "extra": {**OLMO2["extra"], "attention.sliding_window_pattern": [True, False] * 2}},
    "olmo2 fused": {**OLMO2, "fused_qkv": True, "bias": True, "kv_heads": 4},
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
    result = judged(compare(write_model(tmp_path / "m.gguf", **options), Run(tokens=TOKENS, n_predict=2)))
    assert not result.only_baseline_read
    assert not result.only_engine_read
    assert result.logits.kl < 0.01


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss", "mamba2", "deepseek2"])
@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_a_16_bit_cache_is_exact_too(kind, name, small_model):
    judged(compare(small_model(name, "Q8_0"), Run(tokens=TOKENS, n_predict=2, settings=Settings(kind, kind))))


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
@pytest.mark.parametrize("name", ["moe", *ARCHITECTURES])
def test_every_architecture_is_exact(name, kind, small_model):
    judged(compare(small_model(name, kind), Run(tokens=TOKENS, n_predict=2)))


def _with(**ops):
    return SimpleNamespace(**{**vars(maths), **ops})


FAULTS = {
    "groups ignored": ("deepseek2", {"best_groups": lambda probs, *_: probs}, "ffn_moe_topk-1"),
    "softmax for sigmoid": ("deepseek2", {"sigmoid": maths.softmax}, "ffn_moe_probs-1"),
    "halves": ("deepseek2", {"rope_pairs": maths.rope_halves}, "k_pe-0"),
    "halves, of every head": ("deepseek2-old", {"rope_pairs": maths.rope_halves}, "k_pe-0"),
    "weights not made to sum to one": ("deepseek2", {"normalize_weights": lambda w: w}, "ffn_moe_weights_norm-1"),
    "convolution turned": ("mamba2", {"causal_conv": lambda x, w: maths.causal_conv(x, w[:, ::-1])}, "ssm_conv-0"),
    "groups tiled": (
        "mamba2",
        {"ssm_scan": lambda x, dt, a, b, c, s: maths.ssm_scan(x, dt, a, b[:, :, ::-1], c[:, :, ::-1], s)},
        "ssm_scan-0",
    ),
    "step without its softplus": (
        "mamba2",
        {"ssm_scan": lambda x, dt, *r: maths.ssm_scan(x, np.log(np.expm1(np.maximum(dt, 1e-3))), *r)},
        "ssm_scan-0",
    ),
    "gate missing": ("mamba2", {"swiglu": lambda z, y: y}, "ssm_norm-0"),
    "sinks missing": ("gpt-oss", {"causal_softmax": lambda *a: maths.causal_softmax(*a[:4])}, "kq_soft_max-0"),
    "window missing, with sinks": ("gpt-oss", {"mask_window": lambda scores, *_: scores}, "kq_soft_max-0"),
    "usual SwiGLU": ("gpt-oss", {"swiglu_oai": maths.swiglu}, "ffn_moe_swiglu_oai-0"),
    "no clamp": (
        "gpt-oss",
        {"swiglu_oai": lambda g, u: g * maths.sigmoid(1.702 * g) * (u + 1)},
        "ffn_moe_swiglu_oai-0",
    ),
    "sigmoid of the chosen": ("gpt-oss", {"softmax": maths.sigmoid}, "ffn_moe_weights_softmax-0"),
    "exact GELU without a gate": ("gpt2", {"gelu": gelu}, "ffn_gelu-0"),
    "gate and up swapped": ("phi3", {"swiglu": lambda gate, up: maths.swiglu(up, gate)}, "ffn_swiglu-0"),
    "window missing": ("olmo2", {"mask_window": lambda scores, *_: scores}, "kq_soft_max-0"),
    "window one longer": ("gemma2", {"mask_window": lambda s, w, *r: maths.mask_window(s, w + 1, *r)}, "kq_soft_max-0"),
    "window one shorter": (
        "gemma3",
        {"mask_window": lambda s, w, *r: maths.mask_window(s, w - 1, *r)},
        "kq_soft_max-0",
    ),
    "cap missing": ("gemma2", {"softcap": lambda x, cap: x}, "kq_soft_max-0"),
    "exact GELU": ("gemma", {"gelu": gelu}, "ffn_geglu-0"),
    "SiLU": ("gemma3", {"gelu": maths.silu}, "ffn_geglu-0"),
    "usual scale": (
        "granite",
        {"causal_softmax": lambda s, _, *r: maths.causal_softmax(s, 0.125, *r)},
        "kq_soft_max-0",
    ),
}
SETTINGS = {
    "temperature": ("deepseek2", lambda c: replace(c, attention_scale=96**-0.5), "kq_soft_max-0"),
    "experts' scale": (
        "deepseek2",
        lambda c: replace(c, router=replace(c.router, scale=1.5)),
        "ffn_moe_weights_scaled-1",
    ),
    "short factors": ("phi3-long", lambda c: replace(c, rope=replace(c.rope, n_ctx_orig=1 << 20)), "Qcur_rope-0"),
    "one RoPE": ("gemma3", lambda c: replace(c, ropes=(c.rope,) * c.n_layer), "Qcur_rope-0"),
    "no window": ("gemma2", lambda c: replace(c, windows=(0,) * c.n_layer), "kq_soft_max-0"),
    "residual scale": ("granite", lambda c: replace(c, residual_scale=1.0), "ffn_inp-0"),
    "embedding scale": ("gemma", lambda c: replace(c, embedding_scale=1.0), "embd"),
    "logit scale": ("granite", lambda c: replace(c, logit_scale=1.0), "result_output"),
    "query scale": ("gemma2", lambda c: replace(c, attention_scale=0.1), "kq-0"),
}


@pytest.mark.parametrize(("name", "ops", "tap"), FAULTS.values(), ids=FAULTS)
def test_a_fault_in_what_an_architecture_adds_is_found(name, ops, tap, small_model):
    path = small_model(name)
    found = compare(path, TOKENS, candidate=record(Engine(path, maths=_with(**ops)), TOKENS, "faulty"))
    assert found.first_divergence.tap == tap


@pytest.mark.parametrize(("name", "change", "tap"), SETTINGS.values(), ids=SETTINGS)
def test_a_setting_of_an_architecture_that_is_not_heeded_is_found(name, change, tap, small_model):
    path = small_model(name)
    engine = Engine(path)
    engine.config = change(engine.config)
    assert compare(path, TOKENS, candidate=record(engine, TOKENS, "faulty")).first_divergence.tap == tap


def test_positions_that_are_off_by_one_are_found(small_model):
    path = small_model("gpt2")
    engine = Engine(path)
    right = engine.positions
    engine.positions = lambda positions: right(positions + 1)
    assert compare(path, TOKENS, candidate=record(engine, TOKENS, "faulty")).first_divergence.tap == "pos_embd"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_right_candidate_that_looks_nothing_up_is_right(name, small_model):
    path = small_model(name)
    assert compare(path, TOKENS, candidate=record(Engine(path), TOKENS, "right")).verdict == "match"


FLASH = Settings("F16", "F16", flash_attn=True)


def test_flash_attention_is_right_and_hides_the_scores(small_model):
    """Its sums in float16 are within the limit that follows from them."""
    result = compare(small_model(), Run(tokens=TOKENS, n_predict=2, settings=FLASH))
    assert result.verdict == "match"
    attended = [row for row in result.rows if row.tap.startswith("kqv_out")]
    assert all(row.local.nmse < row.local.limit < 1e-5 for row in attended)
    assert result.missing == ("kq-0", "kq_soft_max-0", "kq-1", "kq_soft_max-1")
    assert result.rows[7].span == ("kq-0", "kq_soft_max-0")


def test_flash_attention_that_is_off_by_a_hundredth_is_wrong(small_model, tmp_path):
    trace = recorded(small_model(), Run(tokens=TOKENS, settings=FLASH), tmp_path / "t.safetensors")
    arrays = {name: np.array(trace[name]) for name in trace}
    arrays["kqv_out-1"] *= np.float32(1.01)
    result = compare(small_model(), Run(settings=FLASH), candidate=Trace(trace.info, arrays, trace.dtypes))
    assert result.first_divergence.tap == "kqv_out-1"


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "deepseek2"])
def test_a_quantized_cache_is_judged_with_its_rounding(name, small_model):
    result = compare(small_model(name), Run(tokens=TOKENS, settings=Settings("Q8_0", "Q8_0", flash_attn=True)))
    assert result.verdict in ("match", "noise")


@pytest.mark.parametrize("arch", ["qwen2", "stablelm"])
def test_scales_that_the_architecture_does_not_ask_for_are_left_out(arch, tmp_path):
    options = {**SMALL[arch], "tensors": scales(("ffn_up", "ffn_gate", "ffn_down"))}
    result = compare(write_model(tmp_path / "m.gguf", **options), TOKENS)
    assert result.verdict == "match"
    assert not result.only_engine_read


def test_a_tensor_that_only_one_side_reads_is_named(small_model):
    path = small_model()
    right = record(Engine(path), TOKENS, "llama.cpp")
    read = [name for name in Weights(path) if name != "blk.0.ffn_up.weight"]
    result = diff(informed(right, producer={"name": "llama.cpp", "weights_read": read}), right, path)
    assert result.only_engine_read == ("blk.0.ffn_up.weight",)
    assert "llama.cpp does not read blk.0.ffn_up.weight" in result.summary


def informed(trace, **changes):
    return Trace(replace(trace.info, **changes), {name: trace[name] for name in trace}, trace.dtypes)


def test_partial_rotary_stops_llama_cpp_and_not_the_user(tmp_path):
    path = write_model(tmp_path / "m.gguf", "qwen3", qk_norm=True, extra={"rope.dimension_count": 32})
    with pytest.raises(UserError, match=r"SIGABRT.*n_embd_head == n_rot"):
        compare(path, TOKENS)


@pytest.mark.parametrize("name", [name for name in NAMES if name.partition(".")[0] in ARCHITECTURES])
def test_models_of_llama_cpps_making_are_exact(name, random_model):
    judged(compare(random_model(name), Run(tokens=TOKENS, n_predict=8)))
