"""llama.cpp's graph as an engine: candidates of any architecture, and agreement with the reference engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from graphs_by_hand import engine_of, node, ramp
from llamaref import Engine, Tap, Weights
from models.random_models import NAMES
from models.small import write_model
from traces import only

from llamadiff import Trace, compare
from llamadiff.candidates.reference import record
from llamadiff.engines.capture_request import text_request
from llamadiff.engines.model_file import ModelFile
from llamadiff.engines.run_spec import How, Run
from llamadiff.ext.graph.model import by_its_graph
from llamadiff.llamacpp.request import Settings
from llamadiff.numerics import metrics
from llamadiff.system.errors import UserError
from llamadiff.trace.taps import parse
from llamadiff.verbs.verbs import record as recorded

TOKENS = (1, 5, 9, 30, 17, 22, 64)


@pytest.fixture
def by_graph(tmp_path):
    """A model with its graph, and what its own engine records."""

    def get(path: Path) -> tuple[Path, Trace]:
        output = tmp_path / "b.safetensors"
        model, _ = by_its_graph(path, text_request(ModelFile(path), Run(tokens=TOKENS), output))
        return path, record(model.engine, TOKENS, "my engine")

    return get


def changed(trace: Trace, **taps) -> Trace:
    arrays = {name: np.array(trace[name]) for name in trace}
    for name, change in taps.items():
        arrays[name.replace("_at_", "-")] = change(arrays[name.replace("_at_", "-")])
    return Trace(trace.info, arrays, trace.dtypes)


# the engine's taps that llama.cpp's graph of an architecture has no node for
NOT_IN_GRAPHS = {"phi3": {"ffn_inp", "kv_k", "kv_v"}, "mamba2": {"ssm_scan"}, "deepseek2": set()}


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize(
    "name",
    ["llama", "moe", "qwen2", "qwen3", "qwen3moe", "stablelm", "llama-yarn", "llama-fused", "phi3", "gpt2", "gpt-oss",
     "mamba2", "deepseek2", "deepseek2-old"],
)  # fmt: skip
def test_the_graph_and_the_engine_agree(name, kind, small_model, by_graph):
    """A wrong graph in llama.cpp would part from the engine; a wrong kernel is found node by node."""
    path, graph = by_graph(small_model(name, kind))
    engine = record(Engine(path), TOKENS, "engine")
    assert {parse(tap).kind.word for tap in engine if tap not in graph} == NOT_IN_GRAPHS.get(name, {"kv_k", "kv_v"})
    both = [tap for tap in engine if tap in graph and parse(tap).kind.op != "ARGSORT" and not tap.startswith("kv_")]
    for tap in both:
        a, b = engine[tap], graph[tap]
        if tap.startswith("kq-"):
            hidden = np.triu(np.ones(a.shape[-2:], bool), 1)
            a, b = np.where(hidden, 0, a), np.where(hidden, 0, b)
        assert metrics.nmse(b.reshape(1, -1), a.reshape(1, -1), 0) < 1e-10, tap


@pytest.mark.parametrize("name", NAMES)
def test_a_right_engine_of_any_architecture_is_right(name, random_model, by_graph):
    path, trace = by_graph(random_model(name))
    for candidate in (trace, only(trace, "l_out", "result_output")):
        result = compare(path, TOKENS, candidate=candidate, how=How(engine="graph"))
        assert result.verdict in ("match", "noise"), result.summary
        assert not result.diagnosis
        assert not any(row.baseline_local.verdict == "wrong" for row in result.rows)


@pytest.mark.parametrize("model_name", NAMES)
def test_a_wrong_op_of_any_architecture_is_named(model_name, random_model, by_graph):
    path, trace = by_graph(random_model(model_name))
    name = next(tap for tap in trace if tap.endswith("-1") and trace[tap].dtype.kind == "f")
    wrong = changed(trace, **{name.replace("-", "_at_"): lambda x: x * np.float32(1.1)})
    result = compare(path, TOKENS, candidate=wrong, how=How(engine="graph"))
    assert result.first_divergence is not None
    assert result.first_divergence.tap == name


def test_a_wrong_layer_is_named_through_what_was_not_recorded(small_model, by_graph):
    path, trace = by_graph(small_model("qwen3"))
    sparse = only(trace, "l_out", "embd", "result_output")
    wrong = changed(sparse, l_out_at_1=lambda x: x + np.float32(0.1))
    result = compare(path, TOKENS, candidate=wrong, how=How(engine="graph", diagnose=False))
    assert [row.tap for row in result.wrong] == ["l_out-1", "result_output"]  # computed from what was there before
    assert {"attn_norm-1", "Qcur_rope-1", "ffn_out-1"} <= set(result.first_divergence.span)
    assert not result.only_engine_read
    assert "does not read" not in result.summary


ASKED = {
    "decode": (3, Settings()), "f16": (3, Settings("F16", "F16")), "q8_0": (3, Settings("Q8_0", "F32")),
    "flash": (3, Settings(flash_attn=True)), "flash q8_0": (0, Settings("Q8_0", "Q8_0", flash_attn=True)),
    "q4_0": (3, Settings("Q4_0", "F32")), "flash q5_0": (3, Settings("Q5_0", "Q4_0", flash_attn=True)),
}  # fmt: skip


def captured(path: Path, n_predict: int, settings: Settings, output: Path) -> Trace:
    """llama.cpp's own run, as a candidate of the graph."""
    run = Run(tokens=TOKENS, n_predict=n_predict, settings=settings)
    _, trace = by_its_graph(path, text_request(ModelFile(path), run, output))
    return trace


def stays_silent(path: Path, asked: str, output: Path) -> None:
    n_predict, settings = ASKED[asked]
    trace = captured(path, n_predict, settings, output)
    assert len(trace.info.tokens) == len(TOKENS) + n_predict
    assert trace.info.n_prefill == len(TOKENS)
    for candidate in (trace, only(trace, "l_out", "kqv_out", "result_output")):
        run = Run(tokens=TOKENS, n_predict=n_predict, settings=settings)
        result = compare(path, run, candidate, How(engine="graph"))
        assert result.verdict in ("match", "noise"), result.summary
        assert not any(row.baseline_local.verdict == "wrong" for row in result.rows if row.baseline_local)


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "moe", "stablelm"])
def test_decode_steps_and_other_caches_are_followed(name, asked, small_model, tmp_path):
    stays_silent(small_model(name, "Q8_0"), asked, tmp_path / "c.safetensors")


@pytest.mark.parametrize("asked", ["decode", "flash"])
@pytest.mark.parametrize("name", NAMES)
def test_decode_steps_of_any_architecture_are_followed(name, asked, random_model, tmp_path):
    stays_silent(random_model(name), asked, tmp_path / "c.safetensors")


@pytest.mark.parametrize("asked", ASKED)
def test_a_fault_in_a_decode_step_is_named(asked, small_model, tmp_path):
    path, (n_predict, settings) = small_model("qwen3"), ASKED[asked]
    trace = captured(path, n_predict, settings, tmp_path / "c.safetensors")

    def last_row(x: np.ndarray) -> np.ndarray:
        x[-1] *= 1.5
        return x

    for name in ("Kcur_rope-1", "kqv_out-0", "ffn_out-1"):
        wrong = changed(trace, **{name.replace("-", "_at_"): last_row})
        run = Run(tokens=TOKENS, n_predict=n_predict, settings=settings)
        result = compare(path, run, wrong, How(engine="graph", diagnose=False))
        assert result.first_divergence.tap == name
        assert len(result.wrong) <= 2  # what was computed from the right values follows


@pytest.mark.parametrize("tokens", [(5,), (5, 9)], ids=["one token", "as many tokens as heads"])
@pytest.mark.parametrize("name", ["llama", "moe", "gemma2", "deepseek2-old", "deepseek2"])
def test_what_the_engine_calls_a_tap_the_graph_does(name, tokens, small_model, tmp_path):
    """A trace that was recorded for the reference engine has the graph's axes too."""
    path = small_model(name, "Q8_0")
    trace = recorded(path, Run(tokens=tokens), tmp_path / "t.safetensors")
    result = compare(path, candidate=trace, how=How(engine="graph"))
    assert result.verdict == "match", result.summary
    assert len(result.rows) == len(trace)


def test_rows_of_a_quantized_cache_are_rounded(small_model, tmp_path):
    """A candidate with another cache than it says is told from one that has it."""
    path, how = small_model("llama"), How(engine="graph")
    trace = captured(path, 0, Settings("Q8_0", "F32"), tmp_path / "c.safetensors")
    producer = {**trace.info.producer, "settings": {**trace.info.producer["settings"], "type_k": "F32"}}
    liar = Trace(replace(trace.info, producer=producer), {name: np.array(trace[name]) for name in trace}, trace.dtypes)
    assert compare(path, TOKENS, trace, how).verdict in ("match", "noise")
    assert {parse(row.tap).kind.word for row in compare(path, TOKENS, liar, how).wrong} == {"kq"}


def test_an_encoder_sees_all_keys(tmp_path, by_graph):
    path, trace = by_graph(write_model(tmp_path / "dream.gguf", "dream", "Q8_0"))
    result = compare(path, TOKENS, candidate=trace, how=How(engine="graph"))
    assert result.verdict in ("match", "noise"), result.summary
    assert not any(row.baseline_local.verdict == "wrong" for row in result.rows)
    with pytest.raises(UserError, match="no decode steps"):
        captured(path, 1, Settings(), tmp_path / "c.safetensors")


def place(*strides: int, offset: int = 0) -> bytes:
    return np.array([offset, *strides], np.int64).tobytes()


def test_a_view_shows_what_is_written_after_it():
    given = {0: np.zeros((1, 1, 4, 6), np.float32), 1: ramp(1, 1, 2, 2), 2: np.array([[[[3, 1]]]], np.int32)}
    window = (0, place(24, 24, 6, 1, offset=4))
    nodes = [
        node(3, "VIEW", (1, 1, 4, 2), 0, view=window),
        node(4, "SET_ROWS", (1, 1, 4, 2), 1, 2, 3, view=window),
        node(5, "GET_ROWS", (1, 1, 2, 2), 3, 2),
    ]
    engine = engine_of(nodes, given)
    assert np.array_equal(engine.forward((1, 2, 3), (0, 1, 2), Tap())[0], given[1])
    assert 4 in engine.graph.reads(nodes[2])


def test_what_is_computed_in_place_is_in_the_memory_that_others_look_into():
    """As the chunks of a delta net were put together (llama.cpp b8179): each by SET, and all read by a view."""
    whole, twice = (1, 1, 2, 3), np.array([2, 0], np.float32).tobytes()
    given = {0: ramp(*whole), 1: ramp(1, 1, 1, 3) + 100}
    memory = (2, place(6, 6, 3, 1))
    nodes = [
        node(2, "SCALE", whole, 0, params=twice),
        node(3, "SCALE", whole, 2, view=memory, params=twice),
        node(4, "SET", whole, 3, 1, view=memory, params=np.array([12, 24, 24, 12, 1], np.int32).tobytes()),
        node(5, "VIEW", (1, 1, 3, 2), 4, view=(2, place(6, 6, 1, 3))),
    ]
    engine = engine_of(nodes, given)
    found = engine.forward((1, 2, 3), (0, 1, 2), Tap())
    assert found[0, 0, 0].T.tolist() == [[4, 8, 12], [101, 102, 103]]
    assert {2, 3, 4} <= {*engine.graph.reads(nodes[3])}


def test_rows_of_a_cache_may_be_fewer_than_tokens():
    given = {0: np.zeros((1, 1, 4, 4), np.float32), 1: ramp(1, 1, 2, 4), 2: np.array([[[[3, 1]]]], np.int32)}
    window = (0, place(16, 16, 4, 1))
    engine = engine_of([node(3, "SET_ROWS", (1, 1, 4, 4), 1, 2, 0, view=window)], given, w0="cache_k_l0")
    assert np.array_equal(engine.forward((1, 2, 3), (0, 1, 2), Tap())[0, 0, 0, [3, 1]], given[1][0, 0])


def test_nodes_need_no_sources():
    engine = engine_of([node(0, "ARANGE", (1, 1, 1, 3), params=np.array([2, 5, 1], np.float32).tobytes())], {})
    assert engine.forward((1, 2, 3), (0, 1, 2), Tap()).ravel().tolist() == [2, 3, 4]


def test_weights_may_be_viewed_and_whole_numbers(tmp_path):
    numbers, matrix = np.arange(12, dtype=np.int32).reshape(4, 3) + (1 << 24), ramp(4, 3)
    path = write_model(tmp_path / "a.gguf", kind="F32", tensors={"ids.weight": numbers, "some.weight": matrix})
    weights = Weights(path)
    given = {0: matrix, 1: numbers, 2: np.array([[[[3, 1]]]], np.int32)}
    nodes = [
        node(3, "VIEW", (1, 1, 4, 2), 0, view=(0, place(12, 12, 3, 1, offset=1))),
        node(4, "GET_ROWS", (1, 1, 2, 3), 1, 2),
    ]
    names = {"w0": "some.weight", "w1": "ids.weight"}
    for count, expected in ((1, matrix[:, 1:]), (2, numbers[[3, 1]])):
        engine = engine_of(nodes[:count], given, weights, **names)
        assert np.array_equal(engine.forward((1, 2, 3), (0, 1, 2), Tap())[0, 0, 0], expected)


def test_a_product_of_values_takes_the_type_they_are_kept_in(tmp_path):
    """As a convolution: columns in float16, times a weight that is the second operand."""
    kinds: list[str] = []

    class Noting(Tap):
        def operands(self, kind: str, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
            kinds.append(kind)
            assert all(array.size for array in arrays)
            return arrays

    matrix, columns = ramp(4, 3), ramp(1, 1, 2, 3)
    weights = Weights(write_model(tmp_path / "a.gguf", kind="F32", tensors={"some.weight": matrix}))
    nodes = [replace(node(2, "CPY", (1, 1, 2, 3), 1), kind="f16"), node(3, "MUL_MAT", (1, 1, 4, 2), 2, 0)]
    engine = engine_of(nodes, {0: matrix, 1: columns}, weights, w0="some.weight")
    found = engine.forward((1, 2, 3), (0, 1, 2), Noting())
    assert np.array_equal(found[0, 0, 0], matrix @ columns[0, 0].T)
    assert kinds == ["F16"]
