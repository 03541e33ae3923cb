"""The engine's maths against plain loops, its cache, its precision, and what it refuses."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from llamaref import Cache, Engine, ModelError, Weights, ops
from llamaref.config import Rope
from llamaref.configure import read_config
from llamaref.models import ARCHITECTURES
from models.small import EMBD, VOCAB, write_model

RNG = np.random.default_rng(7)
TOKENS = (1, 17, 5, 80, 42)
WITHOUT_ROPE = {"gpt2", "mamba2"}


def random(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def test_rms_norm_is_its_formula():
    x, weight = random(3, 8), random(8)
    for row, got in zip(x, ops.rms_norm(x, weight, 1e-5), strict=True):
        mean_square = sum(float(v) ** 2 for v in row) / 8
        assert got == pytest.approx([v * w / math.sqrt(mean_square + 1e-5) for v, w in zip(row, weight, strict=True)])


def test_layer_norm_is_its_formula():
    x, weight, bias = random(3, 8), random(8), random(8)
    for row, got in zip(x, ops.layer_norm(x, weight, bias, 1e-5), strict=True):
        mean = sum(map(float, row)) / 8
        variance = sum((float(v) - mean) ** 2 for v in row) / 8
        expected = [(v - mean) / math.sqrt(variance + 1e-5) * w + b for v, w, b in zip(row, weight, bias, strict=True)]
        assert got == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("rotate", "pair"), [(ops.rope_pairs, lambda i: (2 * i, 2 * i + 1)),
                                              (ops.rope_halves, lambda i: (i, i + 3))])  # fmt: skip
def test_rope_rotates_each_pair_by_position_times_frequency(rotate, pair):
    rope, positions = Rope(n_rot=6, base=100.0), np.array([0, 5])
    x = random(1, 2, 1, 8)
    got = rotate(x, *ops.rope_angles(rope, positions))
    for t, position in enumerate(positions):
        for i in range(3):
            a, b = pair(i)
            turned = complex(x[0, t, 0, a], x[0, t, 0, b]) * np.exp(1j * position * 100.0 ** (-2 * i / 6))
            assert got[0, t, 0, [a, b]] == pytest.approx([turned.real, turned.imag], abs=1e-6)
    assert np.array_equal(got[..., 6:], x[..., 6:])  # beyond n_rot: partial rotary


def test_yarn_keeps_fast_frequencies_and_divides_slow_ones():
    rope = Rope(n_rot=64, base=10000.0, factor=8.0, yarn=True, n_ctx_orig=2048)
    plain = ops.rope_theta(Rope(64, 10000.0), np.array([100]))[0]
    theta = ops.rope_theta(rope, np.array([100]))[0]
    assert theta[0] == pytest.approx(plain[0])
    assert theta[-1] == pytest.approx(plain[-1] / 8)
    assert ops.rope_magnitude(rope) == pytest.approx(1 + 0.1 * math.log(8))


def test_attention_gives_each_query_head_its_group_and_its_past():
    q, k, v = random(1, 4, 4, 8), random(1, 4, 2, 8), random(1, 4, 2, 8)
    here = np.arange(4)
    probs = ops.causal_softmax(ops.attention_scores(q, k), 8**-0.5, here, here)
    out = ops.attention_values(probs, v).reshape(4, 4, 8)
    for t in range(4):
        for head in range(4):
            scores = np.array([q[0, t, head] @ k[0, s, head // 2] * 8**-0.5 for s in range(t + 1)], np.float64)
            weights = np.exp(scores) / np.exp(scores).sum()
            assert out[t, head] == pytest.approx(sum(w * v[0, s, head // 2] for s, w in enumerate(weights)), abs=1e-5)


def test_silu_does_not_overflow():
    with np.errstate(all="raise"):
        assert ops.silu(np.array([-80.0, 0.0, 80.0], np.float32)) == pytest.approx([-80 * math.exp(-80), 0, 80])


@pytest.mark.parametrize("name", ["moe", *ARCHITECTURES])
def test_token_by_token_equals_one_go(name, small_model):
    engine, cache = Engine(small_model(name)), Cache()
    whole = engine.forward(TOKENS)[0]
    steps = [engine.forward([token], cache=cache)[0, 0] for token in TOKENS]
    assert np.stack(steps) == pytest.approx(whole, abs=2e-5)


def test_a_cache_takes_a_prompt_and_then_a_token(small_model):
    engine, cache = Engine(small_model()), Cache()
    engine.forward(TOKENS[:3], cache=cache)
    assert engine.forward(TOKENS[3:], cache=cache)[0] == pytest.approx(engine.forward(TOKENS)[0, 3:], abs=2e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_rotates_is_what_the_architecture_says(name, small_model):
    """``Traits.rope_pairs`` undoes what files permute; the layers call a function by its name."""
    rotating = {rotate.__name__: rotate for rotate in (ops.rope_pairs, ops.rope_halves)}
    called = set()

    def seen(word):
        def rotate(*args):
            called.add(word)
            return rotating[word](*args)

        return rotate

    engine = Engine(
        small_model(name), maths=SimpleNamespace(**{**vars(ops), **{word: seen(word) for word in rotating}})
    )
    engine.forward(TOKENS)
    wanted = "rope_pairs" if engine.config.traits.rope_pairs else "rope_halves"
    assert called == (set() if name in WITHOUT_ROPE else {wanted})


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "mamba2", "deepseek2"])
def test_layers_can_be_driven_from_outside(name, small_model):
    """Layer by layer is what forward does; a layer runs again, with other lanes, from what the one before it gave."""
    engine = Engine(small_model(name))
    step = engine.step(TOKENS)
    inputs = [engine.begin(TOKENS, step)]
    for i in range(engine.n_layer):
        inputs.append(engine.layer(i, inputs[-1], step))
    assert np.array_equal(engine.end(inputs[-1], step), engine.forward(TOKENS))
    last = engine.n_layer - 1
    twice = engine.layer(last, np.concatenate([inputs[last], 2 * inputs[last]]), engine.step(TOKENS))
    assert twice[:1] == pytest.approx(inputs[-1], abs=1e-4)
    assert np.abs(twice[1:] - inputs[-1]).max() > 0.1


def test_double_precision_agrees_and_is_finer(small_model):
    single, double = Engine(small_model()).forward(TOKENS), Engine(small_model(), np.float64).forward(TOKENS)
    assert double.dtype == np.float64
    assert single == pytest.approx(double, abs=1e-4)
    assert np.abs(single - double).max() > 0


def test_blocks_give_the_whole_product(small_model, monkeypatch):
    whole = Engine(small_model(kind="Q8_0")).forward(TOKENS)
    monkeypatch.setattr("llamaref.weights.BLOCK_WEIGHTS", 7 * EMBD)
    assert Engine(small_model(kind="Q8_0")).forward(TOKENS) == pytest.approx(whole, abs=1e-5)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "TQ1_0", "TQ2_0"])
def test_products_use_the_weights_of_the_file(kind, tmp_path):
    weights = Weights(write_model(tmp_path / "m.gguf", kind=kind))
    x = random(3, EMBD)
    tensor = next(t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors if t.name == "blk.1.ffn_up.weight")
    matrix = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    assert weights.product("blk.1.ffn_up.weight", x) == pytest.approx(x @ matrix.T, abs=1e-4)


def test_a_vector_is_multiplied_as_a_matrix_of_one_row(small_model):
    weights, x = Weights(small_model()), random(3, EMBD)
    vector = weights.vector("blk.0.attn_norm.weight", EMBD)
    error = weights.product("blk.0.attn_norm.weight", x)[:, 0] - x.astype(np.float64) @ vector
    assert (np.abs(error) <= EMBD * 2.0**-24 * (np.abs(x) @ np.abs(vector))).all()  # what float32 may leave of a sum


def test_only_asked_for_rows_of_the_embedding_are_read(small_model):
    weights = Weights(small_model(kind="Q8_0"))
    seen = []
    weights._tensors["token_embd.weight"] = SimpleNamespace(
        data=SimpleNamespace(__getitem__=None), tensor_type=weights._tensors["token_embd.weight"].tensor_type
    )

    class Data:
        def __getitem__(self, rows):
            seen.extend(rows)
            return np.zeros((len(rows), 272), np.uint8)

    weights._tensors["token_embd.weight"].data = Data()
    weights.rows("token_embd.weight", np.array([5, 9]))
    assert seen == [5, 9]


def metadata(**changed):
    fields = {
        "general.architecture": "llama", "llama.block_count": 2, "llama.context_length": 64,
        "llama.embedding_length": 64, "llama.attention.head_count": 4, "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    fields |= {f"llama.{key}": value for key, value in changed.items()}
    return {key: value for key, value in fields.items() if value is not None}


def test_missing_metadata_takes_llama_cpps_defaults():
    config = read_config(metadata())
    assert (config.n_head_kv, config.head_k, config.head_v) == (4, 16, 16)
    assert config.rope == Rope(n_rot=16, base=10000.0, n_ctx_orig=64)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"block_count": None}, "llama.block_count is missing"),
        ({"attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
        ({"attention.sliding_window": 32}, "llama.attention.sliding_window = 32"),
        ({"attention.clamp_kqv": 8.0}, "llama.attention.clamp_kqv = 8.0"),
        ({"attention.causal": False}, "attention.causal = False"),
        ({"attn_logit_softcapping": 20.0}, "attn_logit_softcapping = 20.0"),
        ({"never_heard_of": 3}, "llama.never_heard_of = 3"),
        ({"rope.scaling.type": "longrope"}, "longrope"),
        ({"rope.dimension_count": 15}, "must be even"),
        ({"rope.dimension_count": 32}, "must be 1 to 16"),
        ({"attention.head_count": [4, 2]}, "differs between layers"),
        ({"attention.head_count": "4"}, "expected a whole number"),
        ({"attention.head_count_kv": 3}, "cannot share 3 KV heads"),
        ({"rope.freq_base": float("nan")}, "finite number"),
        ({"expert_count": 2}, "expert_used_count is missing"),
    ],
)
def test_what_the_engine_does_not_implement_is_named(changed, message):
    with pytest.raises(ModelError, match=re.escape(message)):
        read_config(metadata(**changed))


@pytest.mark.parametrize(
    ("arch", "changed", "message"),
    [
        ("gemma3", {"attention.scale": 0.5}, "gemma3.attention.scale = 0.5"),
        ("gemma2", {"final_logit_softcapping": 0.0}, "caps of scores and logits must be positive"),
        ("gemma2", {"rope.freq_base_swa": 0.5}, "rope.freq_base = 0.5"),
        ("gemma2", {"attention.key_length_swa": 8}, "gemma2.attention.key_length_swa"),
        ("olmo2", {"attention.sliding_window": 4, "attention.sliding_window_pattern": [True]}, "each of 2 layers"),
        ("olmo2", {"attention.scale": 0.5}, "olmo2.attention.scale = 0.5"),
        ("granite", {"logit_scale": 0.0}, "logits are divided by it"),
        ("smollm3", {"attention.sliding_window": 4}, "smollm3.attention.sliding_window = 4"),
        ("gpt-oss", {}, "gpt-oss.attention.sliding_window is missing"),
        ("deepseek2", {"attention.head_count_kv": 1}, "head_count_kv = 1: latent attention has 1, or 4 each"),
        ("mamba2", {}, "mamba2.ssm.conv_kernel is missing"),
        ("gemma", {"final_logit_softcapping": 20.0}, "gemma.final_logit_softcapping = 20.0"),
        ("deepseek2", {"attention.head_count_kv": 1, "attention.key_length_mla": 16}, "has 1, or 4 each"),
    ],
)
def test_a_key_is_known_to_the_architectures_that_have_it(arch, changed, message):
    fields = {key.replace("llama.", f"{arch}."): value for key, value in metadata().items()}
    fields |= {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in changed.items()}
    with pytest.raises(ModelError, match=re.escape(message)):
        read_config(fields)


def test_zero_means_unset_where_llama_cpp_says_so():
    inert = {"attention.sliding_window": 0, "attention.clamp_kqv": 0.0, "rope.scaling.factor": 0.0, "swin_norm": False,
             "swiglu_clamp_exp": [0.0, 0.0], "attn_logit_softcapping": 50.0}  # fmt: skip
    assert read_config(metadata(**inert)) == read_config(metadata())


def test_a_missing_tensor_is_named(tmp_path):
    path = write_model(tmp_path / "m.gguf", drop=("ffn_up",))
    with pytest.raises(ModelError, match=r"tensor blk\.0\.ffn_up\.weight is missing"):
        Engine(path).forward(TOKENS)


def test_a_tensor_of_the_wrong_shape_is_named(tmp_path):
    wrong = {"blk.0.ffn_up.weight": random(512, 128)}
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_up\.weight: rows of 128 weights"):
        Engine(write_model(tmp_path / "m.gguf", tensors=wrong)).forward(TOKENS)


@pytest.mark.parametrize("tokens", [(VOCAB,), (-1,), ()])
def test_tokens_out_of_range_are_refused(tokens, small_model):
    with pytest.raises(ModelError, match=r"out of range|no tokens"):
        Engine(small_model()).forward(tokens)
