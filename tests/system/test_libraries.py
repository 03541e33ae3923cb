"""Shared libraries: what one lacks is found behind it, and each system has its names."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from builds import compiled
from optional import needs

from llamadiff.system import libraries
from llamadiff.system.libraries import Loaded, file_with


@needs("cc")
def test_what_a_library_lacks_is_found_behind_it(tmp_path: Path) -> None:
    for name, value in (("front", 1), ("behind", 2)):
        compiled(tmp_path / f"{name}.so", f"int {name}(void) {{ return {value}; }}")
    front, behind = tmp_path / "front.so", Loaded(tmp_path / "behind.so")
    assert not hasattr(Loaded(front), "behind_it")
    with pytest.raises(AttributeError, match="nowhere"):
        _ = Loaded(front, [behind]).nowhere
    both = Loaded(front, [behind])
    assert (both["front"](), both["behind"]()) == (1, 2)


@needs("cc")
def test_a_function_says_which_file_it_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled(tmp_path / "front.so", "int front(void) { return 1; }")
    library = Loaded(tmp_path / "front.so")
    assert file_with(library, "front") == tmp_path / "front.so"
    assert file_with(library, "back") is None
    monkeypatch.setattr(libraries, "HERE", libraries.WINDOWS)
    assert file_with(library, "front") is None


@pytest.mark.parametrize(("system", "name", "ending"), [
    ("linux", "libllama.so", ".so"), ("freebsd14", "libllama.so", ".so"), ("darwin", "libllama.dylib", ".dylib"),
    ("win32", "llama.dll", ".dll"),
])  # fmt: skip
def test_each_system_has_its_names(system: str, name: str, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", system)
    here = runpy.run_path(libraries.__file__)["HERE"]
    assert (here.name("llama"), here.suffix) == (name, ending)
