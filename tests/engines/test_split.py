"""Models split into several files, as llama.cpp splits them: read by both engines and by every command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from command import run
from llamaref import Weights
from models.split import split_model
from optional import needs_slices

from llamadiff.engines.reference_model import Model
from llamadiff.system.errors import UserError
from llamadiff.trace.hashing import file_sha256, model_sha256

IDS = ("--tokens", "1,17,5")


def test_all_parts_are_one_model(tmp_path, small_model):
    first, whole = Weights(split_model(tmp_path)), Weights(small_model("llama", "Q8_0"))
    assert len(first.files) == 3
    assert set(first) == set(whole)
    for name in whole:
        assert np.array_equal(first.whole(name), whole.whole(name))
    x = np.ones((1, 256), np.float32)
    for name in ("blk.0.attn_q.weight", "blk.1.ffn_up.weight", "output.weight"):
        assert np.array_equal(first.product(name, x), whole.product(name, x))


@pytest.mark.parametrize("engine", ["numpy", pytest.param("graph", marks=needs_slices("graph"))])
def test_both_engines_run_a_split_model(engine, tmp_path):
    first = split_model(tmp_path)
    result = json.loads(run("compare", first, *IDS, "--engine", engine, "-o", "json:-").stdout)
    assert result["verdict"] in ("match", "noise")
    assert result["model"]["layers"] == 2


@needs_slices("explain")
def test_every_command_takes_the_first_part(tmp_path):
    first, trace = split_model(tmp_path), tmp_path / "t.safetensors"
    assert run("capture", first, *IDS, "-o", trace).returncode == 0
    for words in (
        ("compare", first, "--candidate", trace), ("diff", trace, trace, "--model", first), ("check", trace),
        ("backend", first, *IDS), ("taps", first), ("graph", first),
    ):  # fmt: skip
        done = run(*words)
        assert (done.returncode, done.stderr) == (0, ""), (words, done)


def test_a_part_that_is_missing_or_not_the_first_is_named(tmp_path):
    first = split_model(tmp_path)
    second = Path(str(first).replace("00001", "00002", 1))
    with pytest.raises(UserError, match=r"is part 2 of 3; give the first one, m-00001-of-00003\.gguf"):
        Model(second)
    shutil.copy(first, tmp_path / "renamed.gguf")
    with pytest.raises(UserError, match=r"is one of 3 parts, whose names must end in -00001-of-00003\.gguf"):
        Model(tmp_path / "renamed.gguf")
    second.unlink()
    with pytest.raises(UserError, match=r"1 of its 3 parts are not beside it, the first is m-00002-of-00003\.gguf"):
        Model(first)


def test_parts_of_two_models_are_refused(tmp_path):
    first = split_model(tmp_path)
    (tmp_path / "other").mkdir()
    other = split_model(tmp_path / "other", "qwen2")
    third = other.with_name(f"m-00003-of-{other.stem[-5:]}.gguf")
    shutil.copy(third, tmp_path / "m-00003-of-00003.gguf")
    with pytest.raises(UserError, match="they are of two models"):
        Model(first)


def test_a_split_model_is_told_by_all_its_parts(tmp_path):
    first = split_model(tmp_path)
    files = Weights(first).files
    before = model_sha256(files)
    assert before == Model(first).sha256 != file_sha256(first)
    data = bytearray(files[-1].read_bytes())
    data[-1] ^= 1
    files[-1].write_bytes(data)
    assert model_sha256(files) != before


def test_no_part_is_overwritten(tmp_path):
    first = split_model(tmp_path)
    last = Weights(first).files[-1]
    done = run("compare", first, *IDS, "-o", f"json:{last}")
    assert done.returncode == 2
    assert "is a model, which is not overwritten" in done.stderr
    assert last.read_bytes()[:4] == b"GGUF"
