"""A capture keeps llama.cpp's graph in the trace: what is wrong is explained from the file, without llama.cpp."""

from __future__ import annotations

import numpy as np
import pytest
from proof.injected import INJECTIONS
from proof.injected.base import TOKENS
from proof.injected.runs import record_faulty

from llamadiff import Trace
from llamadiff.engines.reference_model import Model
from llamadiff.engines.run_spec import Run
from llamadiff.ext.graph import model as graph_model
from llamadiff.ext.graph.engine import _window
from llamadiff.ext.graph.graph import GRAPH
from llamadiff.ext.graph.model import graph_of_run
from llamadiff.llamacpp.child import Child
from llamadiff.system.errors import UserError
from llamadiff.trace.writer import TraceWriter
from llamadiff.verbs import verbs
from llamadiff.verbs.verbs import diff


@pytest.fixture(scope="module")
def captured(small_model, tmp_path_factory):
    return verbs.record(
        small_model(), Run(tokens=TOKENS[:8], n_predict=4), tmp_path_factory.mktemp("kept") / "t.safetensors"
    )


def test_the_kept_graph_is_the_one_that_llama_cpp_makes(captured, small_model):
    kept, made = graph_of_run(Model(small_model()), captured), graph_of_run(Model(small_model()), captured.in_memory())
    assert kept.graph.nodes == made.graph.nodes
    assert kept.graph.leaves == made.graph.leaves
    assert GRAPH not in captured  # no tap
    assert len(captured.attached(GRAPH)) < 20_000


def test_the_process_that_ran_the_model_is_asked_for_the_graph(captured, small_model, monkeypatch):
    kept = graph_of_run(Model(small_model()), captured)
    with Child() as child:
        monkeypatch.setattr(graph_model, "Child", lambda *_: pytest.fail("a second process was started"))
        made = graph_of_run(Model(small_model()), captured.in_memory(), child=child)
    assert kept.graph.nodes == made.graph.nodes


def test_what_is_wrong_is_explained_without_llama_cpp(captured, small_model, monkeypatch):
    monkeypatch.setattr(Child, "ask", lambda *_: pytest.fail("llama.cpp was asked"))
    injection = next(each for each in INJECTIONS if each.name == "head tied")
    faulty = record_faulty(injection, small_model(), captured.info.tokens)
    info = captured.info
    result = diff(captured, Trace(info, {name: faulty[name] for name in faulty}, faulty.dtypes), small_model())
    assert [cause.name for cause in result.diagnosis[0].causes] == ["head-tied"]


def test_a_damaged_graph_is_said(captured, small_model, tmp_path):
    with TraceWriter(tmp_path / "damaged.safetensors") as writer:
        writer.add("embd", captured["embd"])
        writer.attach(GRAPH, b"no graph")
        writer.finish(captured.info)
    with pytest.raises(UserError, match=r"the graph in it cannot be read .*; capture it again"):
        graph_of_run(Model(small_model()), Trace.open(tmp_path / "damaged.safetensors"))


@pytest.mark.parametrize("place", [(-1, 1, 1, 1, 1), (0, 1, 1, 1, 5), (0, -1, 1, 1, 1), (3, 1, 1, 1, 1)])
def test_a_view_stays_within_its_memory(place):
    with pytest.raises(ValueError, match="a view of values"):
        _window(np.zeros((1, 1, 1, 1, 4), np.float32), (1, 1, 1, 2), np.array(place, np.int64).tobytes())
