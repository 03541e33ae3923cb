"""A handful of runs on an ARM CPU that adds in float16, where `make backends PARTS=arm82` has made one."""

from __future__ import annotations

import json

import pytest
from tools.asking import asked, tokens

OF_THE_CALL = ("timing", "llamadiff")  # seconds, and the words of the command
F16, FLASH = ("--llama-cpp", "kv=f16"), ("--llama-cpp", "kv=f16,flash_attn=on")
WAYS = (["backend"], ["compare"], ["compare", *F16], ["backend", *FLASH])


@pytest.fixture
def arm(usage):
    return usage("arm82")


@pytest.mark.parametrize("words", WAYS, ids=" ".join)
def test_float16_is_right_there(words, arm, random_model):
    """A prompt, whose products are in tiles, and decode steps, row by row."""
    model = random_model("llama.F16")
    done = asked(arm, words[0], model, *words[1:], "--tokens", tokens(9), "--n-predict", 3, "-o", "json:-")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["verdict"], report["baseline"]["machine"]) == ("match", "aarch64")
    assert "FP16_VA = 1" in report["baseline"]["build"]


def test_a_recorded_run_is_judged_as_a_live_one(arm, random_model, tmp_path):
    model, path = random_model("llama.F16"), tmp_path / "run.nodes"
    assert asked(arm, "capture", model, "--tokens", tokens(9), "--nodes", "-o", path).returncode == 0
    live = json.loads(asked(arm, "backend", model, "--tokens", tokens(9), "-o", "json:-").stdout)
    later = json.loads(asked(arm, "backend", model, "--recorded", path, "-o", "json:-").stdout)
    for report in (live, later):
        for name in OF_THE_CALL:
            report.pop(name)
    assert live == later
