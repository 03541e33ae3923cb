"""Weights that an engine misreads: the mistake is named, whatever the type of the blocks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from llamaref import Engine
from misread import K_TYPES, LEGACY, MISTAKES, Everywhere, Misread, decode
from models.small import EMBD, FF, VOCAB, write_model

from llamadiff import Trace
from llamadiff.candidates.reference import record
from llamadiff.engines.capture_request import text_request
from llamadiff.engines.model_file import ModelFile
from llamadiff.engines.reference_model import Model
from llamadiff.engines.run_spec import USUAL, Run
from llamadiff.ext.graph.engine import GraphEngine
from llamadiff.ext.graph.model import by_its_graph
from llamadiff.ext.graph.op import Op, Operand
from llamadiff.verbs.judging import judge

TOKENS = (1, 17, 5, 80, 42, 9, 33)
OPTIONS = {
    "llama": {},
    "qwen2": {"arch": "qwen2", "bias": True, "kv_heads": 4},
    "qwen3": {"arch": "qwen3", "qk_norm": True},
}
WEIGHTS = {"llama": "ffn_up", "qwen2": "attn_q", "qwen3": "attn_output"}
TAPS = {"ffn_up": "ffn_up-0", "attn_q": "Qcur_proj-0", "attn_output": "attn_out-0", "ffn_down": "ffn_out-0"}
# where the float16 of a block are, and how large, for weights of about 1 / sqrt(EMBD)
HALVES = {
    "Q4_0": {0: 0.014}, "Q4_1": {0: 0.014, 2: -0.1}, "Q5_0": {0: 0.007}, "Q5_1": {0: 0.007, 2: -0.1},
    "Q8_0": {0: 8e-4}, "Q2_K": {80: 4.5e-3, 82: 6.8e-3}, "Q3_K": {108: 1.5e-3}, "Q4_K": {0: 2.4e-4, 2: 1.8e-3},
    "Q5_K": {0: 1.2e-4, 2: 1.8e-3}, "Q6_K": {208: 4.6e-5},
}  # fmt: skip
CASES = [
    (arch, kind, cause, mistake)
    for arch in OPTIONS
    for cause, mistakes in MISTAKES.items()
    for mistake, kinds in mistakes.items()
    for kind in kinds
]


def blocks(kind: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Random bytes of blocks, whose floats are sane."""
    values, size = gguf.GGML_QUANT_SIZES[Type[kind]]
    data = rng.integers(0, 256, (rows, columns // values, size), np.uint8)
    for at, mean in HALVES[kind].items():
        floats = (mean * rng.uniform(0.5, 1.5, (*data.shape[:2], 1))).astype(np.float16)
        data[..., at : at + 2] = floats.view(np.uint8)
    return data.reshape(rows, -1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """model(arch, kind): a small model, and its right run. gguf-py makes no K types: theirs are random blocks."""
    folder = tmp_path_factory.mktemp("misread")

    @cache
    def get(arch, kind):
        path, rng, tensors = folder / f"{arch}.{kind}.gguf", np.random.default_rng(3), {}
        if kind in K_TYPES:
            shapes = {"attn_q": (EMBD, EMBD), "attn_output": (EMBD, EMBD), "ffn_up": (FF, EMBD), "ffn_down": (EMBD, FF)}
            shapes = {f"blk.{i}.{stem}": shape for i in range(2) for stem, shape in shapes.items()}
            shapes["token_embd"] = (VOCAB, EMBD)
            tensors = {f"{name}.weight": (blocks(kind, *shape, rng), Type[kind]) for name, shape in shapes.items()}
        write_model(path, kind="Q8_0" if tensors else kind, tensors=tensors, **OPTIONS[arch])
        return path, record(Engine(path), TOKENS, "engine")

    return get


@pytest.fixture(scope="module")
def graph_model(model, tmp_path_factory):
    """graph_model(arch, kind): the same, run through llama.cpp's graph."""
    folder = tmp_path_factory.mktemp("graphs")

    @cache
    def get(arch, kind):
        path, _ = model(arch, kind)
        request = text_request(ModelFile(path), Run(tokens=TOKENS), folder / "b.safetensors")
        return by_its_graph(path, request)[0]

    return get


@pytest.fixture
def diagnosed(model, graph_model):
    """The comparison of a right run and of one that misreads a weight, explained by llama.cpp's graph."""

    def get(arch, kind, weight, mistake):
        path, right = model(arch, kind)
        wrong = record(Engine(Misread(path, f"{weight}.weight", mistake)), TOKENS, "my engine")
        return judge(Model(path), right, wrong, USUAL, graph=lambda: graph_model(arch, kind))

    return get


@pytest.mark.parametrize("kind", [*LEGACY, *K_TYPES])
def test_decoders_are_right(kind):
    data = blocks(kind, 16, 1024, np.random.default_rng(5))
    right = gguf.quants.dequantize(data, Type[kind])
    assert np.array_equal(decode(kind, data), right)
    assert 0.01 < right.std() < 0.5


@pytest.mark.parametrize(("kind", "mistake"), sorted({(kind, mistake) for _, kind, _, mistake in CASES}))
def test_mistakes_are_mistakes(kind, mistake, model):
    path, _ = model("llama", kind)
    stem = "blk.0.ffn_down.weight"
    got, right = Misread(path, stem, mistake).misread(stem), Misread(path, stem, "none").misread(stem)
    assert np.nanmean(np.abs(got - right)) > 0.1 * np.abs(right).mean()


@pytest.mark.parametrize(("arch", "kind", "cause", "mistake"), CASES)
def test_mistake_is_named(arch, kind, cause, mistake, diagnosed):
    wide = kind in K_TYPES and cause == "block-size-wrong"  # rows of more than one block
    weight = "ffn_down" if wide else WEIGHTS[arch]
    result = diagnosed(arch, kind, weight, mistake)
    assert result.wrong[0].tap == TAPS[weight]
    first = result.diagnosis[0]
    assert cause in [found.name for found in first.causes]
    assert first.nmse <= 1e-9


@pytest.mark.parametrize(("kind", "cause", "mistake"), [
    ("Q4_0", "nibbles-interleaved", "nibbles are neighbours"),
    ("Q6_K", "nibbles-swapped", "nibbles swapped"),
])  # fmt: skip
def test_misread_embedding_is_named(kind, cause, mistake, diagnosed):
    result = diagnosed("llama", kind, "token_embd", mistake)
    assert result.wrong[0].tap == "embd"
    assert cause in [found.name for found in result.diagnosis[0].causes]
    assert result.diagnosis[0].nmse <= 1e-9


# through llama.cpp's graph


@pytest.mark.parametrize(("kind", "cause", "mistake"), [case[1:] for case in CASES if case[0] == "llama"])
def test_mistake_is_named_through_the_graph(kind, cause, mistake, model, graph_model):
    path, right = model("llama", kind)
    wide = kind in K_TYPES and cause == "block-size-wrong"
    weight = "ffn_down" if wide else "ffn_up"
    wrong = record(Engine(Misread(path, f"{weight}.weight", mistake)), TOKENS, "my engine")
    result = judge(graph_model("llama", kind), right, wrong, USUAL)
    assert result.wrong[0].tap == TAPS[weight]
    assert cause in [found.name for found in result.diagnosis[0].causes]
    assert result.diagnosis[0].nmse <= 1e-9


@pytest.mark.parametrize(("kind", "cause", "mistake"), [
    ("Q4_0", "nibbles-interleaved", "nibbles are neighbours"),
    ("Q4_K", "nibbles-interleaved", "nibbles are neighbours"),
    ("Q4_K", "scales-misread", "scales in a row"),
    ("Q5_K", "nibbles-interleaved", "quants in the order of bytes"),
    ("Q6_K", "nibbles-swapped", "nibbles swapped"),
    ("Q8_0", "quants-offset", "unsigned"),
])  # fmt: skip
def test_a_type_misread_everywhere_is_named_through_what_was_not_recorded(kind, cause, mistake, model, graph_model):
    path, right = model("llama", kind)
    wrong = record(Engine(Everywhere(path, kind, mistake)), TOKENS, "my engine")
    kept = {name: np.array(wrong[name]) for name in wrong if name.startswith(("embd", "l_out", "result"))}
    result = judge(graph_model("llama", kind), right, Trace(wrong.info, kept, wrong.dtypes), USUAL)
    assert (result.diagnosis[0].tap, [found.name for found in result.diagnosis[0].causes]) == ("l_out-0", [cause])


@pytest.mark.parametrize(("kind", "cause", "mistake"), [
    ("Q4_0", "nibbles-interleaved", "nibbles are neighbours"),
    ("Q6_K", "nibbles-swapped", "nibbles swapped"),
])  # fmt: skip
def test_misread_embedding_is_named_through_the_graph(kind, cause, mistake, model, graph_model):
    path, right = model("llama", kind)
    wrong = record(Engine(Misread(path, "token_embd.weight", mistake)), TOKENS, "my engine")
    result = judge(graph_model("llama", kind), right, wrong, USUAL)
    assert (result.wrong[0].tap, cause in [found.name for found in result.diagnosis[0].causes]) == ("embd", True)


@pytest.mark.parametrize(("kind", "mistake"), [
    ("Q8_0", "unsigned"), ("Q8_0", "d left out"), ("MXFP4", "nibbles are neighbours"),
])  # fmt: skip
def test_misread_experts_are_named_through_the_graph(kind, mistake, tmp_path):
    path = write_model(tmp_path / "moe.gguf", kind=kind, experts=4)
    request = text_request(ModelFile(path), Run(tokens=TOKENS), tmp_path / "b.safetensors")
    by_graph, _ = by_its_graph(path, request)
    cause = next(cause for cause, mistakes in MISTAKES.items() if mistake in mistakes)
    misread = Misread(path, "blk.1.ffn_up_exps.weight", mistake)
    node = by_graph.graph.labelled["ffn_moe_up-1"]

    def faulty(n: Op) -> Op:
        experts = misread.misread("blk.1.ffn_up_exps.weight").reshape(
            by_graph.weights.shape("blk.1.ffn_up_exps.weight")
        )
        return replace(n, sources=(Operand(experts[None], "f32"), *n.sources[1:]))

    right = record(by_graph.engine, TOKENS, "right")
    wrong = record(GraphEngine(by_graph.graph, by_graph.weights, {node.number: faulty}), TOKENS, "my engine")
    result = judge(by_graph, right, wrong, USUAL)
    assert result.wrong[0].tap == "ffn_moe_up-1"
    assert cause in [found.name for found in result.diagnosis[0].causes]
