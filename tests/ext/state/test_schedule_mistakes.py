"""Mistakes of state in llama.cpp's own sources (llamacpp/mistakes/state.patch): schedules find them, in few steps.

They sleep in the build that tools/backends.py makes (make backends PARTS=port), until the environment names one.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from tools.backends import made

from llamadiff.ext.state.schedule import at_random
from llamadiff.ext.state.scheduled import Shortening, abilities, run_schedule
from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.request import Request

pytestmark = [pytest.mark.slow, pytest.mark.backends]
VOCABULARY, STEPS, SEEDS = 96, 60, (1, 2, 3, 4)
FEW = 6  # steps in a new context
WHERE = re.compile(r"in the \d+(st|nd|rd|th) batch (token \d+ of|the token at position \d+ of) sequence \d+ (.*)")
MISTAKES = [  # name, model, how what is said of a token goes on
    ("mask-of-all-sequences", "llama", "sees rows of sequence"),
    ("mask-next-row", "llama", "sees positions of its own that are hidden"),
    ("mask-own-row", "llama", "does not see positions"),
    ("window-one-longer", "gemma2", "does not see positions"),
    ("window-of-one-token", "gemma3", "sees positions of its own that are hidden"),
    ("rm-one-too-few", "llama", "sees a row that it has no more"),
    ("rm-of-all", "llama", "is refused: llama_decode failed"),
    ("cp-without-first", "gpt-oss", "does not see positions"),
    ("add-of-all", "llama", "is moved by"),
    ("shift-without-rows", "llama", "sees position"),
    ("shift-twice", "llama", "is moved by"),
    ("shift-sign", "moe", "is moved by"),
    ("slot-too-early", "gemma2", "is written over position"),
    ("values-side-by-side", "llama", "is written over position"),
    ("state-without-first", "llama", "sees 1 of 2 rows that a state had"),
    ("state-window", "gemma3", "sees 1 of 2 rows that a state had"),
    ("state-beside-old", "llama", "sees a row that it has no more"),
    ("state-values-turned", "llama", "has logits"),
    ("state-rows-reversed", "deepseek2", "has logits"),
    ("rm-of-window-only", "gemma3", "sees a row that it has no more"),
    ("cp-without-window", "gemma2", "does not see positions"),
    ("reuse-positions", "llama", "has position"),
    ("positions-of-first", "llama", "has position"),
    ("reuse-rows", "llama", "is written over position"),
    ("reuse-mask", "llama", "sees rows of sequence"),
    ("reuse-mask-of-window", "gemma2", "sees rows of sequence"),
    ("reuse-head", "mamba2", "begins with no state"),
    ("states-swapped", "mamba2", "begins with the state after"),
    ("conv-state-not-moved", "mamba2", "begins with no state in cache_r"),
    ("conv-state-of-first", "mamba2", "has logits"),
    ("state-not-cleared", "mamba2", "begins with the state after"),
    ("state-shared", "mamba2", "begins with the state after"),
    ("fork-without-state", "mamba2", "begins with no state"),
    ("state-of-conv-only", "mamba2", "has logits"),
    ("rm-of-rows-only", "granitehybrid.Q8_0", "begins with the state after"),
    ("rm-of-states-only", "granitehybrid.Q8_0", "sees a row that it has no more"),
    ("cp-of-rows-only", "lfm2.F16", "begins with no state"),
]


@pytest.fixture
def asked(small_model, random_model, monkeypatch):
    """asked(model, mistake): the request, and what the model's memory can do."""
    folder = made().get("mistaken", " not made yet: make backends PARTS=port")
    if folder[0] == " ":
        pytest.skip(folder.strip())

    def of(model, mistake=""):
        monkeypatch.setenv("LLAMADIFF_MISTAKE", mistake)
        path = random_model(model) if "." in model else small_model(model)
        request = Request(str(path), model_info={"file": path.name})
        request = replace(request, settings=replace(request.settings, llama_cpp=folder))
        with Child(request.settings) as child:
            return request, abilities(request, child)

    return of


def found_in(request, can):
    """The first schedule that fails, and what came of it."""
    schedules = (at_random(STEPS, seed, VOCABULARY, can) for seed in SEEDS)
    each = ((schedule, run_schedule(schedule, request, VOCABULARY)) for schedule in schedules)
    return next(((schedule, found) for schedule, found in each if found.faults), None)


@pytest.mark.parametrize("model", sorted({model for _, model, _ in MISTAKES}))
def test_a_right_one_is_not_accused(model, asked):
    assert found_in(*asked(model)) is None


@pytest.mark.parametrize(("mistake", "model", "said"), MISTAKES, ids=[name for name, _, _ in MISTAKES])
def test_a_mistake_is_found_and_named_in_few_steps(mistake, model, said, asked):
    request, can = asked(model, mistake)
    schedule, found = found_in(request, can)
    assert found.verdict == "wrong"
    short = run_schedule(Shortening(request, VOCABULARY, 200).of(schedule, found), request, VOCABULARY)
    named = WHERE.fullmatch(short.faults[0])
    assert named is not None, short.faults[0]
    assert named[3].startswith(said), short.faults[0]
    assert len(short.steps) <= 1 + FEW
