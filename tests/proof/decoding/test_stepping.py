"""An engine carries out the steps of a file: a right one is right in all of them; each mistake is told at its own."""

from __future__ import annotations

import json
import shlex
import sys

import pytest
from places import TESTS

from llamadiff import compare
from llamadiff.engines import run_spec
from llamadiff.ext.state.steps_file import read_steps
from llamadiff.llamacpp.shipped import shipped_model
from llamadiff.system.errors import UserError
from proof.decoding.stepping import MISTAKES

STEPS = [
    {"tokens": [1, 403, 407, 261], "sequence": 0},
    {"fork": 0, "to": 1},
    {"tokens": [300, 310, 290, 280], "sequences": [0, 1, 1, 0]},
    {"keep": 1, "as": 7},
    {"drop": 1, "sequence": 0},
    {"tokens": [320], "sequence": 0},
    {"tokens": [330, 331], "sequences": [1, 0]},
    {"restore": 7, "to": 2},
    {"tokens": [340], "sequence": 2},
    {"new": 0},
    {"tokens": [1, 350, 351], "sequence": 0},
]
WORDS = {  # of a mistake, how the headline begins
    "fork shares": "in step 3, tokens of sequence 0 after fork 0 to 1: ",
    "fork without last": "in step 3, tokens of sequence 1 after fork 0 to 1: ",
    "drop forgotten": "in step 6, a token of sequence 0 after drop 1 sequence 0: ",
    "drop keeps position": "in step 6, a token of sequence 0 after drop 1 sequence 0: ",
    "sees others": "in step 3, tokens of sequence ",
    "new forgotten": "in step 11, tokens of sequence 0 after new 0: ",
    "kept by reference": "in step 9, a token of sequence 2 after restore 7 to 2: ",
    "positions of all": "in step 3, tokens of sequence ",
}


@pytest.fixture
def stepping(tmp_path):
    """stepping(mistake, steps): what compare says of an engine that makes it."""

    def run(mistake, steps=STEPS, **more):
        path = tmp_path / "steps.json"
        path.write_text(json.dumps(steps), encoding="utf-8")
        words = [sys.executable, "-m", "proof.decoding.stepping", "--mistake", mistake]
        command = f"cmd: env PYTHONPATH={shlex.quote(str(TESTS))} {shlex.join(words)} --model {{model}} " + (
            "--steps {steps} --out {out}"
        )
        return compare(shipped_model(), candidate=command, how=run_spec.How(steps=path, **more))

    return run


@pytest.mark.parametrize("engine", [None, "graph"])
def test_a_right_engine_is_right_in_every_step(engine, stepping):
    result = stepping("none", engine=engine)
    assert (result.verdict, result.wrong, result.diagnosis) == ("match", (), ())
    assert "6 steps have tokens, of 5 sequences that were run alone" in result.notes


@pytest.mark.parametrize("mistake", WORDS)
def test_a_mistake_is_told_at_its_step(mistake, stepping):
    result = stepping(mistake)
    assert result.verdict == "wrong"
    assert result.headline.startswith(WORDS[mistake])
    first = result.first_divergence
    assert first is not None
    assert first.tap in ("Qcur_rope-0", "Kcur_rope-0", "kqv_out-0", "kqv_out-1")


def test_all_mistakes_are_tried():
    assert {"none", *WORDS} == {*MISTAKES}


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ("{}", "must be a list of 1 to 1000 steps"),
        ("[]", "must be a list of 1 to 1000 steps"),
        ("[{", "not JSON (Expecting"),
        ("[[1]]", "step 1, [1]: expected an object with tokens, new, fork, drop, keep, restore"),
        ('[{"new": 0}]', "no step has tokens; give one such as"),
        ('[{"tokens": [1, -2]}]', "step 1, {'tokens': [1, -2]}: tokens: expected whole numbers from 0"),
        ('[{"tokens": [1, true]}]', "tokens: expected whole numbers from 0"),
        ('[{"tokens": [1], "sequences": [0, 1]}]', "1 tokens of 2 sequences; give one or more, and each its own"),
        ('[{"tokens": [1], "sequence": 64}]', "sequence 64: there are 64, 0 to 63"),
        ('[{"tokens": [1], "at": 3}]', "'at' says nothing here; it takes sequence, tokens"),
        ('[{"tokens": [1]}, {"fork": 0}]', "step 2, {'fork': 0}: to is missing"),
        ('[{"fork": 0, "to": 1}]', "sequence 0 has no tokens"),
        ('[{"tokens": [1]}, {"drop": 2, "sequence": 0}]', "sequence 0 has 1 tokens; give 1 to as many"),
        ('[{"restore": 3, "to": 1}]', "no step before kept a sequence as 3"),
        ('[{"tokens": [1]}, {"fork": 0, "to": 0}]', "a sequence is forked to another one"),
    ],
)
def test_a_file_that_is_none_is_one_line(steps, said, tmp_path):
    path = tmp_path / "steps.json"
    path.write_text(steps, encoding="utf-8")
    with pytest.raises(UserError) as raised:
        read_steps(path)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("run", "candidate", "said"),
    [
        (run_spec.Run(), "llama.cpp:batch=2", "steps are carried out by --candidate 'cmd: ./engine {steps} {out}'"),
        (run_spec.Run("Once"), "cmd: true {out}", "the steps have tokens of their own; leave out the prompt"),
        (run_spec.Run(), "cmd: true {out}", "step 1, 4 tokens of sequence 0: the command wrote nothing to {out}/1"),
        (run_spec.Run(), "cmd: false {out}", "ended with exit code 1"),
    ],
)
def test_what_cannot_be_is_said(run, candidate, said, tmp_path):
    path = tmp_path / "steps.json"
    path.write_text(json.dumps(STEPS), encoding="utf-8")
    with pytest.raises(UserError) as raised:
        compare(shipped_model(), run, candidate, run_spec.How(steps=path))
    assert said in str(raised.value)
