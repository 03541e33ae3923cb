"""The engine's own tests: what its author would write, with a capture of llama.cpp beside them."""

from __future__ import annotations

import os
from pathlib import Path

from engine import Engine

MODEL = os.environ["MODEL"]
CAPTURES = Path(__file__).parent / "captures"


def test_it_runs():
    assert Engine(MODEL).run([1, 2, 3])["result_output"].shape[0] == 3


def test_it_computes_what_llama_cpp_does(llamadiff_check):
    llamadiff_check("captures/tiny.safetensors", candidate=Engine(MODEL).run, model=MODEL)


def test_the_same_of_a_sketch(llamadiff_check):
    llamadiff_check(CAPTURES / "sketch.safetensors", candidate=Engine(MODEL).run, model=MODEL)
