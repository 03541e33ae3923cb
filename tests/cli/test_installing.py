"""What is installed for whom: the tool alone comes without torch, and its tests' needs are added to the same place."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires

import pytest
from packaging.requirements import Requirement
from places import ROOT

from llamadiff.system.stated import read_toml

HEAVY = {"torch", "transformers", "accelerate", "tokenizers", "triton"}
TOML = ROOT / "pyproject.toml"
PROJECT = read_toml(TOML)["project"]
OLDEST = re.compile("llama-cpp-python>=([0-9.]+)")


def closure(stated: list[str]) -> set[str]:
    """The names of all that these requirements bring, as far as it is installed here."""
    found: set[str] = set()
    pending = [(Requirement(text), "") for text in stated]
    while pending:
        requirement, extra = pending.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        for wanted in {"", *requirement.extras} if name not in found else requirement.extras:
            pending += [(Requirement(text), wanted) for text in _required(name)]
        found.add(name)
    return found


def _required(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:  # for other systems, or not installed
        return []


def test_the_tool_is_installed_without_torch():
    brought = closure(PROJECT["dependencies"])
    assert brought > {"numpy", "gguf", "llama-cpp-python", "typer", "markupsafe"}  # jinja2's own: it is followed
    assert not brought & HEAVY
    assert not [name for name in brought if name.startswith("nvidia")]


def test_a_heavy_package_would_be_seen():
    assert closure([*PROJECT["dependencies"], "accelerate>=1"]) >= {"accelerate", "torch"}


def test_every_message_names_the_oldest_llama_cpp_that_is_taken():
    stated = {
        path.name: OLDEST.findall(path.read_text("utf-8")) for path in [*(ROOT / "llamadiff").rglob("*.py"), TOML]
    }
    assert len(set().union(*stated.values())) == 1, stated
    assert stated["pyproject.toml"]
    assert not re.findall("llama-cpp-python==", TOML.read_text("utf-8"))


BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())
"""


@pytest.mark.slow
def test_tests_that_need_torch_are_skipped_with_a_reason_where_it_is_absent(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BLOCK, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "tests/pytorch"]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, encoding="utf-8"
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("no torch and transformers here: make develop") > 10


def planned(target: str, venv: object) -> list[str]:
    """The commands of a make target, in an environment that is not made yet."""
    command = ["make", "--dry-run", "--always-make", f"VENV={venv}", target]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, encoding="utf-8")
    return [line for line in done.stdout.splitlines() if not line.startswith("echo")]


def installs(target: str, venv: object) -> list[str]:
    """What pip is asked for, in order."""
    return [line.rpartition(" ")[2] for line in planned(target, venv) if "pip install" in line]


@pytest.mark.parametrize("target", ["demo", "install", "capture", "zoo"])
def test_the_first_command_installs_the_tool_alone(target, tmp_path):
    assert installs(target, tmp_path / "venv") == ["."]


@pytest.mark.parametrize("target", ["test", "test-all", "lint"])
def test_what_the_tests_need_is_added_in_the_same_place(target, tmp_path):
    assert installs(target, tmp_path / "venv") == [".", "'.[dev]'"]


def test_the_quick_tests_leave_out_the_slow_ones_and_the_whole_suite_none(tmp_path):
    quick, whole = (
        [line for line in planned(target, tmp_path / "venv") if "-m pytest" in line] for target in ("test", "test-all")
    )
    assert len(quick) == len(whole) == 1
    assert quick == [f'{whole[0].strip()} -m "not slow"']
    readme = (ROOT / "README.md").read_text("utf-8")
    assert "make test " in readme
    assert "make test-all " in readme


def test_each_build_of_llama_cpp_is_compiled_apart(tmp_path):
    """pip would take the same wheel for all: it goes by the source alone."""
    lines = planned("builds", tmp_path / "venv")
    wheels = {line.rpartition("--wheel-dir ")[2].split()[0]: line for line in lines if "--wheel-dir" in line}
    assert set(wheels) == {f"build/{name}/wheel" for name in ("native", "avx2", "plain")}
    own = {"build/avx2/wheel", "build/plain/wheel"}
    assert {name for name, line in wheels.items() if "--no-cache-dir" in line} == own
    (oldest,) = OLDEST.findall(TOML.read_text("utf-8"))
    assert {line.rpartition("llama-cpp-python==")[2] for line in wheels.values()} == {oldest}
    assert not [line for line in lines if line.startswith("rm ")]
    assert sum("-m pytest" in line and '-m "not slow"' in line for line in lines) == 3
