"""The vocabulary: the whole ordered list of each architecture is pinned, and llama.cpp's nodes find their taps."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from llamadiff.candidates.reference import record
from llamadiff.engines.reference_model import Model
from llamadiff.llamacpp.tap_names import tap_name, tap_of
from llamadiff.trace import taps

DENSE = """attn_norm Qcur_proj Kcur_proj Vcur_proj Qcur_rope Kcur_rope kv_k kv_v kq kq_soft_max kqv_out attn_out
           ffn_inp ffn_norm ffn_gate ffn_up ffn_swiglu ffn_out l_out"""
QWEN3 = DENSE.replace("Vcur_proj", "Vcur_proj Qcur_normed Kcur_normed")
MOE = DENSE.replace(
    "ffn_gate ffn_up ffn_swiglu",
    "ffn_moe_logits ffn_moe_probs ffn_moe_topk ffn_moe_weights ffn_moe_weights_norm ffn_moe_gate ffn_moe_up "
    "ffn_moe_swiglu ffn_moe_down",
)

QWEN3_MOE = MOE.replace("Vcur_proj", "Vcur_proj Qcur_normed Kcur_normed")


def with_post_norms(layer):
    return layer.replace("attn_out", "attn_out attn_post_norm").replace("ffn_out", "ffn_out ffn_post_norm")


OLMO2 = with_post_norms(QWEN3).replace("attn_norm ", "").replace("ffn_norm ", "")
NO_ROPE = DENSE.replace("Qcur_rope Kcur_rope ", "")
GEGLU = DENSE.replace("swiglu", "geglu")
GPT2 = NO_ROPE.replace("ffn_gate ffn_up ffn_swiglu", "ffn_up ffn_gelu")
PHI3 = DENSE.replace("ffn_gate ", "")
GPT_OSS = (
    MOE.replace("ffn_norm", "attn_post_norm")
    .replace("ffn_moe_probs ", "")
    .replace("weights_norm", "weights_softmax")
    .replace("swiglu", "swiglu_oai")
)
MAMBA2 = "attn_norm ssm_in ssm_conv ssm_dt ssm_scan mamba2_y_add_d ssm_norm mamba_out l_out"
LATENT = "attn_norm q_a q_a_norm q_b kv_cmpr_pe kv_cmpr k_pe q_pe q_nope_absorbed kq kq_soft_max kqv kqv_mla kqv_out "
LATENT_OLD = "attn_norm Qcur_proj kv_cmpr_pe kv_cmpr k_pe kv Qcur_rope kv_k kv_v kq kq_soft_max kqv_out "
DENSE_END = "attn_out ffn_inp ffn_norm ffn_gate ffn_up ffn_swiglu ffn_out l_out"
MOE_END = """attn_out ffn_inp ffn_norm ffn_moe_logits ffn_moe_probs ffn_moe_topk ffn_moe_weights ffn_moe_gate ffn_moe_up
             ffn_moe_swiglu ffn_moe_down ffn_gate_shexp ffn_up_shexp ffn_swiglu ffn_shexp ffn_out l_out"""
MOE_END_V3 = MOE_END.replace("probs", "probs ffn_moe_probs_biased").replace(
    "weights", "weights ffn_moe_weights_norm ffn_moe_weights_scaled"
)
LAYERS = {
    "llama": [DENSE] * 2,
    "qwen2": [DENSE] * 2,
    "stablelm": [DENSE] * 2,
    "qwen3": [QWEN3] * 2,
    "moe": [MOE] * 2,
    "qwen3moe": [QWEN3_MOE] * 2,
    "granite": [DENSE] * 2,
    "olmo2": [OLMO2] * 4,
    "gemma": [GEGLU] * 2,
    "gemma2": [with_post_norms(GEGLU)] * 3,
    "gemma3": [with_post_norms(QWEN3.replace("swiglu", "geglu"))] * 7,
    "gpt2": [GPT2] * 2,
    "gpt-oss": [GPT_OSS] * 2,
    "mamba2": [MAMBA2] * 2,
    "deepseek2": [LATENT + DENSE_END, LATENT + MOE_END_V3],
    "deepseek2-old": [LATENT_OLD + DENSE_END, LATENT_OLD + MOE_END],
    "phi3": [PHI3] * 2,
    "smollm3": [DENSE, DENSE, DENSE, NO_ROPE, DENSE],
}


@pytest.mark.parametrize(("name", "layers"), LAYERS.items(), ids=LAYERS)
def test_the_taps_of_each_architecture_in_order(name, layers, small_model):
    layers = [f"{word}-{i}" for i, layer in enumerate(layers) for word in layer.split()]
    before = ["embd", "pos_embd", "inpL"] if name == "gpt2" else ["embd"]
    expected = [*before, *layers, "result_norm", "result_output"]
    model = Model(small_model(name))
    assert [tap.name for tap in model.taps] == expected
    trace = record(model.engine, (1, 2, 3), "engine")
    assert list(trace) == expected
    shapes = {tap.name: taps.shape_of(tap, 3, model.sizes) for tap in model.taps}
    assert shapes == {tap: trace.shape(tap) for tap in trace}


def test_every_kind_reads_kinds_of_the_vocabulary():
    for kind in taps.KINDS:
        words = kind.inputs.replace("|", " ").split()
        assert set(words) <= {"prev", *taps.BY_WORD}, kind.word


@pytest.mark.parametrize("name", ["attn_norm", "embd-0", "l_out-", "l_out-x", "L_OUT-1", "", "kq--1", "a" * 500])
def test_other_names_are_no_taps(name):
    assert taps.parse(name) is None


def test_names_are_parsed_back():
    for name in ("embd", "Qcur_rope-17", "kq_soft_max-0", "result_output"):
        assert taps.parse(name).name == name


def test_selection_by_pattern_and_layer():
    tap = taps.parse("l_out-3")
    assert taps.is_selected(tap.name, tap.layer, (), None)
    assert taps.is_selected(tap.name, tap.layer, ("l_out-*",), range(2, 4))
    assert not taps.is_selected(tap.name, tap.layer, ("ffn_*",), None)
    assert not taps.is_selected(tap.name, tap.layer, (), range(3))
    assert taps.is_selected("embd", None, (), range(3))


@pytest.mark.parametrize("case", sorted((Path(__file__).parent / "nodes").glob("*.json")), ids=lambda path: path.stem)
def test_recorded_nodes_find_their_taps(case):
    """Node lists recorded from llama.cpp's graphs: name, op, sources, and the tap each one is."""
    nodes = json.loads(case.read_text("utf-8"))
    assert nodes
    for name, op, sources, expected in nodes:
        assert tap_name(name, op, sources) == expected, (name, op, sources)


def node(name, op, *sources):
    return SimpleNamespace(name=name, op=op, sources=sources)


def test_scores_without_a_name_are_told_by_the_keys_they_are_made_from():
    """Releases of 2025 name neither scores nor probabilities."""
    keys = node("cache_k_l3 (view) (permuted)", "PERMUTE")
    scores = node("node_22", "MUL_MAT", keys, node("Qcur-3 (reshaped) (permuted)", "PERMUTE"))
    probabilities = node("node_23", "SOFT_MAX", scores, node("leaf_11", "NONE"))
    values = node("cache_v_l3 (view) (permuted)", "PERMUTE")
    assert tap_of(scores) == "kq-3"
    assert tap_of(probabilities) == "kq_soft_max-3"
    assert tap_of(node("node_24", "MUL_MAT", values, probabilities)) is None
    assert tap_of(node("node_25", "MUL_MAT", keys, probabilities)) is None
    assert tap_of(node("embd", "GET_ROWS", node("token_embd.weight", "NONE"), node("inp_tokens", "NONE"))) == "embd"
    assert tap_of(node("inp_embd", "GET_ROWS", node("token_embd.weight", "NONE"), node("leaf_2", "NONE"))) == "embd"
