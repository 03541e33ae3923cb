"""Slices are found in their folder: what cannot be imported, or lacks another, is missing and said; the rest runs."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest
from command import run
from places import ROOT

import llamadiff.ext
from llamadiff import UserError, check, compare, plugins
from llamadiff.candidates.opening import source_of
from llamadiff.cli.commands import _update
from llamadiff.cli.reports import Reports
from llamadiff.engines.run_spec import Gate, How, Run
from llamadiff.llamacpp.doctor import BAD, examine
from llamadiff.llamacpp.request import Settings
from llamadiff.plugins import Missing
from llamadiff.verbs.verbs import record

BROKEN = "import no_such_module\n"
LACKING = "from llamadiff.plugins import Slice\n\nclass Lacking(Slice):\n    needs = ({!r},)\n\nslice_ = Lacking()\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """folder(name=source): such slices are beside the others."""
    monkeypatch.setattr(llamadiff.ext, "__path__", [*llamadiff.ext.__path__, str(tmp_path)])

    def put(**sources: str) -> None:
        for name, source in sources.items():
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").write_text(source, encoding="utf-8")
        plugins.load.cache_clear()

    yield put
    plugins.load.cache_clear()


def test_a_slice_that_cannot_be_imported_is_missing_and_the_others_are_there(folder):
    before, missing_before = plugins.load()
    folder(broken_slice=BROKEN)
    slices, missing = plugins.load()
    assert slices.keys() == before.keys()
    said = "ModuleNotFoundError: No module named 'no_such_module'"
    assert {*missing} - {*missing_before} == {Missing("broken_slice", said)}


def test_help_and_doctor_say_what_is_missing(folder):
    folder(broken_slice=BROKEN)
    said = "ModuleNotFoundError: No module named 'no_such_module'"
    assert f"Missing: broken_slice ({said})" in run("--help").stdout
    examined = next(each for each in examine() if each.name == "slice broken_slice")
    assert (examined.state, examined.found) == (BAD, f"missing: {said}")


def test_a_slice_that_lacks_another_is_missing_with_what_needs_it(folder):
    before = plugins.missing_slices()
    folder(first_slice=LACKING.format("no_slice"), second_slice=LACKING.format("first_slice"))
    assert {*plugins.missing_slices()} - {*before} == {
        Missing("first_slice", "needs no_slice, which is missing"),
        Missing("second_slice", "needs first_slice, which is missing"),
    }


def test_a_candidate_that_nobody_takes_is_refused_with_what_is_missing(folder):
    folder(broken_slice=BROKEN)
    with pytest.raises(UserError, match="llamadiff doctor says why broken_slice"):
        source_of("what:ever")


def test_nobody_who_records_pytorch_is_said(monkeypatch):
    monkeypatch.setattr(plugins, "slices", dict)
    monkeypatch.delitem(sys.modules, "llamadiff.torch", raising=False)
    with pytest.raises(ImportError, match="llamadiff doctor says why"):
        import_module("llamadiff.torch")


@pytest.mark.parametrize(("settings", "engine", "said"), [
    (Settings(), "graph", r"--engine graph: the slice that .* is missing; llamadiff doctor"),
    (Settings(runner="ssh there"), "numpy", r"runner=ssh there: the slice that starts one is missing"),
])  # fmt: skip
def test_what_a_run_needs_and_no_slice_has_is_said(settings, engine, said, small_model, monkeypatch):
    monkeypatch.setattr(plugins, "slices", dict)
    with pytest.raises(UserError, match=said):
        compare(small_model(), Run(tokens=(1, 17, 5), settings=settings), how=How(engine=engine))


def test_limits_of_the_logits_that_nobody_holds_to_are_refused(small_model, tmp_path, monkeypatch):
    monkeypatch.setattr(plugins, "slices", dict)
    trace = record(small_model(), Run(tokens=(1, 17, 5)), tmp_path / "t.safetensors")
    assert check(trace, small_model(), How(gate=Gate())).verdict == "match"
    with pytest.raises(UserError, match="limits of the logits' KL: the slice that holds to them is missing"):
        check(trace, small_model(), How(gate=Gate(mean=1.0)))


def test_that_nobody_records_captures_anew_is_said(monkeypatch):
    monkeypatch.setattr(plugins, "slices", dict)
    with pytest.raises(UserError, match="--update: the slice that records captures anew is missing"):
        _update([], None, None, Reports(), False)


@pytest.mark.skipif(not (ROOT / "tests" / "ext").is_dir(), reason="slices are deleted (tools/without.py)")
def test_nothing_is_missing():
    assert plugins.missing_slices() == ()
    assert "Missing" not in run("--help").stdout


def test_no_command_of_a_slice_makes_help_wait():
    code = "import sys, llamadiff.cli.app; print(*{'numpy', 'pandas', 'torch', 'jinja2'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.split() == []
