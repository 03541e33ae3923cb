"""Shapes that do not fit: the last token's logits alone are taken as such, all else is a finding with a reason."""

from __future__ import annotations

import json

import numpy as np
import pytest
from command import run
from llamaref import Engine
from safetensors.numpy import save_file

from llamadiff.candidates.reference import record
from llamadiff.trace.metadata import KEY, SCHEMA
from llamadiff.trace.reader import Trace

TOKENS = (1, 17, 5, 80, 42, 9, 33)


@pytest.fixture(scope="module")
def right(small_model):
    return record(Engine(small_model()), TOKENS, "mine")


def written(path, arrays, tokens=TOKENS):
    metadata = {KEY: json.dumps({"schema": SCHEMA, "tokens": tokens})}
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path, metadata)
    return path


def compared(model, candidate, *options, code=1):
    done = run("compare", model, "--candidate", candidate, "-o", "json:-", *options)
    assert done.returncode == code, (done.stdout, done.stderr)
    return json.loads(done.stdout)


def found(report):
    return next(check["found"] for check in report["preflight"] if check["name"] == "shapes")


@pytest.mark.parametrize("shape", [(1, -1), (-1,), (1, 1, -1)], ids=str)
def test_the_last_rows_logits_alone_are_judged(shape, right, small_model, tmp_path):
    logits = right["result_output"][-1].reshape(shape)
    report = compared(small_model(), written(tmp_path / "t.safetensors", {"result_output": logits}), code=0)
    (tap,) = report["taps"]
    assert tap["tap"] == "result_output"
    assert tap["baseline"]["rms"] == pytest.approx(tap["candidate"]["rms"], rel=1e-3)
    assert report["logits"]["rows"] == 1
    assert report["logits"]["kl"] < 1e-4
    wrong = written(tmp_path / "w.safetensors", {"result_output": right["result_output"][-2].reshape(shape)})
    assert compared(small_model(), wrong)["wrong"] == ["result_output"]


def test_the_last_rows_logits_of_a_dump_are_judged(right, small_model, tmp_path):
    right["result_output"][-1:].astype("<f4").tofile(tmp_path / "result_output.f32")
    (tmp_path / "tokens").write_text(" ".join(map(str, TOKENS)), encoding="utf-8")
    assert compared(small_model(), tmp_path, code=0)["logits"]["rows"] == 1


def test_two_traces_are_compared_in_the_row_that_both_have(right, tmp_path):
    whole = written(tmp_path / "a.safetensors", dict(right))
    last = written(tmp_path / "b.safetensors", {"result_output": right["result_output"][-1:]})
    done = run("diff", whole, last, "-o", "json:-")
    report = json.loads(done.stdout)
    assert (done.returncode, report["verdict"]) == (0, "match")
    assert (report["logits"]["rows"], report["logits"]["after"]) == (1, 7)


def test_other_tokens_than_stated_are_counted(right, small_model, tmp_path):
    arrays = {name: right[name] for name in ("embd", "Qcur_rope-0", "l_out-0", "l_out-1", "result_output")}
    stated = (*TOKENS, 8, 9)
    report = compared(small_model(), written(tmp_path / "t.safetensors", arrays, stated))
    assert found(report) == "your engine ran 7 tokens, 9 are stated (embd and 4 more)"
    assert report["summary"].startswith("before any layer, shapes: your engine ran 7 tokens")
    assert report["summary"].endswith("; nothing else could be judged")
    assert report["next_steps"] == ["run your engine on the 9 ids that are stated, or state those that it ran"]


def test_one_row_says_how_it_is_called(right, small_model, tmp_path):
    arrays = {**right, "l_out-1": right["l_out-1"][-1:]}
    report = compared(small_model(), written(tmp_path / "t.safetensors", arrays))
    assert found(report) == (
        "your engine ran 1 token, 7 are stated "
        "(l_out-1; if that is one token's, call it NAME@ROW (the last is NAME@-1))"
    )
    assert {row["tap"] for row in report["taps"]} == {*right} - {"l_out-1"}  # the others are judged
    assert not report["wrong"]


COLUMNS = {
    "n_embd / heads": ("Qcur_proj", (7, 256), "Qcur_proj-0 in 2 layers has 256 columns, 512 are right: "
                       "64 a head is n_embd / heads; attention.key_length says 128"),
    "all heads": ("Kcur_proj", (7, 512), "Kcur_proj-0 in 2 layers has 512 columns, 256 are right: "
                  "that is 4 heads of 128, and K and V have 2"),
    "the wrong size": ("ffn_norm", (7, 512), "ffn_norm-0 in 2 layers has 512 columns, 256 are right: "
                       "that is the feed-forward length"),
    "nothing known": ("ffn_norm", (7, 7), "ffn_norm-0 in 2 layers has 7 columns, 256 are right"),
    "a padded vocabulary": ("result_output", (7, 128), "result_output has 128 columns, 96 are right: "
                            "the vocabulary has 96 entries; leave out the rows that pad it"),
}  # fmt: skip


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model whose heads are wider than n_embd / heads."""
    from unittest import mock

    from models import small

    with mock.patch.object(small, "DIM", 128):
        return small.write_model(tmp_path_factory.mktemp("wide") / "m.gguf")


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_of_another_number_have_a_reason(name, wide, tmp_path):
    word, shape, reason = COLUMNS[name]
    arrays = dict(record(Engine(wide), TOKENS, "mine"))
    names = [tap for tap in arrays if tap.rsplit("-", 1)[0] == word]
    arrays |= {tap: np.ones(shape, np.float32) for tap in names}
    report = compared(wide, written(tmp_path / "t.safetensors", arrays))
    assert found(report) == reason
    assert report["verdict"] == "wrong"
    assert not report["wrong"]
    assert names[0] in report["missing"]


def test_a_dump_that_does_not_fit_has_the_same_reason(wide, tmp_path):
    for name, array in record(Engine(wide), TOKENS, "mine").items():
        np.save(tmp_path / f"{name}.npy", array[:, :256] if name.startswith("Qcur_proj") else array)
    (tmp_path / "tokens").write_text(" ".join(map(str, TOKENS)), encoding="utf-8")
    assert "64 a head is n_embd / heads" in found(compared(wide, tmp_path))


def test_rows_that_are_elsewhere_are_a_layout(right, small_model, tmp_path):
    arrays = {**right, "l_out-0": right["l_out-0"].T}
    report = compared(small_model(), written(tmp_path / "t.safetensors", arrays))
    assert found(report) == (
        "l_out-0 has shape [256, 7], [7, 256] is right (token, embd); x.transpose(1, 0) makes it so"
    )


def test_a_trace_that_fits_is_the_same_object(small_model, right):
    from llamadiff.engines.reference_model import Model
    from llamadiff.judge.preflight.shapes import drop_misshapen

    trace = Trace(right.info, dict(right), {})
    assert drop_misshapen(Model(small_model()), right, trace) == (trace, ())
