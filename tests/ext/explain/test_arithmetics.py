"""Right engines that round to 8 bits in ways of their own are right, whole dumps and sparse ones; bugs are wrong."""

from __future__ import annotations

import numpy as np
import pytest
from models.options import OPTIONS
from models.small import write_model
from proof.unknown.fault import bf16 as round_bf16
from proof.unknown.numpy_engine import Engine

from llamadiff import Run, Trace, UserError, compare
from llamadiff.ext.explain.conventions import ends
from llamadiff.trace.metadata import Info

TOKENS = tuple(int(token) for token in np.random.default_rng(3).integers(3, 90, 9))
BATCHES = (6, 2, 1)
SPARSE = ("l_out-", "result_output")


def eight_bits(x, block=None, half=False, away=False):
    """A scale for each block of a row, for a row, or (0) for all rows of a batch."""
    blocks = x.reshape(-1, x.size if block == 0 else block or x.shape[-1])
    scale = np.maximum(np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127), np.float32(1e-30))
    steps = blocks * (np.float32(1) / scale)
    whole = np.copysign(np.floor(np.abs(steps) + np.float32(0.5)), steps) if away else np.rint(steps)
    scale = scale.astype(np.float16).astype(np.float32) if half else scale
    return (whole * scale).reshape(x.shape)


class Rounds(Engine):
    """Activations of every product through ``to``."""

    def matmul(self, name, x, w):
        return super().matmul(name, self.to(x), w)


def trace_of(path, to, *, taps=(), settings=None, cache=None, wrong=None):
    engine = Rounds(path)
    engine.to, engine.stored = to, cache or engine.stored
    engine.glu = wrong(engine.glu) if wrong else engine.glu
    arrays = engine.run(list(TOKENS), list(BATCHES))
    kept = {name: np.asarray(x, np.float32) for name, x in arrays.items() if name.startswith(taps or "")}
    producer = {"name": "mine", "settings": settings} if settings else {"name": "mine"}
    info = Info(TOKENS, tuple(range(len(TOKENS))), BATCHES[0] + BATCHES[1], batches=BATCHES, producer=producer)
    return Trace(info, kept, dict.fromkeys(kept, "F32"))


def judged(path, trace):
    return compare(path, Run(tokens=TOKENS), trace)


WAYS = {
    "a row, cache in 8 bits": (
        {"cache": eight_bits},
        eight_bits,
        ("rounds activations to 8 bits, one scale a row", "keeps K and V in 8 bits, one scale a row"),
    ),
    "a float16 scale a row": ({}, lambda x: eight_bits(x, half=True), ("8 bits, one float16 scale a row",)),
    "the tensor": ({}, lambda x: eight_bits(x, 0, away=True), ("8 bits, one scale for the tensor",)),
    "float32 for 32": (
        {"settings": {"type_k": "F16", "type_v": "F16"}}, lambda x: eight_bits(x, 32),
        ("8 bits, one float32 scale for 32",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_layer_outputs_tell_how_activations_and_the_cache_are_rounded(way, small_model):
    more, to, says = WAYS[way]
    found = judged(
        small_model("llama", kind="Q4_0"), trace_of(small_model("llama", kind="Q4_0"), to, taps=SPARSE, **more)
    )
    assert found.verdict == "noise"
    assert all(any(words in clause for clause in found.manner.clauses()) for words in says)


def test_a_few_tokens_tell_where_all_are_too_much_work(small_model, monkeypatch):
    monkeypatch.setattr(ends, "WORK", 4e8)
    path = small_model("llama", kind="Q4_0")
    found = judged(path, trace_of(path, eight_bits, taps=SPARSE[1:], cache=lambda x: x))
    assert found.verdict == "noise"
    assert found.manner.compute == "8 bits, one scale a row"


def test_whole_dumps_tell_what_a_scale_is_kept_in(small_model):
    """One factor of a batch's products is its scale's rounding, and no bug."""
    path = small_model("llama", kind="Q4_0")
    found = judged(path, trace_of(path, lambda x: eight_bits(x, 0, half=True)))
    assert found.verdict == "noise"
    assert any("8 bits, one float16 scale for the tensor" in clause for clause in found.manner.clauses())


@pytest.fixture(scope="module")
def massive(tmp_path_factory):
    """A model with two channels as trained ones have: of 1000 times the others, from the second layer on."""
    down = np.random.default_rng(11).standard_normal((256, 512)).astype(np.float32) / 20
    down[[17, 101]] *= [[3000], [-1000]]
    path = tmp_path_factory.mktemp("massive") / "massive.gguf"
    options = OPTIONS["llama"] | {"layers": 3, "tensors": {"blk.1.ffn_down.weight": down}}
    return write_model(path, **options, kind="Q4_0")


RIGHT = {"float32": lambda x: x, "bfloat16": round_bf16, "a row": eight_bits, "a tensor": WAYS["the tensor"][1]}


@pytest.mark.parametrize("taps", [SPARSE, ""], ids=["sparse", "whole"])
@pytest.mark.parametrize("to", RIGHT)
def test_right_engines_of_a_model_with_massive_channels_are_right(to, taps, massive):
    trace = trace_of(massive, RIGHT[to], taps=taps, settings={"type_k": "F16", "type_v": "F16"})
    sizes = np.abs(trace["l_out-1"])
    assert sizes.max() > 1000 * np.median(sizes)
    assert judged(massive, trace).verdict in ("match", "noise")


@pytest.fixture(scope="module")
def ties(tmp_path_factory):
    """A model whose first norm has some weights of 1/2 on embeddings of whole numbers: half of those are ties."""
    draws = np.random.default_rng(5).integers(-63, 64, (96, 256)).astype(np.float32)
    draws[:, ::32] = 127
    weights = np.where(np.arange(256) % 64 == 5, 0.5, 1).astype(np.float32)
    tensors = {"token_embd.weight": draws / 64, "blk.0.attn_norm.weight": weights}
    path = tmp_path_factory.mktemp("ties") / "ties.gguf"
    return write_model(path, **OPTIONS["llama"], kind="Q4_0", tensors=tensors)


def too_large(right):
    """What is made of gate and up."""
    return lambda i, gate, up: right(i, gate, up) * np.float32(1.3)


def test_values_that_may_be_rounded_either_way_are_no_mistake(ties):
    found = judged(ties, trace_of(ties, lambda x: eight_bits(x, 32, half=True, away=True)))
    assert found.verdict == "noise"


def test_a_product_that_is_off_beside_ties_is_wrong(ties):
    trace = trace_of(ties, lambda x: eight_bits(x, 32, half=True, away=True))
    arrays = {name: np.array(trace[name]) for name in trace}
    arrays["Kcur_proj-0"][:, 5] *= np.float32(1.5)
    found = judged(ties, Trace(trace.info, arrays, dict.fromkeys(arrays, "F32")))
    assert found.first_divergence.tap == "Kcur_proj-0"


@pytest.mark.parametrize("taps", [SPARSE, ""])
def test_an_activation_that_is_off_is_wrong_whatever_rounds(taps, small_model):
    path = small_model("llama", kind="Q4_0")
    found = judged(path, trace_of(path, eight_bits, taps=taps, wrong=too_large))
    assert found.verdict == "wrong"


@pytest.mark.parametrize(("stated", "verdict"), [({"compute": "8 bits, one scale a row"}, "noise"), ({}, "unchecked")])
def test_an_arithmetic_may_be_stated(stated, verdict, small_model):
    path = small_model("llama", kind="Q4_0")
    settings = {"type_k": "F16", "type_v": "F16", **stated}
    found = judged(path, trace_of(path, eight_bits, taps=SPARSE[1:], settings=settings))
    assert found.verdict == verdict


def test_an_arithmetic_that_nobody_knows_is_refused(small_model):
    path = small_model("llama", kind="Q4_0")
    with pytest.raises(UserError, match=r"settings\.compute is '7 bits': it is ggml, f32"):
        judged(path, trace_of(path, round_bf16, settings={"compute": "7 bits"}))
