"""llama.cpp's graph as an engine: candidates of any architecture, and agreement with the reference engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from faulty import BUGS
from llamaref import Engine

from llamadiff import Trace, compare, metrics
from llamadiff.asking import text_request
from llamadiff.candidates.engine import record
from llamadiff.graphmodel import by_its_graph
from llamadiff.llamacpp.request import Settings
from llamadiff.model import ModelFile
from llamadiff.taps import parse

TOKENS = (1, 5, 9, 30, 17, 22, 64)
SHARED = Path(__file__).parent.parent.parent / "shared" / "models" / "random"
RANDOM = sorted(SHARED.glob("*.gguf")) if SHARED.exists() else []


@pytest.fixture
def by_graph(tmp_path):
    """A model with its graph, and what its own engine records."""

    def get(path: Path) -> tuple[Path, Trace]:
        output = tmp_path / "b.safetensors"
        model, _ = by_its_graph(path, text_request(ModelFile(path), None, TOKENS, False, 0, output, Settings()))
        return path, record(model.engine, TOKENS, "my engine")

    return get


def changed(trace: Trace, **taps) -> Trace:
    arrays = {name: np.array(trace[name]) for name in trace}
    for name, change in taps.items():
        arrays[name.replace("_at_", "-")] = change(arrays[name.replace("_at_", "-")])
    return Trace(trace.info, arrays, trace.dtypes)


def only(trace: Trace, *patterns: str) -> Trace:
    kept = {name: trace[name] for name in trace if name.startswith(patterns)}
    return Trace(trace.info, kept, trace.dtypes)


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
    both = [tap for tap in engine if tap in graph and parse(tap).kind.op != "ARGSORT" and not tap.startswith("kv_")]
    assert len(both) > 15
    for tap in both:
        a, b = engine[tap], graph[tap]
        if tap.startswith("kq-"):
            hidden = np.triu(np.ones(a.shape[-2:], bool), 1)
            a, b = np.where(hidden, 0, a), np.where(hidden, 0, b)
        assert metrics.nmse(b.reshape(1, -1), a.reshape(1, -1), 0) < 1e-10, tap


@pytest.mark.parametrize("path", RANDOM, ids=lambda path: path.stem)
def test_a_right_engine_of_any_architecture_is_right(path, by_graph):
    """Runs where the shared models lie beside the checkout."""
    path, trace = by_graph(path)
    for candidate in (trace, only(trace, "l_out", "result_output")):
        result = compare(path, tokens=TOKENS, candidate=candidate, engine="graph")
        assert result.verdict in ("match", "noise"), result.summary
        assert not any(row.baseline_local.verdict == "wrong" for row in result.rows)


@pytest.mark.parametrize("path", RANDOM, ids=lambda path: path.stem)
def test_a_wrong_op_of_any_architecture_is_named(path, by_graph):
    path, trace = by_graph(path)
    name = next(tap for tap in trace if tap.endswith("-1") and trace[tap].dtype.kind == "f")
    wrong = changed(trace, **{name.replace("-", "_at_"): lambda x: x * np.float32(1.1)})
    result = compare(path, tokens=TOKENS, candidate=wrong, engine="graph")
    assert result.first_divergence is not None
    assert result.first_divergence.tap == name


def test_a_wrong_layer_is_named_through_what_was_not_recorded(small_model, by_graph):
    path, trace = by_graph(small_model("qwen3"))
    sparse = only(trace, "l_out", "embd", "result_output")
    wrong = changed(sparse, l_out_at_1=lambda x: x + np.float32(0.1))
    result = compare(path, tokens=TOKENS, candidate=wrong, engine="graph")
    assert [row.tap for row in result.wrong] == ["l_out-1", "result_output"]  # computed from what was there before
    assert {"attn_norm-1", "Qcur_rope-1", "ffn_out-1"} <= set(result.first_divergence.span)
    assert not result.only_engine_read
    assert "does not read" not in result.summary


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_bugs_are_named_through_the_graph_as_through_the_engine(bug, small_model):
    path = small_model(bug.arch)
    result = compare(path, tokens=TOKENS, candidate=record(bug.build(path), TOKENS, "mine"), engine="graph")
    words = {parse(row.tap).kind.word for row in result.wrong}
    assert bug.words[0] in words
    assert parse(result.first_divergence.tap).kind.word == bug.words[0]


ASKED = {
    "decode": (3, Settings()), "f16": (3, Settings("F16", "F16")), "q8_0": (3, Settings("Q8_0", "F32")),
    "flash": (3, Settings(flash_attn=True)), "flash q8_0": (0, Settings("Q8_0", "Q8_0", flash_attn=True)),
}  # fmt: skip


def captured(path: Path, n_predict: int, settings: Settings, output: Path) -> Trace:
    """llama.cpp's own run, as a candidate of the graph."""
    _, trace = by_its_graph(path, text_request(ModelFile(path), None, TOKENS, False, n_predict, output, settings))
    return trace


def stays_silent(path: Path, asked: str, output: Path) -> None:
    n_predict, settings = ASKED[asked]
    trace = captured(path, n_predict, settings, output)
    assert len(trace.info.tokens) == len(TOKENS) + n_predict
    assert trace.info.n_prefill == len(TOKENS)
    for candidate in (trace, only(trace, "l_out", "kqv_out", "result_output")):
        how = {"tokens": TOKENS, "n_predict": n_predict, "settings": settings, "engine": "graph"}
        result = compare(path, candidate=candidate, **how)
        assert result.verdict in ("match", "noise"), result.summary
        assert not any(row.baseline_local.verdict == "wrong" for row in result.rows if row.baseline_local)


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "moe", "stablelm"])
def test_decode_steps_and_other_caches_are_followed(name, asked, small_model, tmp_path):
    stays_silent(small_model(name, "Q8_0"), asked, tmp_path / "c.safetensors")


@pytest.mark.parametrize("asked", ["decode", "flash"])
@pytest.mark.parametrize("path", RANDOM, ids=lambda path: path.stem)
def test_decode_steps_of_any_architecture_are_followed(path, asked, tmp_path):
    stays_silent(path, asked, tmp_path / "c.safetensors")


@pytest.mark.parametrize("asked", ASKED)
def test_a_fault_in_a_decode_step_is_named(asked, small_model, tmp_path):
    path, (n_predict, settings) = small_model("qwen3"), ASKED[asked]
    trace = captured(path, n_predict, settings, tmp_path / "c.safetensors")

    def last_row(x: np.ndarray) -> np.ndarray:
        x[-1] *= 1.5
        return x

    for name in ("Kcur_rope-1", "kqv_out-0", "ffn_out-1"):
        wrong = changed(trace, **{name.replace("-", "_at_"): last_row})
        how = {"tokens": TOKENS, "n_predict": n_predict, "settings": settings, "engine": "graph"}
        result = compare(path, candidate=wrong, **how)  # and what was computed from the right values follows
        assert result.first_divergence.tap == name
        assert len(result.wrong) <= 2


def test_rows_of_a_quantized_cache_are_rounded(small_model, tmp_path):
    """A candidate with another cache than it says is told from one that has it."""
    path, how = small_model("llama"), {"tokens": TOKENS, "engine": "graph"}
    trace = captured(path, 0, Settings("Q8_0", "F32"), tmp_path / "c.safetensors")
    producer = {**trace.info.producer, "settings": {**trace.info.producer["settings"], "type_k": "F32"}}
    liar = Trace(replace(trace.info, producer=producer), {name: np.array(trace[name]) for name in trace}, trace.dtypes)
    assert compare(path, candidate=trace, **how).verdict in ("match", "noise")
    assert {parse(row.tap).kind.word for row in compare(path, candidate=liar, **how).wrong} == {"kq"}
