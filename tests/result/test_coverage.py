"""What was not judged does not count as right: a run passes only if it reaches the logits, or if less was asked for."""

from __future__ import annotations

import json

import numpy as np
import pytest
from llamaref import Engine
from optional import needs_slices
from safetensors.numpy import save_file

from llamadiff import compare
from llamadiff.candidates.reference import record
from llamadiff.cli.app import app
from llamadiff.engines.run_spec import USUAL, How, Run
from llamadiff.report.json import to_object
from llamadiff.trace.metadata import KEY
from llamadiff.trace.reader import Trace
from llamadiff.verbs.check_traces import check_each
from llamadiff.verbs.verbs import check, diff
from llamadiff.verbs.verbs import record as capture

TOKENS = (1, 17, 5)


@pytest.fixture(scope="module")
def right(small_model):
    return record(Engine(small_model()), TOKENS, "mine")


def only(trace, *names, **renamed):
    kept = {name: trace[name] for name in trace if name in names} | {new: trace[old] for new, old in renamed.items()}
    return Trace(trace.info, kept, dict.fromkeys(kept, "F32"))


def written(path, trace, names=None):
    """A stranger's file: the taps under other names."""
    arrays = {(names or {}).get(name, name): np.array(trace[name]) for name in trace}
    save_file(arrays, path, {KEY: json.dumps({"schema": "llamadiff.trace/1", "tokens": TOKENS})})
    return path


@pytest.mark.parametrize("names", [("embd",), ("l_out-0", "l_out-1"), ("result_norm",), ("embd", "ffn_up-1")])
def test_what_does_not_reach_the_logits_is_unchecked(names, right, small_model, tmp_path):
    part = written(tmp_path / "t.safetensors", only(right, *names))
    for result in (diff(right, part, small_model()), compare(small_model(), candidate=part)):
        assert result.verdict == "unchecked"
        assert f"right as far as it was recorded: {len(names)} of 37 taps" in result.summary
        assert any("result_output" in step for step in result.next_steps)
        assert any("--partial" in step for step in result.next_steps)
        assert to_object(result)["coverage"]["reached"] is False


def test_asking_for_less_is_enough(right, small_model, tmp_path):
    part = written(tmp_path / "t.safetensors", only(right, "embd", "l_out-0"))
    assert diff(right, part, small_model(), how=How(partial=True)).verdict == "match"
    assert compare(small_model(), candidate=part, how=How(partial=True)).verdict == "match"
    assert compare(small_model(), Run(patterns=("embd",)), candidate=part).verdict == "match"
    assert compare(small_model(), Run(layers=range(1)), candidate=part).verdict == "match"


@needs_slices("explain")
@pytest.mark.parametrize(("partial", "code"), [((), 2), (("--partial",), 0)])
def test_the_commands_ask_for_the_logits(partial, code, right, small_model, tmp_path):
    part = written(tmp_path / "t.safetensors", only(right, "embd", "l_out-0"))
    whole, model = written(tmp_path / "w.safetensors", right), str(small_model())
    for arguments in (
        ("compare", model, "--candidate", part), ("diff", whole, part, "--model", model), ("diff", whole, part),
        ("check", part, "--model", model),
    ):  # fmt: skip
        assert app([*map(str, arguments), *partial], standalone_mode=False) == code, arguments
    assert app(["check", str(whole), "--model", model], standalone_mode=False) == 0


def test_the_logits_alone_are_enough(right, small_model, tmp_path):
    assert diff(right, only(right, "result_output"), small_model()).verdict in ("match", "noise")
    for row in ("@-1", "@2"):
        (tmp_path / row).mkdir()
        np.save(tmp_path / row / f"result_output{row}.npy", right["result_output"][2])
        result = compare(small_model(), TOKENS, candidate=tmp_path / row)
        assert result.verdict in ("match", "noise")
        assert result.coverage.reached
    (tmp_path / "first").mkdir()
    np.save(tmp_path / "first" / "result_output@0.npy", right["result_output"][0])
    result = compare(small_model(), TOKENS, candidate=tmp_path / "first")
    assert result.verdict == "unchecked"
    assert any("the last token's row" in step for step in result.next_steps)
    last = {"result_output@-1": np.array(right["result_output"][2])}
    save_file(last, tmp_path / "t.safetensors")
    assert compare(small_model(), TOKENS, candidate=tmp_path / "t.safetensors").verdict in ("match", "noise")


def test_a_wrong_tap_is_wrong_whatever_was_recorded(right, small_model):
    wrong = Trace(right.info, {"embd": right["embd"] * 2}, {"embd": "F32"})
    result = diff(right, wrong, small_model())
    assert result.verdict == "wrong"
    assert "every other op" not in result.summary


def test_llama_cpp_is_asked_for_less(small_model, tmp_path):
    assert compare(small_model(), Run(tokens=TOKENS, patterns=("embd",))).verdict == "match"
    run = Run(tokens=TOKENS, patterns=("l_out-*",), layers=range(1, 2))
    capture(small_model(), run, tmp_path / "t.safetensors")
    trace = Trace.open(tmp_path / "t.safetensors")
    assert trace.info.producer["asked"] == {"taps": ["l_out-*"], "layers": [1, 1]}
    assert check(trace, small_model()).verdict in ("match", "noise")
    unsaid = trace.saying(type(trace.info)(trace.info.tokens, trace.info.positions, 3))
    assert check(unsaid, small_model()).verdict == "unchecked"
    assert check(unsaid, small_model(), how=How(partial=True)).verdict in ("match", "noise")
    [checked] = check_each([tmp_path / "t.safetensors"], small_model(), USUAL)
    assert checked.result.verdict in ("match", "noise")
    assert "asked" not in compare(small_model(), TOKENS).baseline


def test_two_traces_alone_are_asked_for_the_logits_too(right):
    assert diff(right, right).verdict == "match"
    result = diff(right, only(right, "embd"))
    assert result.verdict == "unchecked"
    assert "the two traces agree as far as both were recorded: 1 of 41 taps" in result.summary
    assert diff(right, only(right, "embd"), how=How(partial=True)).verdict == "match"


# -- names that stand for nothing -----------------------------------------------------------------------------------


def test_names_that_stand_for_nothing_are_named(right, small_model, tmp_path):
    names = {name: name.replace("norm", "nrm").replace("_out", "_output").replace("proj", "") for name in right}
    names |= {"embd": "embd"}
    typos = sum(names[name] != name for name in right)
    part = written(tmp_path / "t.safetensors", right, names)
    result = compare(small_model(), candidate=part)
    assert f"{typos} of its {len(right)} tensors were ignored" in result.summary
    assert "Kcur_-0 (Kcur_proj-0?)" in result.summary
    assert any("--map" in step for step in result.next_steps)
    assert len(result.extra) == typos
    clean = compare(small_model(), candidate=written(tmp_path / "c.safetensors", right))
    assert "ignored" not in clean.summary
    assert clean.verdict == "match"


def test_most_names_misspelt_is_no_pass(right, small_model, tmp_path):
    names = {name: f"{name}x" if name not in ("embd", "l_out-0", "l_out-1") else name for name in right}
    result = compare(small_model(), candidate=written(tmp_path / "t.safetensors", right, names))
    assert result.verdict == "unchecked"
    assert "3 of 37 taps" in result.summary
    assert "result_outputx" in " ".join(result.extra)


def test_files_that_cannot_be_read_are_named(right, small_model, tmp_path):
    for name in right:
        np.save(tmp_path / f"{name}.npy", right[name])
    (tmp_path / "ffn_up-0.npy").rename(tmp_path / "ffn_up-0.bin")
    (tmp_path / "README.md").write_text("how this was made", encoding="utf-8")
    result = compare(small_model(), TOKENS, candidate=tmp_path)
    assert result.extra == ("ffn_up-0.bin",)
    assert "1 of its 41 tensors was ignored, no tap has that name: ffn_up-0.bin (ffn_up-0?)" in result.summary


@needs_slices("file")
def test_weights_are_no_names_left_over(right, small_model, tmp_path):
    weight = Engine(small_model()).w.whole("blk.0.attn_q.weight")
    arrays = {name: np.array(right[name]) for name in right} | {"weights/blk.0.attn_q.weight": weight}
    (tmp_path / "map.toml").write_text('[l_out]\nname = "out.{i}"\n', encoding="utf-8")
    arrays |= {f"out.{i}": arrays.pop(f"l_out-{i}") for i in (0, 1)}
    path = tmp_path / "t.safetensors"
    save_file(arrays, path, {KEY: json.dumps({"schema": "llamadiff.trace/1", "tokens": TOKENS})})
    result = compare(small_model(), candidate=path, how=How(name_map=str(tmp_path / "map.toml")))
    assert result.verdict == "match"
    assert "ignored" not in result.summary
    assert [check.name for check in result.preflight] == ["tokens", "weights/blk.0.attn_q.weight"]


# -- maps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["safetensors", "npz"])
def test_a_map_of_one_tap_leaves_the_others_alone(form, right, small_model, tmp_path):
    names = {"l_out-0": "out.0", "l_out-1": "out.1"}
    path = tmp_path / f"t.{form}"
    if form == "npz":
        np.savez(path, **{names.get(name, name): right[name] for name in right})
    else:
        written(path, right, names)
    (tmp_path / "map.toml").write_text('[l_out]\nname = "out.{i}"\n', encoding="utf-8")
    result = compare(small_model(), TOKENS, candidate=path, how=How(name_map=str(tmp_path / "map.toml")))
    assert (result.verdict, len(result.rows), result.missing, result.extra) == ("match", 41, (), ())


def test_a_name_may_be_left_out_of_a_map(right, small_model, tmp_path):
    turned = {name: right[name].transpose(1, 0, 2) if "cur_rope" in name else right[name] for name in right}
    np.savez(tmp_path / "t.npz", **turned)
    (tmp_path / "map.toml").write_text(
        '[Qcur_rope]\naxes = "head token dim"\n[Kcur_rope]\naxes = "kv_head token dim"\n', encoding="utf-8"
    )
    result = compare(small_model(), TOKENS, candidate=tmp_path / "t.npz", how=How(name_map=str(tmp_path / "map.toml")))
    assert (result.verdict, result.missing) == ("match", ())


def test_what_a_map_leaves_over_is_named(right, small_model, tmp_path):
    names = {name: f"x.{name}" for name in right if name not in ("embd", "result_output")}
    (tmp_path / "map.toml").write_text('[embd]\nname = "embeddings"\n', encoding="utf-8")
    path = written(tmp_path / "t.safetensors", right, names | {"embd": "embeddings"})
    result = compare(small_model(), candidate=path, how=How(name_map=str(tmp_path / "map.toml")))
    assert {row.tap for row in result.rows} == {"embd", "result_output"}
    assert "39 of its 41 tensors were ignored" in result.summary
