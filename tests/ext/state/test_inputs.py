"""What llama.cpp's passes are given is held against who sees whom: what is other is WRONG, in words that say where."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llamadiff.engines.run_spec import How, Run
from llamadiff.ext.graph.backend import judge_graph
from llamadiff.ext.state.graph_inputs import MASK, POSITIONS, READ, ROWS
from llamadiff.ext.state.inputs import Cells, Inputs
from llamadiff.ext.state.variants import run_variants
from llamadiff.judge.preflight.checks import given_rightly
from llamadiff.llamacpp.sent_tensor import SentTensor
from llamadiff.llamacpp.steps import DECODE, Step
from llamadiff.llamacpp.steps import SHIFT as SHIFTED
from llamadiff.trace.metadata import UNSURE_INPUTS, Info
from llamadiff.verbs.verbs import compare

TOKENS = (1, 17, 5, 40, 2, 9, 33, 12)


@pytest.fixture
def spoiled(monkeypatch):
    """spoiled(kind, change): what is told of this kind is altered in the second batch."""
    real = Inputs.check_node

    def of(kind, change):
        def check_node(self, answer, data, order):
            if answer["given"] == kind and self.batch == 2:
                values = np.array(SentTensor(answer["tensor"], data=data[0], order=order).values()) if data else None
                if values is not None:
                    change(self, values)
                    tensor = {
                        **answer["tensor"],
                        "type": {"i": f"i{8 * values.itemsize}", "f": "f32"}[values.dtype.kind],
                    }
                    answer, data = {**answer, "tensor": tensor}, [values.tobytes()]
            real(self, answer, data, order)

        monkeypatch.setattr(Inputs, "check_node", check_node)

    return of


def said(model, name):
    """What is said of a variant before its layers, and of which verdict it is."""
    [_, row] = run_variants(model, Run(tokens=TOKENS), How(), (name,)).rows
    assert row.failed == ""
    return row.verdict, [check.found for check in row.comparison.preflight if check.name == "inputs"]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mamba2", "deepseek2", "gpt-oss"])
@pytest.mark.parametrize("name", ["interleaved=3", "restored=on", "forked=on", "batch=3", "ubatch=3"])
def test_right_ones_are_not_accused(kind, name, small_model):
    assert said(small_model(kind), name)[1] == []


def test_rows_of_another_sequence_are_named(small_model, spoiled):
    def change(inputs, values):
        cells = next(iter(inputs.caches.values()))
        place = next(place for place, row in enumerate(inputs.current) if row.sequence == 1)
        values.reshape(-1, values.shape[-1])[place, cells.held[0][0]] = 0

    spoiled(MASK, change)
    verdict, found = said(small_model(), "interleaved=3")
    assert verdict == "wrong"
    assert found[0] == "in the 2nd batch token 0 of sequence 1 sees rows of sequence 0"


def test_a_hidden_row_is_named(small_model, spoiled):
    def change(inputs, values):
        own = next(iter(inputs.caches.values())).held[0]
        values.reshape(-1, values.shape[-1])[0, own[0]] = -np.inf

    spoiled(MASK, change)
    assert said(small_model(), "batch=3")[1][0] == "in the 2nd batch token 0 of sequence 0 does not see positions 0"


def test_a_later_row_is_named(small_model, spoiled):
    def change(inputs, values):
        own = next(iter(inputs.caches.values())).held[0]
        values.reshape(-1, values.shape[-1])[0, own[inputs.current[-1].number]] = 0

    spoiled(MASK, change)
    assert (
        said(small_model(), "batch=3")[1] == ["in the 2nd batch token 0 of sequence 0 sees rows that nobody wrote"]
        or "hidden" in said(small_model(), "batch=3")[1][0]
    )


def test_a_position_is_named(small_model, spoiled):
    spoiled(POSITIONS, lambda _, values: values.__iadd__(1))
    verdict, found = said(small_model(), "batch=3")
    assert (verdict, found[0]) == ("wrong", "in the 2nd batch token 0 of sequence 0 has position 4, not 3")


def test_a_row_that_is_written_over_is_named(small_model, spoiled):
    def change(inputs, values):
        values.reshape(-1)[0] = 0  # where the first token is

    spoiled(ROWS, change)
    found = said(small_model(), "batch=3")[1]
    assert found[0] == (
        "in the 2nd batch token 0 of sequence 0 is written over position 0 in cache_k_l0, which sequence 0 still sees"
    )


def test_a_state_of_another_sequence_is_named(small_model, monkeypatch):
    real = Inputs.check_node

    def check_node(self, answer, data, order):
        if answer["given"] == READ and self.batch == 2:
            answer = {**answer, "ids": [(cell + 1) % 3 for cell in answer["ids"]]}
        real(self, answer, data, order)

    monkeypatch.setattr(Inputs, "check_node", check_node)
    found = said(small_model("mamba2"), "interleaved=3")[1]
    assert found[0].startswith("in the 2nd batch token 0 of sequence ")
    assert " begins with the state after position " in found[0]


def test_rows_that_are_not_turned_are_named():
    inputs = Inputs()
    for position in (0, 6):
        inputs.do(Step(DECODE, (), (1,), (position,), (0,)))
        inputs.run([0])
        inputs.is_turned = True
        inputs.do(Step(SHIFTED, (0, 0, -1, 5)))
    assert inputs.faults == [
        "in the 2nd batch token 0 of sequence 0 sees position 5, which moved by 5 and was not turned"
    ]


def test_a_window_that_ends_late_is_named(small_model, spoiled):
    """A single token that is not masked as those of the first batch were."""

    def change(inputs, values):
        for cells in inputs.caches.values():
            if cells.windows and cells.windows[0].length:
                values[:] = np.where(np.arange(values.shape[-1]) <= inputs.current[0].position, 0, -np.inf)

    spoiled(MASK, change)
    assert any("hidden" in fault for fault in said(small_model("gemma2"), "batch=5")[1])


def test_a_candidate_says_it_in_its_headline(small_model, spoiled):
    spoiled(POSITIONS, lambda _, values: values.__iadd__(1))
    result = compare(small_model(), Run(tokens=TOKENS), "llama.cpp:batch=3")
    assert result.verdict == "wrong"
    assert "before any layer, inputs: in the 2nd batch token 0 of sequence 0 has position 4, not 3" in result.headline


def test_backend_says_it_beside_its_nodes(small_model, spoiled):
    spoiled(POSITIONS, lambda _, values: values.__iadd__(1))
    result = judge_graph(small_model(), Run(tokens=TOKENS, n_predict=1))
    assert (result.verdict, result.wrong) == ("wrong", ())
    assert "before any node, inputs: in the 2nd batch token 0 of sequence 0 has position 9, not 8" in result.headline
    assert judge_graph(small_model(), Run(tokens=TOKENS)).verdict == "match"


def test_a_layer_may_have_any_window_of_the_model_and_keeps_it():
    inputs = Inputs()
    inputs.set_window(4)
    assert [window.length for window in inputs.windows] == [0, 4, 4]
    assert replace(inputs.windows[1], chunked=True) == inputs.windows[2]


def test_where_llama_cpp_does_not_say_how_far_its_windows_reach_nothing_is_a_fault():
    """What is not seen may be out of a window: UNCHECKED, with the reason; what is seen and hidden is still wrong."""
    for length, faults, unsure in ((0, 1, 0), (None, 0, 1)):
        inputs = Inputs()
        inputs.set_window(length)
        inputs.do(Step(DECODE, (), (0,) * 6, tuple(range(6)), (0,) * 6))
        inputs.run(range(6))
        inputs.caches["cache_k_l0"] = Cells(inputs.windows, {0: {n: n for n in range(6)}})
        row = inputs.current[5]
        inputs._find(inputs._looked(inputs.caches["cache_k_l0"], row, [3, 4, 5]))
        assert (len(inputs.faults), len(inputs.unsure)) == (faults, unsure)
    assert inputs.unsure[0].endswith("; this llama.cpp does not say how far layers with a window see")
    info = Info((1,), (0,), 1, None, {"name": "llama.cpp", UNSURE_INPUTS: inputs.unsure}, {})
    assert [(check.verdict, check.found) for check in given_rightly(info)] == [("unchecked", inputs.unsure[0])]
