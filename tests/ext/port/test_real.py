"""Real graphs, real files: llama.cpp's own converter, transformers' own classes, and a llama.cpp with mistakes in it.

The mistakes are of the kinds that people made while they added a model (mistakes/graphs.patch). They sleep until
LLAMADIFF_MISTAKE has their names, so that one build has all of them. `make backends PARTS=port` makes it.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import version

import pytest
from ext.port.architectures import ARCHITECTURES, CONVERTING, DRAFTING, convert, describe, make, make_bert, pool
from optional import needs
from tools.backends import made
from tools.parts import PACKAGE, minilm, sources

from llamadiff.engines.run_spec import USUAL, Run
from llamadiff.ext.heads.compare import compare_heads
from llamadiff.ext.port.run import port
from llamadiff.ext.port.tiny import tiny
from llamadiff.ext.state.variants import run_variants
from llamadiff.llamacpp.request import Settings

pytestmark = [
    pytest.mark.backends, pytest.mark.slow, needs("torch", "transformers"), pytest.mark.filterwarnings("ignore"),
]  # fmt: skip
TOKENS = (1, 7, 45, 99, 13, 200, 33, 61, 5, 150, 77, 42)
# mistake, model, the first op that is named, and the words about it
GRAPHS = [
    ("norm-plus-one", "qwen3", "ADD attn_norm", "leaves out norm"),
    ("norm-plus-one", "apertus", "ADD attn_norm", "leaves out norm"),
    ("layer-norm", "qwen2", "NORM norm", "does not subtract the mean; llama.cpp's graph has LayerNorm"),
    ("layer-norm", "smollm3", "NORM norm", "does not subtract the mean; llama.cpp's graph has LayerNorm"),
    ("rms-norm", "cohere2", "RMS_NORM norm", "subtracts the mean, as LayerNorm does; llama.cpp's graph has"),
    ("rms-norm", "stablelm", "RMS_NORM norm", "subtracts the mean, as LayerNorm does; llama.cpp's graph has"),
    ("epsilon", "granite", "RMS_NORM norm", "uses epsilon 1e-06, where llama.cpp has 0.0001"),
    ("norm-bias", "gpt2", "MUL attn_norm", "adds transformer.h.{i}.ln_1.bias"),
    ("norm-bias", "starcoder2", "MUL attn_norm", "adds model.layers.{i}.input_layernorm.bias"),
    ("no-q-norm", "qwen3", "ROPE Qcur_rope", "computes pow, mean, add, rsqrt, mul, mul of Qcur_proj first"),
    ("norm-after-rope", "apertus", "ROPE", "does not rotate at all"),
    (
        "norm-of-k-for-q",
        "lfm2",
        "MUL model.layers.{}.self_attn.q_layernorm",
        "uses blk.1.attn_q_norm.weight for blk.1.attn_k_norm.weight",
    ),
    ("post-norm-after-residual", "glm4", "ADD ffn_inp", "leaves out the layer's input"),
    ("no-post-norm", "glm4", "ADD l_out", "computes pow, mean, add, rsqrt, mul, mul of ffn_out first"),
    ("no-final-norm", "cohere2", "MUL_MAT", "computes mean, sub, pow, mean, sub, add, rsqrt, ... of"),
    ("norm-of-another-layer", "qwen3", "MUL ffn_norm", "uses blk.{i}.ffn_norm.weight for blk.0.ffn_norm.weight"),
    ("attn-norm-for-ffn-norm", "apertus", "MUL attn_norm", "uses blk.{i}.ffn_norm.weight for blk.{i}.attn_norm.weight"),
    ("gelu-for-silu", "qwen3", "GEGLU ffn_swiglu", "takes SiLU of the gate; llama.cpp's graph takes GELU (tanh)"),
    ("gelu-for-silu", "cohere", "GEGLU ffn_swiglu", "takes SiLU of the gate; llama.cpp's graph takes GELU (tanh)"),
    ("relu-not-squared", "arcee", "MUL_MAT ffn_out", "computes pow of ffn_sqr(relu)-0 (relu) first"),
    ("gelu-erf", "gpt2", "GELU_ERF ffn_gelu", "takes GELU (tanh); llama.cpp's graph takes GELU (erf)"),
    ("gelu-erf", "starcoder2", "GELU_ERF ffn_gelu", "takes GELU (tanh); llama.cpp's graph takes GELU (erf)"),
    ("ffn-bias", "gpt2", "MUL_MAT ffn_out", "adds transformer.h.{i}.mlp.c_proj.bias"),
    ("ffn-bias", "starcoder2", "MUL_MAT ffn_out", "adds model.layers.{i}.mlp.c_proj.bias"),
    ("up-for-gate", "qwen3", "SWIGLU ffn_swiglu", "applies the activation to up, and multiplies by the gate"),
    ("up-for-gate", "granite", "SWIGLU ffn_swiglu", "applies the activation to up, and multiplies by the gate"),
    ("xielu-swapped", "apertus", "XIELU ffn_xielu", "reads model.layers.{i}.mlp.act_fn.alpha_p, and no node of"),
    ("k-bias", "qwen2", "MUL_MAT Kcur_proj", "adds model.layers.{i}.self_attn.k_proj.bias"),
    ("k-bias", "seedoss", "MUL_MAT Kcur_proj", "adds model.layers.{i}.self_attn.k_proj.bias"),
    ("qkv-slices", "gpt2", "MUL_MAT kqv", "reads what split gives"),
    ("qkv-slices", "falcon", "MUL_MAT kqv", "reads what index of wqkv gives"),
    ("k-not-rotated", "seedoss", "MUL_MAT kq", "computes mul, neg, cat, mul, add of Kcur_proj first"),
    ("rope-pairs", "qwen2moe", "ROPE Qcur_rope", "rotates (i, i+8); llama.cpp's graph needs (2i, 2i+1)"),
    ("rope-dimensions", "stablelm", "ROPE Kcur_rope", "rotates the first 4 values of a head; llama.cpp's graph"),
    ("rope-everywhere", "smollm3", "ROPE Qcur_rope and Kcur_rope", "does not rotate at all"),
    ("rope-layers-inverted", "cohere2", "MUL_MAT kq", "computes mul, neg, stack, mul, add of Qcur_proj and Kcur_proj"),
    ("rope-base-of-others", "gpt-oss", "ROPE Qcur_rope", "uses base 150000, where llama.cpp has 10000"),
    ("yarn-scale", "gpt-oss", "ROPE Kcur_rope", "does there what llama.cpp's graph does at Qcur_rope"),
    ("rope-of-v", "apertus", "ROPE Vcur_pos", "does not rotate at all"),
    ("score-scale", "qwen3", "SOFT_MAX kq_soft_max", "scales by the root of the scale: 0.20412 for 0.041667"),
    ("score-scale", "glm4", "SOFT_MAX kq_soft_max", "scales by the root of the scale: 0.25 for 0.0625"),
    ("no-sinks", "gpt-oss", "SOFT_MAX kq_soft_max", "reads model.layers.{i}.self_attn.sinks, and no node of"),
    ("window-everywhere", "cohere2", "ROPE Qcur_rope and Kcur_rope", "does not rotate at all"),
    ("attention-scale-ignored", "granite", "SOFT_MAX kq_soft_max", "scales scores by 0.2; llama.cpp's graph by 0.25"),
    (
        "attention-scale-ignored",
        "granitemoe",
        "SOFT_MAX kq_soft_max",
        "scales scores by 0.2; llama.cpp's graph by 0.25",
    ),
    ("ffn-reads-attention", "cohere", "NORM norm", "has no NORM norm: it goes on with norm (norm)"),
    ("residual-of-norm", "apertus", "RMS_NORM norm", "computes add of attn_out first"),
    ("residual-scale-once", "granite", "ADD l_out", "adds 0.3 times ffn_out"),
    ("residual-scale-once", "granitemoe", "ADD l_out", "adds 0.3 times ffn_out"),
    ("logit-scale-inverted", "granite", "SCALE result_output", "divides by 2; llama.cpp's graph multiplies by it"),
    ("logit-scale-lost", "cohere", "MUL_MAT result_output", "multiplies its result by 0.5"),
    ("embedding-scale-lost", "granite", "GET_ROWS embd", "multiplies rows by 3; llama.cpp's graph does not"),
    ("embedding-scale-lost", "granitemoe", "GET_ROWS embd", "multiplies rows by 3; llama.cpp's graph does not"),
    ("embedding-scale-twice", "granite", "SCALE embd", "multiplies by the root of 9"),
    ("head-tied", "qwen3", "MUL_MAT result_output", "has lm_head.weight where llama.cpp's graph has"),
    (
        "sigmoid-for-softmax",
        "qwen3moe",
        "SIGMOID ffn_moe_probs",
        "takes a softmax of router scores; llama.cpp's graph takes a",
    ),
    (
        "sigmoid-for-softmax",
        "qwen2moe",
        "SIGMOID ffn_moe_probs",
        "takes a softmax of router scores; llama.cpp's graph takes a",
    ),
    ("softmax-after-choice", "gpt-oss", "SOFT_MAX ffn_moe_probs", "takes no softmax of router scores"),
    ("weights-not-normed", "qwen3moe", "MUL ffn_moe_weighted", "reads what topk, sum, div of ffn_moe_probs gives"),
    ("weights-not-normed", "mixtral", "MUL ffn_moe_weighted", "reads what topk, sum, div of ffn_moe_probs gives"),
    (
        "weights-normed",
        "qwen2moe",
        "SUM_ROWS ffn_moe_weights_sum",
        "does not make the chosen experts' weights sum to one",
    ),
    (
        "experts-gate-for-up",
        "qwen3moe",
        "SWIGLU ffn_moe_swiglu",
        "applies the activation to up, and multiplies by the gate",
    ),
    (
        "experts-gate-for-up",
        "mixtral",
        "SWIGLU ffn_moe_swiglu",
        "applies the activation to up, and multiplies by the gate",
    ),
    ("experts-unweighted", "granitemoe", "ADD ffn_out", "computes mul of ffn_moe_down first"),
    ("experts-one-too-few", "qwen2moe", "ADD ffn_out", "reads what index, sum of ffn_moe_weighted gives"),
    ("shared-expert-ungated", "qwen2moe", "ADD ffn_out", "computes mul of ffn_shexp first"),
    ("shared-expert-lost", "qwen2moe", "ADD l_out", "adds what mm, silu, mm, mul, mm, mm, sigmoid, mul of ffn_norm"),
    ("expert-bias", "gpt-oss", "MUL ffn_moe_weighted", "computes add of ffn_moe_down first"),
    ("conv-chunks", "lfm2", "MUL", "takes the values from 64 on; llama.cpp's graph has its part"),
    ("no-silu-after-conv", "mamba2", "SSM_SCAN", "computes silu of ssm_conv first"),
    ("d-lost", "mamba2", "SSM_SCAN", "adds what split_with_sizes gives"),
    ("dt-bias-lost", "mamba2", "SSM_SCAN", "reads what add of ssm_in gives"),
    ("z-not-activated", "mamba2", "MUL", "reads what silu of ssm_in gives"),
]
SEVERAL = ("sigmoid-for-softmax", "embedding-scale-twice", "residual-scale-once")


@pytest.fixture(scope="module")
def mistaken():
    """The llama.cpp with mistakes."""
    folder = made().get("mistaken", " not made yet: make backends PARTS=port")
    if folder[0] == " ":
        pytest.skip(folder.strip())
    return Settings(llama_cpp=folder)


@pytest.fixture(scope="module")
def files(tmp_path_factory, mistaken):
    """architecture -> its checkpoint and its file, made once."""
    folder = tmp_path_factory.mktemp("checkpoints")

    @cache
    def of(name):
        checkpoint = make(folder / name, name)
        return convert(sources(version(PACKAGE)), checkpoint, folder / f"{name}.gguf"), checkpoint

    return of


@pytest.fixture
def ported(files, mistaken, monkeypatch):
    """What is found of an architecture, with mistakes in llama.cpp or without."""

    def found(name, *mistakes):
        monkeypatch.setenv("LLAMADIFF_MISTAKE", ",".join(mistakes))
        path, checkpoint = files(name)
        return port(path, str(checkpoint), Run(tokens=TOKENS, settings=mistaken), USUAL)

    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_right_port_is_right(name, ported):
    found = ported(name)
    assert (found.verdict, found.places) == ("match", [])
    assert found.lineup.aligned + found.lineup.inside == found.lineup.nodes
    assert found.logits < 1e-11


@pytest.mark.parametrize(("mistake", "name", "op", "says"), GRAPHS, ids=[f"{row[0]}-{row[1]}" for row in GRAPHS])
def test_a_mistake_in_a_graph_is_found_at_its_op(mistake, name, op, says, ported):
    found = ported(name, mistake)
    assert found.verdict == "wrong"
    assert {place.side for place in found.places} == {"llama.cpp's graph"}
    assert (found.places[0].name.partition(", layer")[0], says) == (op, says)
    assert says in found.places[0].says


def test_three_mistakes_at_once_are_three_places(ported):
    found = ported("granitemoe", *SEVERAL)
    assert [place.name.partition(", layer")[0] for place in found.places] == [
        "SCALE embd", "SIGMOID ffn_moe_probs", "ADD l_out",
    ]  # fmt: skip
    says = ("multiplies by the root of 9", "takes a softmax of router scores", "computes mul of ffn_out first")
    assert all(words in place.says for words, place in zip(says, found.places, strict=True))
    assert found.lineup.mended[0] == found.lineup.mended[1] > 0


LARGE = {"hidden_size": 16, "n_embd": 16, "intermediate_size": 16, "moe_intermediate_size": 16, "head_dim": 4,
         "num_attention_heads": 4, "n_head": 4, "num_key_value_heads": 4, "num_kv_heads": 4, "sliding_window": 64,
         "num_hidden_layers": 8, "n_layer": 8, "shared_expert_intermediate_size": 16, "block_ff_dim": 16,
         "num_heads": 4, "query_pre_attn_scalar": 4}  # fmt: skip


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_tiny_one_of_a_large_config_is_converted_and_right(name, tmp_path):
    options = {key: size * LARGE.get(key, 1) if type(size) is int else size
               for key, size in ARCHITECTURES[name].options.items()}  # fmt: skip
    checkpoint = describe(tmp_path / "large", name, options)
    script = tmp_path / "convert.py"
    source = sources(version(PACKAGE))
    script.write_text(f"import sys\nsys.argv.insert(1, {str(source)!r})\n{CONVERTING}", encoding="utf-8")
    made = tiny(checkpoint, tmp_path / "tiny", script, golden=True)
    assert made.parameters < 1e6
    assert made.golden.stat().st_size < 20_000
    assert port(made.gguf, str(made.folder), Run(tokens=TOKENS), USUAL).verdict == "match"


@pytest.mark.parametrize("name", DRAFTING)
def test_a_tiny_one_keeps_its_heads(name, tmp_path):
    """And llama.cpp drafts with them."""
    checkpoint = describe(tmp_path / "large", name, DRAFTING[name].options)
    script = tmp_path / "convert.py"
    source = sources(version(PACKAGE))
    script.write_text(f"import sys\nsys.argv.insert(1, {str(source)!r})\n{CONVERTING}", encoding="utf-8")
    made = tiny(checkpoint, tmp_path / "tiny", script)
    assert (made.heads, made.converted) == (1, 1)
    assert compare_heads(made.gguf, Run(tokens=TOKENS), None, USUAL).verdict == "match"
    if "qwen" in name:
        assert port(made.gguf, str(made.folder), Run(tokens=TOKENS), USUAL).verdict == "match"
    row = run_variants(made.gguf, Run(tokens=TOKENS), names=["mtp=2"]).rows[1]
    assert (row.verdict, row.wrong, row.failed) == ("match", (), "")


# Its converter did not read config.json as newer transformers write it: llama.cpp's pull requests 18013 and 18668.
OLD = "0.3.16"
OLD_FILES = [
    ("cohere", "uses base 500000, where llama.cpp has 10000", "rope_parameters.rope_theta"),
    ("smollm3", "uses base 2e+06, where llama.cpp has 10000", "rope_parameters.rope_theta"),
    (
        "glm4",
        "rotates the first 4 values of a head; llama.cpp's graph rotates 8",
        "rope_parameters.partial_rotary_factor",
    ),
]


@pytest.mark.parametrize(("name", "says", "unsaid"), OLD_FILES, ids=[row[0] for row in OLD_FILES])
def test_what_an_old_converter_did_not_read_is_found(name, says, unsaid, files, tmp_path):
    right, checkpoint = files(name)
    path = convert(sources(OLD), checkpoint, tmp_path / "old.gguf")
    found = port(path, str(checkpoint), Run(tokens=TOKENS), USUAL)
    [place] = found.places
    assert (place.side, place.op, place.says) == ("the file", "ROPE", says)
    assert unsaid in found.unsaid
    assert port(right, str(checkpoint), Run(tokens=TOKENS), USUAL).verdict == "match"


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
@pytest.mark.parametrize(("activation", "says"), [("gelu_new", None), ("gelu", "takes GELU (erf)")])
def test_a_model_that_embeds_texts_is_lined_up(activation, says, kind, tmp_path):
    checkpoint = make_bert(tmp_path / "bert", activation)
    path = convert(sources(version(PACKAGE)), checkpoint, tmp_path / "bert.gguf", "--outtype", kind)
    found = port(path, str(checkpoint), Run(tokens=(2, 20, 12, 30, 45, 50, 33, 3)), USUAL)
    assert [place.says.partition(";")[0] for place in found.places] == ([] if says is None else [says])
    assert found.verdict == ("match" if says is None else "wrong")


@pytest.mark.parametrize("mode", ["cls_token", "mean_tokens", "lasttoken"])
@pytest.mark.parametrize("own", ["cls_token", "mean_tokens", "lasttoken"])
def test_the_pooling_of_a_file_is_the_checkpoints(mode, own, tmp_path):
    checkpoint = pool(make_bert(tmp_path / "bert", "gelu_new"), mode)
    path = convert(sources(version(PACKAGE)), checkpoint, tmp_path / "bert.gguf")
    found = port(path, str(pool(checkpoint, own)), Run(tokens=(2, 20, 12, 30, 45, 50, 33, 3)), USUAL)
    places = [(place.side, place.nodes[-1].name, place.says) for place in found.places]
    pools = f"pools by {own.removesuffix('_token').removesuffix('_tokens')}"
    assert places == ([] if mode == own else [("the file", "result_embd_pooled", pools)])
    assert found.verdict == ("match" if mode == own else "wrong")
    assert [place.fault.partition(":")[0] for place in found.places] == ["bert.pooling_type"] * bool(places)


def test_a_checkpoint_from_the_package_index_is_lined_up(tmp_path):
    """llama.cpp takes GELU's tanh form for BERT, where its models have the error function."""
    checkpoint = minilm()
    path = convert(sources(version(PACKAGE)), checkpoint, tmp_path / "minilm.gguf")
    found = port(path, str(checkpoint), Run("The cat sat on the mat, and the dog slept."), USUAL)
    [place] = found.places
    assert (place.op, place.layers, place.side) == ("GELU", tuple(range(6)), "llama.cpp's graph")
    assert place.says == "takes GELU (erf); llama.cpp's graph takes GELU (tanh)"
    assert found.lineup.mended == (6, 6)
