"""Builds of llama.cpp as Windows and macOS have them: found, and the shim linked with them; it is run nowhere here."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from cross import OLD_HEADERS, SYSTEMS, compiler
from optional import needs

from llamadiff import UserError
from llamadiff.ext.builds import build_tree, compiled, shims
from llamadiff.ext.builds.build_tree import BuildTree
from llamadiff.system import libraries
from llamadiff.system.libraries import LINUX, MACOS, WINDOWS, Libraries

CALLED = (
    "llama_model_default_params", "llama_context_default_params", "llama_model_load_from_file", "llama_init_from_model",
    "llama_batch_init", "llama_decode", "llama_n_layer", "llama_n_ctx_train", "llama_free_model", "llama_get_model",
    "llama_model_meta_val_str", "llama_kv_cache_clear", "llama_kv_cache_seq_rm", "llama_kv_cache_seq_cp",
    "llama_kv_cache_seq_add", "llama_batch_free",
)  # fmt: skip
BEGIN = {"x86_64-windows-gnu": b"MZ", "aarch64-macos": b"\xcf\xfa\xed\xfe"}
pytestmark = needs("ziglang")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    shutil.copytree(OLD_HEADERS, tmp_path / "checkout/include")
    return tmp_path / "checkout"


@pytest.mark.parametrize(("here", "file"), [
    (LINUX, "build/bin/libllama.so"), (LINUX, "lib/x86_64-linux-gnu/libllama.so.0"), (MACOS, "lib/libllama.dylib"),
    (MACOS, "build/bin/libllama.dylib"), (WINDOWS, "build/bin/Release/llama.dll"), (WINDOWS, "bin/Release/llama.dll"),
    (WINDOWS, "bin/libllama.dll"),
])  # fmt: skip
def test_a_library_is_found_under_its_systems_name(
    here: Libraries, file: str, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree / file).parent.mkdir(parents=True)
    (tree / file).touch()
    for system in (LINUX, MACOS, WINDOWS):
        monkeypatch.setattr(libraries, "HERE", system)
        if system is here:
            assert build_tree.find(tree).library == tree / file
        else:
            with pytest.raises(UserError, match=f"checkout: no {system.name('llama')} in it"):
                build_tree.find(tree)


def built(system: str, tree: Path, names: tuple[str, ...] = CALLED) -> BuildTree:
    """The tree with a libllama that has functions of these names, and a ggml beside it."""
    folder = tree / "build/bin"
    folder.mkdir(parents=True)
    for stem, functions in (("llama", names), ("ggml", ("ggml_backend_dev_count",))):
        export = "__declspec(dllexport)" if SYSTEMS[system] is WINDOWS else ""
        source = "".join(f"{export} void {name}(void) {{}}\n" for name in functions)
        (folder / f"{stem}.c").write_text(source, encoding="utf-8")
        words = ["-shared", "-o", SYSTEMS[system].name(stem), f"{stem}.c"]
        subprocess.run([*compiler(system), *words], cwd=folder, check=True)
    return build_tree.find(tree)


@pytest.fixture(params=BEGIN)
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Another system, taken for the one that this is."""
    monkeypatch.setattr(libraries, "HERE", SYSTEMS[request.param])
    monkeypatch.setenv("CC", shlex.join(compiler(request.param)))
    return str(request.param)


def shim(tree: BuildTree, folder: Path) -> bytes:
    """The shim of a tree, linked."""
    target = folder / f"shim{libraries.HERE.suffix}"
    flags = compiled.flags_of(tree.words(), tree.words("llama.h"))
    shims.compiled(compiled.shim_of(tree, flags), target)
    return target.read_bytes()


def test_the_shim_is_linked_with_it(system: str, tree: Path, tmp_path: Path) -> None:
    library = shim(built(system, tree), tmp_path)
    assert library.startswith(BEGIN[system])
    assert all(name in library for name in (b"shim_fields", b"shim_decode", b"llama_decode"))
    assert SYSTEMS[system].name("llama").encode() in library
    assert (f"{tree}/build/bin".encode() in library) == (SYSTEMS[system] is not WINDOWS)  # which has no such paths


@pytest.mark.parametrize("system", ["x86_64-windows-gnu"], indirect=True)
def test_an_import_library_comes_first(system: str, tree: Path, tmp_path: Path) -> None:
    found = built(system, tree)
    imports = (tree / "build/bin/llama.lib").rename(tmp_path / "llama.lib")
    found.library.write_bytes(b"no library")
    with pytest.raises(UserError, match=r"llama\.dll"):
        shim(found, tmp_path)
    (tree / "build/src/Release").mkdir(parents=True)
    imports.rename(tree / "build/src/Release/llama.lib")
    assert b"llama.dll" in shim(found, tmp_path)


def test_a_library_that_lacks_a_function_is_not_linked(system: str, tree: Path, tmp_path: Path) -> None:
    """Linux says so when the shim is loaded: test_any_build.py."""
    with pytest.raises(UserError, match=r"undefined symbol: _?llama_batch_free"):
        shim(built(system, tree, CALLED[:-1]), tmp_path)
