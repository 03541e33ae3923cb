"""Captures are recorded anew, as they were recorded, and what changed is said in numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from command import run
from llamaref import Engine

from llamadiff import Trace
from llamadiff.candidates.reference import record
from llamadiff.trace.writer import rewrite

TOKENS = (1, 17, 5, 80, 42, 9, 33)


# -- recording anew


def test_update_says_what_changed_in_numbers(captures, small_model, tmp_path):
    path, model = tmp_path / "t.safetensors", small_model(kind="Q8_0")
    right = Trace.open(captures / "a.safetensors")
    off = {name: np.array(right[name]) for name in right}
    off["ffn_up-1"] *= 1.1
    info = replace(right.info, prompt="as it was", producer={**right.info.producer, "version": "an older one"})
    rewrite(Trace(info, off, right.dtypes), info, path)
    assert run("check", path, "--model", model).returncode == 1
    before = path.read_bytes()
    assert path.read_bytes() == before  # nothing is overwritten by a check
    done = run("check", path, "--model", model, "--update")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(
        f"UPDATED  {path}: {len(right)} taps; 1 changed, the most ffn_up-1 by an NMSE of 8.3e-03"
    )
    assert "version: an older one -> llama-cpp-python" in done.stdout
    assert done.stdout.endswith("checked: MATCH\n")
    assert Trace.open(path).info.prompt == "as it was"
    assert run("check", path, "--model", model).returncode == 0
    assert "none changed" in run("check", path, "--model", model, "--update").stdout
    assert [file.name for file in tmp_path.iterdir()] == ["t.safetensors"]


def test_update_with_another_model_is_refused(captures, small_model, tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(before := (captures / "a.safetensors").read_bytes())
    words = ("check", path, "--model", small_model(kind="F16"), "--update")
    done = run(*words)
    assert (done.returncode, path.read_bytes()) == (2, before)
    assert f"{path}: is of " in done.stderr
    assert "or --force to record it anew" in done.stderr
    assert run(*words, "--force").returncode == 0
    assert path.read_bytes() != before


@pytest.mark.parametrize("how", ["--sketch", "--n-predict 2", "--only 1 --llama-cpp kv=f16"])
def test_update_keeps_how_it_was_recorded(how, small_model, tmp_path):
    model, path = small_model(), tmp_path / "t.safetensors"
    assert run("capture", model, "--tokens", "1,17,5", *how.split(), "-o", path).returncode == 0
    before = path.read_bytes()
    done = run("check", path, "--model", model, "--update")
    assert (done.returncode, "none changed" in done.stdout) == (0, True), done
    assert path.read_bytes() == before


def test_what_cannot_be_recorded_anew_stays(captures, small_model, tmp_path):
    path = tmp_path / "t.safetensors"
    mine = record(Engine(small_model()), TOKENS, "mine")
    rewrite(mine, mine.info, path)
    before = path.read_bytes()
    done = run("check", path, "--model", small_model(), "--update")
    assert done.returncode == 2
    assert "was recorded by mine, not by llama.cpp" in done.stderr
    assert path.read_bytes() == before
    refused = run("check", captures, "--update", "--candidate", "cmd: x")
    assert "--update records llama.cpp anew" in refused.stderr
