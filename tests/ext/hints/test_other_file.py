"""A trace of another file: of another model it is refused, of another quantization that is said; a bug is neither."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from llamaref import Engine, Weights
from models.small import write_model
from traces import changed

from llamadiff import UserError, diff
from llamadiff.candidates.reference import record
from llamadiff.engines.reference_model import Model
from llamadiff.engines.run_spec import How
from llamadiff.ext.hints.other_weights import refuse_other_model

TOKENS = (1, 17, 5)
LAYERS = 1


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    return {kind: write_model(folder / f"{kind}.gguf", kind=kind, layers=LAYERS) for kind in ("F16", "Q4_0", "Q8_0")}


@pytest.fixture(scope="module")
def traces(files):
    return {kind: record(Engine(path), TOKENS, "mine") for kind, path in files.items()}


@pytest.mark.parametrize(("ran", "given"), [("F16", "Q4_0"), ("Q4_0", "F16"), ("F16", "Q8_0")])
def test_another_quantization_is_said_first_and_no_bug_is_searched_for(ran, given, traces, files):
    result = diff(traces[ran], traces[ran], files[given])
    assert (result.verdict, result.diagnosis) == ("wrong", ())
    said = f"before any layer, weights: its weights are near {files[given].name}'s, and are others: "
    assert result.summary.startswith(said)
    assert "give the file that was run, such as another quantization" in result.summary


def noisy(x):
    return x * (1 + 0.02 * np.random.default_rng(1).standard_normal(x.shape).astype(np.float32))


BUGS = {
    "none": lambda trace: trace,
    "one product": lambda trace: changed(trace, **{"ffn_out-0": noisy(trace["ffn_out-0"])}),
    "the lookup alone": lambda trace: changed(trace, embd=noisy(trace["embd"])),
    "a norm too": lambda trace: changed(trace, **{name: noisy(trace[name]) for name in trace if "norm" in name}),
    "products, but no lookup": lambda trace: changed(
        trace, **{name: noisy(trace[name]) for name in trace if name.startswith(("Qcur_proj", "ffn_up", "Vcur_proj"))}
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_no_other_file(bug, traces, files):
    trace = BUGS[bug](traces["F16"])
    assert "are others" not in diff(trace, trace, files["F16"], How(diagnose=False)).summary


class Sized(dict):
    """The shapes of a trace, some of them changed; its values are not asked for."""

    def __init__(self, trace, columns):
        shapes = {name: trace.shape(name) for name in trace}
        for name in trace:
            if (word := name.partition("-")[0]) in columns:
                shapes[name] = (shapes[name][0], columns[word])
        super().__init__(shapes)
        self.info, self.known, self.path, self.shape = trace.info, {}, None, shapes.__getitem__


def test_a_trace_of_other_weights_is_refused_and_one_of_blocks_decoded_wrongly_is_not(traces, files, tmp_path):
    other = record(Engine(write_model(tmp_path / "other.gguf", layers=LAYERS, seed=2)), TOKENS, "mine")
    with pytest.raises(UserError, match=r"another model than F16.gguf: the lookup .*; give the model that it is of"):
        diff(other, other, files["F16"], How(diagnose=False))
    weights = Weights(tmp_path / "other.gguf")
    matrices = {name: weights.whole(name) for name in weights if len(weights.shape(name)) > 1}
    garbled = record(Engine(write_model(tmp_path / "g.gguf", layers=LAYERS, tensors=matrices)), TOKENS, "mine")
    result = diff(garbled, garbled, files["F16"], How(diagnose=False))
    assert result.verdict == "wrong"


LARGER = {"embd": 512, "attn_norm": 512, "l_out": 512, "ffn_gate": 1024, "ffn_up": 1024}


@pytest.mark.parametrize(
    ("columns", "layer", "said"),
    [
        (LARGER, "", "the candidate: is a trace of another model than .*: the sizes of "),
        ({"result_output": 90_000, "ffn_up": 1100}, "", "the sizes of 2 of its "),
        ({"result_output": 90_000}, "l_out-7", "it has layer 7 of 0 to 0, and the sizes of 1 of its "),
    ],
)
def test_a_trace_of_another_model_is_refused(columns, layer, said, traces, files):
    trace = Sized(traces["F16"], columns)
    trace |= {layer: (3, 256)} if layer else {}
    with pytest.raises(UserError, match=said) as caught:
        refuse_other_model(Model(files["F16"]), trace)
    assert "are right; give the model that it is of" in str(caught.value)


@pytest.mark.parametrize(
    "columns",
    [{}, {"result_output": 104}, {"result_output": 48, "ffn_gate": 256, "ffn_up": 256},
     {"ffn_gate": 9, "ffn_up": 9, "ffn_swiglu": 9}, {"embd": 9},
     {**dict.fromkeys(("Kcur_proj", "Vcur_proj", "Kcur_rope", "kv_k", "kv_v"), 256)}],
)  # fmt: skip
def test_what_an_engine_may_get_wrong_is_judged(columns, traces, files):
    trace = Sized(traces["F16"], columns)
    trace |= {"l_out-7": (3, 256)}
    refuse_other_model(Model(files["F16"]), trace)
    trace.info = replace(trace.info, tokens=(*TOKENS, 9))  # of another number of tokens no size is known
    refuse_other_model(Model(files["F16"]), trace)
