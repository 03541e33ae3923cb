"""Random schedules: right ones are never accused, what llama.cpp does otherwise is found, and made short."""

from __future__ import annotations

from dataclasses import replace

import pytest
from command import run

from llamadiff.engines.run_spec import How, Run
from llamadiff.ext.state import scheduled
from llamadiff.ext.state.schedule import FEED, Abilities, Deed, Schedule, alone, at_random
from llamadiff.ext.state.scheduled import Found, Shortening, abilities, judged, run_schedule
from llamadiff.ext.state.variants import run_variants
from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.request import Request, Way
from llamadiff.llamacpp.steps import COPY, DECODE, GET, NEW, REMOVE, SET, SHIFT, Step

VOCABULARY = 96


def request_of(model, **settings):
    request = Request(str(model), model_info={"file": model.name})
    return replace(request, settings=replace(request.settings, **settings))


STATES = ("mamba2", "granitehybrid.Q8_0", "lfm2.F16", "qwen35.F16")  # those that keep recurrent ones


@pytest.mark.parametrize("kind", ["llama", "gemma2", "deepseek2", "moe", *STATES])
def test_a_right_one_is_not_accused(kind, small_model, random_model):
    request = request_of(random_model(kind) if "." in kind else small_model(kind))
    with Child(request.settings) as child:
        can = abilities(request, child)
        found = judged(at_random(60, 3, VOCABULARY, can), request, VOCABULARY, child)
    assert (found.faults, found.judged > 60) == ((), True)
    assert can.states == (kind in STATES)
    if "." not in kind:
        assert can == Abilities(states=kind == "mamba2", window=3 * (kind == "gemma2"), turns=kind != "mamba2")


@pytest.mark.parametrize("cache", ["F16", "Q8_0", "Q4_0"])
def test_caches_that_round_are_not_accused(cache, small_model):
    request = request_of(small_model(), type_k=cache, type_v=cache, flash_attn=True)
    found = run_schedule(at_random(60, 4, VOCABULARY, Abilities()), request, VOCABULARY)
    assert found.faults == ()
    assert found.worst < found.limit < 0.05


def feed(*tokens):
    return Deed(FEED, tokens=tokens)


TWO = (feed((0, 8), (1, 13), (0, 12), (1, 17)), feed((0, 16), (1, 21)))
OTHERWISE = {  # what llama.cpp does instead of a step, and the first fault
    "a token is another": (TWO, {2: {"tokens": (20, 21)}}, "in the 2nd batch token 0 of sequence 0 has logits that"),
    "a copy is of another sequence": (
        (*TWO, Deed("fork", 0, 2), feed((2, 34))), {3: {"of": (1, 2, 0, -1)}},
        "in the 3rd batch token 0 of sequence 2 sees rows of sequence 1",
    ),
    "a state is of another sequence": (
        (*TWO, Deed("keep", 0, 0), Deed("bring", 2, 0), feed((2, 34))), {3: {"of": (1, 0)}},
        "in the 3rd batch token 0 of sequence 2 has logits that",
    ),
    "a range is not removed": (
        (*TWO, feed((0, 20)), Deed("cut", 0, count=1), feed((0, 24))), {4: {"of": (1, 1, 2)}},
        "in the 4th batch token 0 of sequence 0 is written over position 1 in cache_k_l0, which sequence 1 still sees",
    ),
    "what was taken back is another's": (
        (*TWO, feed((0, 24)), Deed("take back", 0, count=1), feed((1, 25))), {4: {"of": (0, 1, 2)}},
        "in the 4th batch token 0 of sequence 1 is written over position 1 in cache_k_l0, which sequence 0 still sees",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_is_done_otherwise_is_found(name, small_model, monkeypatch):
    deeds, instead, said = OTHERWISE[name]
    real = Child.ask

    def ask(self, request, *more):
        steps = [replace(step, **instead.get(number, {})) for number, step in enumerate(request.way.steps)]
        return real(self, replace(request, way=replace(request.way, steps=tuple(steps))), *more)

    monkeypatch.setattr(Child, "ask", ask)
    found = run_schedule(Schedule(deeds, Abilities(), 512), request_of(small_model()), VOCABULARY)
    assert found.verdict == "wrong"
    assert found.faults[0].startswith(said)


def test_a_batch_that_is_refused_is_a_fault(small_model, monkeypatch):
    """llama.cpp does not take back what it was told to: its next positions are none that it goes on with."""
    real = Child.ask

    def ask(self, request, *more):
        steps = [replace(step, of=(1, 50, 51)) if step.call == REMOVE else step for step in request.way.steps]
        return real(self, replace(request, way=replace(request.way, steps=tuple(steps))), *more)

    monkeypatch.setattr(Child, "ask", ask)
    deeds = (*TWO, Deed("take back", 1, count=1), feed((0, 24), (1, 25)))
    found = run_schedule(Schedule(deeds, Abilities(), 512), request_of(small_model()), VOCABULARY)
    assert found.verdict == "wrong"
    assert found.faults[0].startswith(
        "in the 3rd batch token 0 of sequence 1 is refused: llama_decode failed with code -1"
    )


def test_a_schedule_is_what_its_seed_says():
    can = Abilities(window=4)
    assert at_random(50, 7, 96, can) == at_random(50, 7, 96, can) != at_random(50, 8, 96, can)
    steps, history = at_random(50, 7, 96, can).realized()
    assert (len(steps) >= 51, steps[0].call) == (True, NEW)
    assert len(history.rows) == sum(len(step.tokens) for step in steps)


def test_a_memory_is_asked_for_what_it_can_do():
    calls = {can: {step.call for seed in range(8) for step in at_random(80, seed, 96, can).realized()[0]}
             for can in (Abilities(), Abilities(states=True), Abilities(shifts=False))}  # fmt: skip
    assert calls[Abilities()] >= {NEW, DECODE, REMOVE, COPY, SHIFT, GET, SET}
    assert SHIFT not in calls[Abilities(shifts=False)]
    steps = [step for seed in range(8) for step in at_random(80, seed, 96, Abilities(states=True)).realized()[0]]
    assert {step.of[1:] for step in steps if step.call == REMOVE} == {(0, -1)}


def test_each_life_is_run_alone_once():
    deeds = (feed((0, 4), (0, 8)), Deed("fork", 0, 1), feed((0, 12), (1, 13)), Deed("take back", 1, count=1))
    _, history = Schedule(deeds, Abilities(), 512).realized()
    assert [life.rows for life in alone(history)] == [(0, 1, 2), (0, 1, 3)]
    assert [len(life.steps) for life in alone(history)] == [2, 2]
    assert [len(life.steps) for life in alone(history, one_by_one=True)] == [4, 4]


def test_what_fails_is_made_as_short_as_still_fails(monkeypatch):
    """It fails where sequence 2 is a copy, and is fed a token below 10 after that."""

    def fails(self, schedule):
        steps, _ = schedule.realized()
        copied = next((n for n, step in enumerate(steps) if step.call == COPY and step.of[1] == 2), len(steps))
        given = [each for step in steps[copied:] for each in zip(step.sequences, step.tokens, strict=True)]
        hit = any(sequence == 2 and token < 10 for sequence, token in given)
        return Found(("wrong",) if hit else (), (), 0, 0.0, 0.0, steps)

    monkeypatch.setattr(Shortening, "_run", fails)
    schedule = next(each for seed in range(50)
                    if fails(None, each := at_random(120, seed, 96, Abilities())).faults)  # fmt: skip
    short = Shortening(Request("m"), 96, 200).of(schedule, fails(None, schedule))
    steps, _ = short.realized()
    assert [step.call for step in steps] == [NEW, DECODE, COPY, DECODE]
    assert [len(step.tokens) for step in steps] == [0, 1, 0, 1]


def test_steps_are_said_in_llama_cpp_s_own_calls():
    assert Step(REMOVE, (0, 5, -1)).words() == "llama_memory_seq_rm(mem, 0, 5, -1)"
    assert Step(SET, (2, 1)).words() == "llama_state_seq_set_data of buffer 1 into sequence 2"
    assert (
        Step(DECODE, (), (7, 8), (0, 1), (3, 3)).words()
        == "llama_decode, tokens {id, pos, seq_id}: {7, 0, 3}, {8, 1, 3}"
    )


def test_variants_have_a_line_for_one(small_model, tmp_path):
    done = run("variants", small_model(), "--tokens", "1,5,9", "--schedule", "30", "--seed", "2")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[4:6]] == ["default", "schedule=30,seed=2"]


def test_one_that_fails_says_what_to_do(small_model, monkeypatch):
    real = scheduled.judged

    def spoiled(schedule, *more):
        found = real(schedule, *more)
        return replace(found, given=("in the 1st batch token 0 of sequence 0 sees nothing",))

    monkeypatch.setattr(scheduled, "judged", spoiled)
    monkeypatch.setattr(Shortening, "_fails", lambda self, schedule: False)
    [_, row] = run_variants(small_model(), Run(tokens=(1, 5)), How(), ("schedule=20,seed=1",)).rows
    assert (row.verdict, row.headline) == ("wrong", "in the 1st batch token 0 of sequence 0 sees nothing")
    assert (
        row.steps[0] == "llama_init_from_model, n_ctx = 512, n_seq_max = 4, n_ubatch = 8" or "n_ubatch" in row.steps[0]
    )


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            "schedule=20",
            "llama.cpp:schedule=20: runs tokens of its own; llamadiff variants --only schedule=20 does that",
        ),
        ("seed=3", "llama.cpp:seed=3: a seed is a schedule's; give schedule=200 too"),
        ("schedule=20,forked=on", "a random schedule does all of that; leave out forked"),
    ],
)
def test_a_candidate_is_none(spec, said, tmp_path):
    done = run("compare", tmp_path / "none.gguf", "--tokens", "1", "--candidate", f"llama.cpp:{spec}")
    assert (done.returncode, said in done.stderr) == (2, True)


def test_a_way_without_steps_has_none():
    assert Way.from_json({"ubatch": 0, "steps": [], "reused": True, "callback": True}) == Way()
