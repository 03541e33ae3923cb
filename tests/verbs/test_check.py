"""``check``: candidates on recorded tokens, side by side; JUnit, annotations, provenance."""

from __future__ import annotations

import io
import json
import shlex
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import run
from faulty import BUGS
from llamaref import Engine
from numpy.typing import NDArray
from optional import needs_slices
from proof.injected import BUGS as INJECTED
from proof.injected.base import together
from proof.injected.runs import record_faulty
from proof.strangers.engine import NONE

from llamadiff import Trace, UserError
from llamadiff.candidates.reference import record
from llamadiff.engines.run_spec import USUAL
from llamadiff.report.check_lines import MOST, Annotation, annotations_of, put_check, shown_ten
from llamadiff.report.terminal.page import Page
from llamadiff.report.terminal.report import make_console
from llamadiff.trace.writer import rewrite
from llamadiff.verbs.check_traces import Checked, check_each, traces_in
from llamadiff.verbs.verbs import check

Arrays = dict[str, NDArray[Any]]
TOKENS = (1, 17, 5, 80, 42, 9, 33)
ENGINE = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from llamadiff.trace.writer import rewrite
from proof.injected import BUGS
from proof.injected.runs import record_faulty
from proof.strangers.engine import NONE
model, tokens, out, bug = sys.argv[1:]
trace = record_faulty(BUGS.get(bug, NONE), Path(model), [int(token) for token in tokens.split(",")])
rewrite(trace, trace.info, Path(out + ".safetensors"))
"""


@pytest.fixture
def engine(tmp_path):
    """An engine as a command, with a bug or without."""

    def get(bug="none"):
        path = tmp_path / "engine.py"
        path.write_text(ENGINE.format(path=sys.path), encoding="utf-8")
        words = [sys.executable, str(path), "{model}", "{tokens}", "{out}", bug]
        return "cmd: " + shlex.join(words)

    return get


@pytest.fixture
def faulty(small_model, tmp_path):
    """A trace of the longer capture's tokens, with a bug or without."""

    def get(bug):
        trace = record_faulty(INJECTED.get(bug, NONE), small_model(kind="Q8_0"), TOKENS)
        path = tmp_path / f"{bug.replace(':', '')}.safetensors"
        rewrite(trace, trace.info, path)
        return path

    return get


def test_a_capture_is_checked_once(captures, monkeypatch):
    monkeypatch.chdir(captures)
    found, _ = traces_in([Path("a.safetensors"), captures, captures / ".." / captures.name / "b.safetensors"])
    assert [path.name for path in found] == ["a.safetensors", "b.safetensors"]


# -- candidates


@needs_slices("gate")
def test_a_right_candidate_passes_on_every_capture(captures, small_model, engine):
    words = ("--model", small_model(kind="Q8_0"), "--jobs", 1)
    done = run("check", captures, *words, "--candidate", engine())
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines if not line.startswith(" ")] == [
        *(f"MATCH   {captures / name}" for name in ("a.safetensors", "b.safetensors")), "all right, of 2"
    ]  # fmt: skip
    assert "        7 of 7 first tokens agree, KL mean" in done.stdout
    assert max(map(len, lines)) <= 120


@needs_slices("explain")
def test_a_wrong_one_is_named_with_where_the_capture_is_from(captures, small_model, engine):
    model = small_model(kind="Q8_0")
    done = run("check", captures / "b.safetensors", "--model", model, "--candidate", engine("rope: other layout"))
    assert done.returncode == 1
    said = " ".join(done.stdout.split())
    assert said.startswith(
        f"WRONG {captures / 'b.safetensors'}: RoPE, layers 0, 1: rotates (i, i+32); this model needs"
    )
    origin = said.partition("fix: ")[2]
    sha256 = Trace.open(captures / "b.safetensors").info.model["sha256"]
    checked = "checked by the numpy engine of"
    for words in ("recorded by llama.cpp (llama-cpp-python", "type_k F32", sha256[:12], checked, ": MATCH,"):
        assert words in origin


def test_captures_are_checked_side_by_side(captures, small_model):
    """In processes of their own: the same in the same order, refusals too. Last digits may differ with the threads."""

    def told(one: Checked) -> tuple[Path, str | None, list[tuple[str, str]]]:
        return one.path, one.refused, [(row.tap, row.verdict) for row in one.result.rows] if one.result else []

    bad = captures / "bad.safetensors"
    paths, model = [captures / "b.safetensors", bad, captures / "a.safetensors"], small_model(kind="Q8_0")
    found = [told(one) for one in check_each(paths, model, USUAL, jobs=2)]
    assert found == [told(one) for one in check_each(paths, model, USUAL, jobs=1)]
    assert found[1] == (bad, f"{bad}: no such trace", [])
    assert len(found[0][2]) == len(found[2][2]) > 30


def test_a_function_is_a_candidate(captures, small_model):
    path = small_model(kind="Q8_0")
    trace = captures / "b.safetensors"

    def right(tokens):
        return dict(record(Engine(path), tokens, "mine"))

    def wrong(tokens, n_prefill):
        assert n_prefill == len(tokens)
        return record_faulty(BUGS[0], path, tokens)

    assert check(trace, path, candidate=right).verdict == "match"
    result = check(trace, path, candidate=wrong)
    assert (result.verdict, result.candidate["name"]) == ("wrong", "mine")
    with pytest.raises(UserError, match=r"<lambda>: gave int; expected arrays by the names of taps"):
        check(trace, path, candidate=lambda tokens: 3)


def _renamed(values: Arrays) -> None:
    values["up_1"] = values.pop("ffn_up-1")


def _without_logits(values: Arrays) -> None:
    del values["result_output"]


def _with_nan(values: Arrays) -> None:
    values["ffn_up-1"] = np.full_like(values["ffn_up-1"], np.nan)


@pytest.mark.parametrize(
    ("change", "verdict", "words"),
    [
        (lambda values: None, "MATCH", ()),
        (_renamed, "MATCH", ("{judged} of {taps} taps judged", "no tap has that name: up_1")),
        (_without_logits, "UNCHECKED", ("(result_output) are not among them", "next: or give --partial")),
        (_with_nan, "WRONG", ("ffn_up-1 has NaN at [0, 0], where", "next: ")),
    ],
)
def test_what_a_candidate_lacks_is_said(change, verdict, words, captures, small_model):
    path, file = small_model(kind="Q8_0"), io.StringIO()
    values = dict(record(Engine(path), TOKENS, "mine"))
    taps = len(values)
    change(values)
    result = check(captures / "a.safetensors", path, candidate=lambda tokens: values)
    put_check(Page(make_console(file, 4000)), Path("a.safetensors"), result)
    assert file.getvalue().startswith(f"{verdict:6}  a.safetensors: ")
    for word in words:
        assert word.format(judged=taps - 1, taps=taps) in " ".join(file.getvalue().split())
    assert ("judged" in file.getvalue()) == bool(words) or verdict != "MATCH"


def test_directories_are_gone_through_and_arrays_that_are_no_trace_are_named(tmp_path):
    names = ("a.safetensors", "sub/b.safetensors", ".git/c.safetensors", "d.npz", "model.gguf")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert traces_in([tmp_path]) == ([tmp_path / name for name in names[:2]], [tmp_path / names[3]])
    assert traces_in([tmp_path / names[3]]) == ([tmp_path / names[3]], [])  # what is named is read
    done = run("check", tmp_path)
    assert (done.returncode, f"{tmp_path / names[3]}: skipped, no .safetensors" in done.stderr) == (2, True)


def test_what_cannot_be_checked_does_not_hide_the_others(captures, small_model, tmp_path):
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(bytes(20))
    target = tmp_path / "r.json"
    words = ("--model", small_model(kind="Q8_0"), "-o", f"json:{target}", "--jobs", 1)
    done = run("check", bad, captures / "a.safetensors", *words)
    assert done.returncode == 2
    assert done.stdout.startswith("MATCH")
    assert done.stdout.endswith("1 refused, of 2\n")
    assert done.stderr.startswith(f"llamadiff: {bad}: not a readable trace")
    report = json.loads(target.read_text("utf-8"))
    assert report[str(bad)]["refused"] is True
    assert report[str(captures / "a.safetensors")]["verdict"] == "match"


def test_other_settings_are_refused_with_both_values(captures, small_model):
    path = small_model(kind="Q8_0")
    own = record(Engine(path), TOKENS, "mine")
    own = own.saying(replace(own.info, producer={"name": "mine", "settings": {"type_k": "f16"}}))
    with pytest.raises(UserError, match="type_k = f16, the recording with F32"):
        check(captures / "a.safetensors", path, candidate=own)
    same = own.saying(replace(own.info, producer={"name": "mine", "settings": {"type_k": "f32"}}))
    assert check(captures / "a.safetensors", path, candidate=same).verdict == "match"


def test_another_model_is_refused_with_both_values(captures, small_model):
    done = run("check", captures, "--model", small_model(), "--jobs", 1)
    assert done.returncode == 2
    old, new = (Trace.open(captures / "a.safetensors").info.model["sha256"][:12], f"{small_model()} is another (sha256")
    assert all(old in line and new in line for line in done.stderr.splitlines())
    assert len(done.stderr.splitlines()) == 2


# -- for machines


@needs_slices("page")
def test_junit_has_a_case_for_each(captures, small_model, faulty, tmp_path):
    target = tmp_path / "r.xml"
    bad = tmp_path / "b<&>\x01.safetensors"
    bad.write_bytes(bytes(20))
    run("check", captures, bad, "--model", small_model(kind="Q8_0"), "-o", f"junit:{target}", "--jobs", 1,
        "--candidate", faulty("gate and up swapped"))  # fmt: skip
    suite = ET.fromstring(target.read_text("utf-8"))
    assert [suite.get(name) for name in ("tests", "failures", "errors")] == ["3", "1", "2"]
    failure = suite.find("testcase/failure")
    assert failure.get("type") == "wrong"
    assert "ffn_gate" in failure.text
    assert "recorded by llama.cpp" in failure.text
    assert suite.find("testcase/error").get("type") == "refused"
    assert "the candidate ran other tokens" in suite.find("testcase/error").get("message")
    assert r"b<&>\x01" in suite.findall("testcase")[2].get("name")


@needs_slices("explain")
def test_annotations_are_one_for_each_cause(captures, small_model, faulty, monkeypatch):
    words = ("check", captures / "a.safetensors", "--model", small_model(kind="Q8_0"), "--candidate")
    wrong = faulty("rope: other layout")
    assert "::error" not in run(*words, wrong).stdout
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(captures.parent))
    done = run(*words, wrong)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("::")]
    assert line.startswith(f"::error file={captures.name}/a.safetensors,line=1,title=llamadiff%3A WRONG Qcur_rope-0 "
                           "(rope-layout)::RoPE, layers 0, 1: rotates (i, i+32)")  # fmt: skip
    assert "%0Arotate (2i, 2i+1)" in line
    assert "::error" not in run(*words, faulty("none")).stdout
    asked = run(*words, wrong, "-o", "json:-", "--annotate")
    assert json.loads(asked.stdout)
    assert asked.stderr.startswith("::error")


def test_what_is_written_on_github_is_escaped():
    text = str(Annotation("a,b:c%.py", 3, "x: y\n, z", "100%\r\n::error::no"))
    assert text == "::error file=a%2Cb%3Ac%25.py,line=3,title=x%3A y%0A%2C z::100%25%0D%0A::error::no"
    assert "\n" not in text


def test_no_more_annotations_than_github_shows():
    some = [Annotation("a", 1, "t", f"cause {number}\nmore") for number in range(MOST + 5)]
    lines = shown_ten(some)
    assert len(lines) == MOST
    assert "6 more causes" in lines[-1]
    assert "cause 14" in lines[-1]
    assert len(shown_ten(some[:MOST])) == MOST


@needs_slices("explain")
def test_two_causes_are_two_annotations(captures, small_model):
    path = small_model(kind="Q8_0")
    both = record_faulty(together(BUGS[6], BUGS[9]), path, TOKENS)
    result = check(captures / "a.safetensors", path, candidate=both)
    titles = [one.title for one in annotations_of("t.py", 7, result)]
    assert len(result.wrong) == 5
    assert len(titles) == 2
    assert titles[0].startswith("llamadiff: WRONG ffn_gate-0 (gate-up-swapped)")
    assert titles[1].startswith("llamadiff: WRONG result_norm")


def test_a_capture_says_who_checked_it(captures):
    info = Trace.open(captures / "a.safetensors").info
    checked = info.producer["checked"]
    assert (checked["engine"], checked["verdict"]) == ("numpy", "match")
    assert checked["taps"] == len(Trace.open(captures / "a.safetensors"))


# -- recording


def test_a_capture_is_not_overwritten(small_model, tmp_path):
    """And its folder is made, as docs/ci.md's first command needs it."""
    path = tmp_path / "new" / "captures" / "t.safetensors"
    words = ("capture", small_model(), "--tokens", "1,17,5", "-o", path)
    assert run(*words).returncode == 0
    before = path.read_bytes()
    done = run(*words, "--n-predict", "1")
    assert (done.returncode, path.read_bytes()) == (2, before)
    assert done.stderr == f"llamadiff: {path}: is there already; give another name, or --force to overwrite it\n"
    assert run(*words, "--n-predict", "1", "--force").returncode == 0
    assert path.read_bytes() != before
