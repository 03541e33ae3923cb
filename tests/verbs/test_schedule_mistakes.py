"""Mistakes of state in llama.cpp's own sources (llamacpp/mistakes/state.patch): random schedules find them, in few steps.

They sleep in the build that tools/backends.py makes (make backends PARTS=port), until the environment names one.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from tools.backends import made

from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.request import Request
from llamadiff.llamacpp.schedule import at_random
from llamadiff.verbs.scheduled import Shortening, abilities, run_schedule

pytestmark = [pytest.mark.slow, pytest.mark.backends]
VOCABULARY, STEPS, SEEDS = 96, 60, (1, 2, 3, 4)
FEW = 6  # steps in a new context
WHERE = re.compile(r"in the \d+(st|nd|rd|th) batch (token \d+ of|the token at position \d+ of) sequence \d+ (.*)")
MISTAKES = [  # name, model, how what is said of a token goes on
CASES
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
    short = run_schedule(Shortening(request, VOCABULARY, 120.0).of(schedule, found), request, VOCABULARY)
    named = WHERE.fullmatch(short.faults[0])
    assert named is not None, short.faults[0]
    assert named[3].startswith(said), short.faults[0]
    assert len(short.steps) <= 1 + FEW
