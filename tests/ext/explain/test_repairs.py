"""What to mend, as data: each cause with its id, how sure it is, the place in the maths, and what settles the rest."""

from __future__ import annotations

import json

import jsonschema
import numpy as np
import pytest
from command import run
from faulty import BUGS
from llamaref import Engine
from places import REPORT_SCHEMA
from proof.injected.base import together
from proof.injected.runs import record_faulty
from proof.strangers.engine import NONE, Bug

from llamadiff.candidates.reference import record
from llamadiff.trace.writer import rewrite
from llamadiff.verbs.verbs import diff
from llamadiff.words.repairs import repairs_of

TOKENS = (1, 17, 5, 80, 42, 9, 33)
COMMAND = ("llamadiff", "diff", "b.safetensors", "c.safetensors", "--model", "m.gguf")


@pytest.fixture
def repaired(small_model):
    """The repairs of a run with a bug, held against a right one."""

    def get(bug, lacking=(), command=COMMAND):
        path = small_model()
        wrong = record_faulty(bug, path, TOKENS).lacking(lacking)
        result = diff(record(Engine(path), TOKENS, "right"), wrong, path)
        assert result.verdict == "wrong"
        return repairs_of(result, command)

    return get


def test_a_cause_that_is_replayed_leaves_nothing_open(repaired):
    [repair] = repaired(BUGS[0])
    assert (repair.tap, repair.id, repair.confidence) == ("Qcur_rope-0", "rope-layout", "replayed")
    assert repair.taps == ("Qcur_rope-0", "Kcur_rope-0", "Qcur_rope-1", "Kcur_rope-1")
    assert repair.nmse < 1e-10
    assert repair.fix == "rotate (2i, 2i+1): the rows of Q and K in the file are permuted for it"
    assert repair.explain == ("llamadiff", "explain", "rope-layout")
    assert repair.settle is None
    place = repair.place
    assert (place.op, place.layers, place.inputs, place.unrecorded) == ("ROPE", (0, 1), ("Qcur_proj-0",), ())
    assert place.code == "reference/llamaref/models/llama.py"


def test_two_bugs_are_two_repairs_in_graph_order(repaired):
    assert [(repair.tap, repair.id) for repair in repaired(together(BUGS[9], BUGS[6]))] == [
        ("ffn_gate-0", "gate-up-swapped"), ("result_norm", "norm-missing"),
    ]  # fmt: skip


def test_what_nothing_explains_has_its_place(repaired):
    repairs = repaired(Bug("odd", {"gated": lambda e, right, gate, up: right(gate, up) * (1 + 0.3 * np.sin(7 * up))}))
    assert {repair.place.tap for repair in repairs} == {"ffn_swiglu-0"}
    repair = repairs[0]
    assert repair.confidence in ("nearest", "read back", "place only")
    assert repair.fix is None
    assert repair.settle is None
    assert repair.place.inputs == ("ffn_gate-0", "ffn_up-0")


# layer 1's gate is bent as nobody bends it
ODD = Bug("odd", faults={"ffn_gate": lambda e, x: x * (1 + 0.3 * np.sin(9 * x)) if e.layer == 1 else x})
UNRECORDED = [f"ffn_{word}-1" for word in ("gate", "up", "swiglu")]


def test_a_span_is_settled_by_recording_what_lies_in_it(repaired):
    [repair] = repaired(ODD, UNRECORDED)
    assert repair.place.unrecorded[0] == "ffn_gate-1"
    assert repair.settle.command[:2] == ("llamadiff", "taps")
    assert "record ffn_gate-1, ffn_up-1, ffn_swiglu-1 too" in repair.settle.shows


def test_without_a_command_line_there_is_no_command(repaired):
    assert repaired(ODD, UNRECORDED, command=())[0].settle is None


def test_json_has_them_and_the_command_runs(small_model, tmp_path):
    path, words = small_model(), []
    for name, bug in {"b": NONE, "c": BUGS[6]}.items():
        trace = record_faulty(bug, path, TOKENS)
        rewrite(trace, trace.info, tmp_path / f"{name}.safetensors")
        words.append(str(tmp_path / f"{name}.safetensors"))
    done = run("diff", *words, "--model", path, "-o", "json:-")
    report = json.loads(done.stdout)
    jsonschema.validate(report, REPORT_SCHEMA)
    [repair] = report["repairs"]
    assert (repair["id"], repair["confidence"], repair["place"]["tap"]) == ("gate-up-swapped", "replayed", "ffn_gate-0")
    assert run(*repair["explain"][1:]).returncode == 0
