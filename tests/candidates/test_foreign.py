"""What people have instead of a dump, and what they are told to do with it."""

from __future__ import annotations

import io
import json
import pickle
import zipfile

import numpy as np
import pytest
from llamaref import Engine
from optional import needs_slices
from safetensors.numpy import save_file

from llamadiff import Trace, UserError, compare, diff, plugins
from llamadiff.candidates.reference import record
from llamadiff.engines.run_spec import How
from llamadiff.numerics.transposes import transpose_to
from llamadiff.trace.metadata import KEY

TOKENS = (1, 17, 5, 80, 42, 9, 33)


@pytest.fixture(scope="module")
def right(small_model):
    trace = record(Engine(small_model()), TOKENS, "mine")
    return {name: trace[name] for name in trace}


def saved(path, arrays, tokens=True):
    metadata = {KEY: json.dumps({"schema": "llamadiff.trace/1", "tokens": TOKENS})} if tokens else None
    save_file({name: np.ascontiguousarray(x) for name, x in arrays.items()}, path, metadata)
    return path


def told(candidate, small_model, **options):
    with pytest.raises(UserError) as caught:
        compare(small_model(), TOKENS, candidate=str(candidate), how=How(partial=True, **options))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("tokens", [True, False], ids=["stated", "not stated"])
def test_a_batch_of_one_is_accepted_in_a_trace(tokens, right, small_model, tmp_path):
    path = saved(tmp_path / "t.safetensors", {name: x[None] for name, x in right.items()}, tokens)
    result = compare(small_model(), TOKENS, candidate=str(path))
    assert result.verdict == "match"
    assert len(result.rows) == len(right)


def test_a_batch_of_one_is_accepted_between_two_traces(right, small_model, tmp_path):
    plain = saved(tmp_path / "b.safetensors", right)
    batch = saved(tmp_path / "c.safetensors", {name: x[None] for name, x in right.items()})
    assert diff(plain, batch).verdict == "match"
    assert diff(plain, batch, small_model()).verdict == "match"


def test_one_token_is_no_batch(small_model, tmp_path):
    arrays = {"Qcur_proj-0": np.zeros((1, 4, 64), np.float32), "embd": np.zeros((1, 1, 256), np.float32)}
    metadata = {KEY: json.dumps({"schema": "llamadiff.trace/1", "tokens": [5]})}
    save_file(arrays, tmp_path / "t.safetensors", metadata)
    trace = Trace.open(tmp_path / "t.safetensors")
    assert (trace.shape("Qcur_proj-0"), trace.shape("embd")) == ((1, 4, 64), (1, 256))


@pytest.mark.parametrize("batch", [True, False])
def test_built_in_maps_take_both(batch, right, small_model, tmp_path):
    names = {"model.layers.0.mlp.gate_proj": "ffn_gate-0", "model.layers.1.mlp.down_proj (input)": "ffn_swiglu-1"}
    arrays = {name: right[tap][None] if batch else right[tap] for name, tap in names.items()}
    path = str(saved(tmp_path / "t.safetensors", arrays))
    result = compare(small_model(), candidate=path, how=How(name_map="hf", partial=True))
    assert [row.tap for row in result.rows] == ["ffn_gate-0", "ffn_swiglu-1"]
    assert result.verdict in ("match", "noise")


@needs_slices("hints")
@pytest.mark.parametrize(
    ("names", "advice"),
    [
        (("model.layers.0.mlp.gate_proj", "mine"), "these are the names of Hugging Face's modules: add --map hf"),
        (("logits",), "the logits are called result_output"),
        (("blocks.0.mlp.hook_pre",), "these are the names of TransformerLens' hooks: add --map transformer-lens"),
        (("model.layers.0.mlp.gate_proj.weight",), "a model's weights, not what it computed; --candidate transformers"),
    ],
)
def test_names_of_another_library_are_known(names, advice, right, small_model, tmp_path):
    path = saved(tmp_path / "t.safetensors", dict.fromkeys(names, right["ffn_gate-0"]))
    assert advice in told(path, small_model)


def test_a_map_that_takes_names_away_is_refused(right, small_model, tmp_path):
    """Of those that are taps' own, where it translates none: it is of another library."""
    own = ("ffn_gate-0", "ffn_swiglu-0")  # of the second, the map has another name too
    path = saved(tmp_path / "t.safetensors", {name: right[name] for name in own})
    lost = "--map translates no name of the candidate's, and loses 1 that are taps' own (the first is ffn_gate-0)"
    assert lost in told(path, small_model, name_map="hf")
    both = saved(tmp_path / "u.safetensors", {"ffn_gate-0": right["ffn_gate-0"], "lm_head": right["result_output"]})
    assert compare(small_model(), candidate=str(both), how=How(name_map="hf", partial=True)).verdict == "match"


def test_a_transpose_that_fits_is_said(right, small_model, tmp_path):
    moved = right["Qcur_rope-0"].transpose(1, 0, 2)
    (tmp_path / "dump").mkdir()
    np.save(tmp_path / "dump" / "Qcur_rope-0.npy", moved)
    message = told(tmp_path / "dump", small_model)
    assert "x.transpose(1, 0, 2) makes it so" in message
    assert 'axes = "head token dim" would fit' in message
    trace = saved(tmp_path / "t.safetensors", {"Qcur_rope-0": moved})
    result = compare(small_model(), candidate=trace, how=How(partial=True))
    assert (result.verdict, "x.transpose(1, 0, 2) makes it so" in result.summary) == ("wrong", True)


@pytest.mark.parametrize(
    ("have", "want", "said"),
    [
        ((4, 7, 64), (7, 4, 64), "x.transpose(1, 0, 2)"),
        ((64, 4, 7), (7, 4, 64), "x.transpose(2, 1, 0)"),
        ((4, 64, 7), (7, 4, 64), "x.transpose(2, 0, 1)"),
        ((256, 7), (7, 256), "x.transpose(1, 0)"),
        ((7, 4, 64), (7, 4, 64), None),
        ((4, 4, 7), (7, 4, 4), None),  # two fit
        ((4, 7), (7, 4, 1), None),
        ((4, 8, 64), (7, 4, 64), None),
    ],
)
def test_a_transpose_is_the_only_one(have, want, said):
    assert transpose_to(have, want) == said
    if said:
        assert eval(said, {"x": np.zeros(have)}).shape == want


def pickled(kind):
    """A pickle that would make a file if it were opened."""

    class Bomb:
        def __reduce__(self):
            return open, ("opened", "w")

    data = pickle.dumps(Bomb())
    if kind == "plain":
        return data
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr("archive/data.pkl", data)
    return whole.getvalue()


@needs_slices("hints")
@pytest.mark.parametrize("kind", ["plain", "zip"])
@pytest.mark.parametrize("name", ["mine.pt", "pytorch_model.bin", "x.pth", "dump/l_out-0.pt"])
def test_a_pickle_is_not_opened_and_the_way_out_is_said(name, kind, small_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(pickled(kind))
    message = told(path.parent if "/" in name else path, small_model)
    refused = "is a pickle, which can run code and is not opened; save the tensors instead: safetensors.torch"
    called = f"its pickle would call {open.__module__}.open, and none of it was run"
    read = called if "dumps" in plugins.slices() else refused
    assert (read if kind == "zip" and not name.endswith(".bin") else refused) in message
    assert not (tmp_path / "opened").exists()


def test_raw_values_may_be_called_bin(small_model, tmp_path):
    (tmp_path / "mine.bin").write_bytes(bytes(64))
    assert "pickle" not in told(tmp_path / "mine.bin", small_model)


@needs_slices("hints")
def test_a_directory_of_hugging_face_is_to_be_run(right, small_model, tmp_path):
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    saved(tmp_path / "model.safetensors", {"model.embed_tokens.weight": right["embd"]}, False)
    assert f"--candidate transformers:{tmp_path} runs it" in told(tmp_path, small_model)
