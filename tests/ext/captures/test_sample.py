"""A small engine's own project, with a bug put in and taken out: through its tests, ``check`` and ``compare``."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command import run
from places import ROOT

from llamadiff import Trace
from llamadiff.engines.run_spec import Run
from llamadiff.llamacpp.shipped import shipped_model
from llamadiff.verbs.demo import PROMPT
from llamadiff.verbs.verbs import record

SAMPLE = Path(__file__).with_name("sample")
BUGS = {  # what stands in the engine, what an author might have written instead, and what is to be said of it
    "rope": ("self.base ** (", "500000.0 ** (", "RoPE, layers 0-2: "),
    "residual": ('x = t[f"l_out-{i}"] = x + y', 'x = t[f"l_out-{i}"] = y', "addition, layers 0-2: "),
    "epsilon": ('+ self.eps)', '+ 1e-3)', "RMSNorm, layers 0-2: "),
}  # fmt: skip
ENTRY = "[pytest11]\nllamadiff = llamadiff.pytest_plugin\n"


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample")
    record(shipped_model(), Run(PROMPT), folder / "tiny.safetensors")
    record(shipped_model(), Run(PROMPT), folder / "sketch.safetensors", sketch=True)
    return folder


@pytest.fixture
def project(captured, tmp_path):
    """The project in a directory of its own, and a package index of one that names the plugin."""
    folder = tmp_path / "project"
    shutil.copytree(SAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(captured, folder / "captures")
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    installed = tmp_path / "installed" / "llamadiff_entry-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: llamadiff-entry\nVersion: 0\n", encoding="utf-8")
    (installed / "entry_points.txt").write_text(ENTRY, encoding="utf-8")
    return folder


def spoil(project: Path, bug: str) -> None:
    right, wrong, _ = BUGS[bug]
    path = project / "engine.py"
    text = path.read_text("utf-8")
    assert text.count(right) == 1
    path.write_text(text.replace(right, wrong), encoding="utf-8")


def mend(project: Path) -> None:
    shutil.copy(SAMPLE / "engine.py", project)


def suite(project: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """The project's own tests, in a process of their own that finds the plugin by its entry point."""
    found = [str(project.parent / "installed"), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(found), "MODEL": str(shipped_model()),
                   "OMP_NUM_THREADS": "1", "COLUMNS": "200", **more}  # fmt: skip
    environment = {key: value for key, value in environment.items() if value}
    command = [sys.executable, "-B", "-m", "pytest", "-p", "no:cacheprovider", "-q", *words]
    return subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, check=False, encoding="utf-8"
    )


def engine(project: Path) -> str:
    return "cmd: " + shlex.join([sys.executable, str(project / "engine.py"), "{model}", "{tokens}", "{out}"])


def test_a_test_goes_red_and_green(project):
    one = ("-k", "what_llama_cpp_does")
    spoil(project, "rope")
    done = suite(project, *one)
    assert done.returncode == 1
    assert f"WRONG  {BUGS['rope'][2]}" in done.stdout
    assert "own error" in done.stdout  # the table
    assert f"test_it_computes_what_llama_cpp_does - {BUGS['rope'][2]}uses base 500000" in done.stdout.splitlines()[-2]
    mend(project)
    assert suite(project, *one).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_red_with_the_bug_and_green_without(bug, project):
    """By all three ways, with one sentence."""
    captures, model, said = project / "captures", shipped_model(), BUGS[bug][2]
    spoil(project, bug)
    by_plugin = suite(project)
    assert by_plugin.returncode == 1
    assert "2 failed, 1 passed" in by_plugin.stdout
    assert f"WRONG  {said}" in by_plugin.stdout
    assert "own error" in by_plugin.stdout  # the table
    assert "recorded by llama.cpp" in by_plugin.stdout
    by_check = run("check", captures, "--model", model, "--candidate", engine(project))
    assert by_check.returncode == 1
    assert " ".join(by_check.stdout.split()).count(f".safetensors: {said}") == 2
    assert "2 wrong, of " in by_check.stdout
    by_compare = run("compare", model, PROMPT, "--candidate", engine(project))
    assert by_compare.returncode == 1
    assert said in by_compare.stdout
    mend(project)
    assert suite(project).returncode == 0
    assert run("check", captures, "--model", model, "--candidate", engine(project)).returncode == 0
    assert run("compare", model, PROMPT, "--candidate", engine(project)).returncode == 0


@pytest.mark.slow
def test_under_xdist_and_on_github(project):
    spoil(project, "rope")
    done = suite(project, "-n", "2", GITHUB_ACTIONS="true", GITHUB_WORKSPACE=str(project.parent))
    assert "2 failed, 1 passed" in done.stdout
    lines = [line for line in done.stdout.splitlines() if line.startswith("::error")]
    number = 1 + (project / "test_engine.py").read_text("utf-8").splitlines().index(
        "def test_it_computes_what_llama_cpp_does(llamadiff_check):"
    )
    assert len(lines) == 2
    start = f"::error file=project/test_engine.py,line={number},title=llamadiff%3A WRONG Qcur_rope-0"
    assert any(line.startswith(start) for line in lines)
    assert "::error" not in suite(project, GITHUB_ACTIONS="").stdout


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("-n", "2")], ids=["", "xdist"])
def test_captures_are_recorded_anew_where_that_is_asked_for(more, project):
    path = project / "captures" / "tiny.safetensors"
    before = path.read_bytes()
    assert suite(project, *more).returncode == 0
    assert path.read_bytes() == before
    done = suite(project, "--llamadiff-update", *more)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("UPDATED") == 2
    assert "54 taps; none changed; checked: MATCH" in done.stdout
    assert Trace.open(path).info.producer["checked"]["verdict"] == "match"


def test_without_a_candidate_no_test_passes(project):
    capture = f"'captures/tiny.safetensors', model={str(shipped_model())!r}"
    lines = (f"def test_{name}(llamadiff_check): llamadiff_check({capture}{more})" for name, more in
             (("none", ""), ("itself", ", candidate=None")))  # fmt: skip
    (project / "test_engine.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
    done = suite(project)
    assert (done.returncode, "1 failed, 1 passed" in done.stdout) == (1, True), done.stdout
    assert "test_none - llamadiff: llamadiff_check(capture) asks no engine; give candidate=" in done.stdout


def test_what_is_refused_fails_the_test_in_one_line(project):
    (project / "captures" / "tiny.safetensors").write_bytes(bytes(20))
    done = suite(project, "-k", "what_llama_cpp_does")
    assert done.returncode == 1
    assert "what_llama_cpp_does - llamadiff: " in done.stdout.splitlines()[-2]  # pytest's summary
    assert "not a readable trace" in done.stdout
    assert "Traceback" not in done.stdout


def test_the_plugin_costs_nothing_where_it_is_not_used():
    heavy = ("numpy", "gguf", "pandas", "rich", "typer", "llamadiff.verbs", "llamadiff.result", "llamadiff.trace")
    code = f"import sys, llamadiff.pytest_plugin; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, encoding="utf-8")
    assert done.stdout == "[]\n"


def test_the_package_names_the_plugin():
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    assert '[project.entry-points.pytest11]\nllamadiff = "llamadiff.pytest_plugin"\n' in text
