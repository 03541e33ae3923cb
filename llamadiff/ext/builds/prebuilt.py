"""llama.cpp of a directory or a package: by its headers, or where it has none, by the table of releases."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from llamadiff.ext.builds.build_tree import backends, find_library
from llamadiff.ext.builds.compiled import Compiled
from llamadiff.ext.builds.structures import declare_by_layout, layout_of
from llamadiff.llamacpp.installed import Installed
from llamadiff.llamacpp.interface import Library
from llamadiff.llamacpp.library import INSTALL, LLAMA, PACKAGES, PREBUILT, Package, behind
from llamadiff.system.errors import UserError
from llamadiff.system.libraries import Loaded


@dataclass(frozen=True)
class Unpacked(Package):
    """A package that pip put into a directory of its own, its metadata beside it (``pip install --target``)."""

    home: Path

    @property
    def folder(self) -> Path | None:
        there = self.home / self.module
        return there if there.is_dir() else None

    @property
    def release(self) -> str:
        return f"{self.name} {next(iter(self._about())).version}"

    @property
    def is_there(self) -> bool:
        """Whether the package is in that directory, and says of which release it is."""
        return self.folder is not None and any(self._about())

    def _about(self) -> Iterable[Distribution]:
        return distributions(name=self.name, path=[str(self.home)])


def open_build(folder: str) -> Library:
    """The llama.cpp in a directory. Raises UserError for one that cannot be used."""
    given = Path(folder)
    homes = (given.parent, given)  # of what it may be: a package's module, or where pip put one
    unpacked = (Unpacked(each.name, each.module, each.places, home) for each in PACKAGES[1:] for home in homes
                if home is given or given.name == each.module)  # fmt: skip
    package = next((each for each in unpacked if each.is_there), None)
    if package is not None:
        return open_package(package)
    tree = find_library(Path(folder))
    if tree.includes:
        return Compiled(folder)
    return open_by_table(tree.library, backends(tree), f"llama.cpp in {tree.folder.name}")


def open_package(package: Package) -> Library:
    """The llama.cpp of a package. Raises UserError for one that cannot be used."""
    llama, cpu = package.find(LLAMA), package.find("ggml-cpu")
    if llama is None or cpu is None:
        raise UserError(f"{package.release}: holds no llama.cpp that Python can call here; pip install {INSTALL}")
    return open_by_table(llama, cpu.parent, package.release)


def open_by_table(llama: Path, backends: Path, name: str) -> Library:
    """A llama.cpp of a release in the table; ``backends``: the folder of those that it loads by itself.

    Raises UserError for one of another release, or that is not laid out as its row says.
    """
    try:
        lib = Loaded(llama, behind(llama))
    except OSError as error:
        raise UserError(
            f"{name}: cannot be loaded on this machine ({error}); install what it lacks, or pip install {INSTALL}"
        ) from None
    releases = [name, *_ggml_release(lib)]
    layout = layout_of(releases)
    if layout is None:
        raise UserError(
            f"{name}: its structures are known neither by headers, nor by its release ({releases[-1]}); "
            f"pip install {PREBUILT}, or give a directory with its headers too (--llama-cpp DIR)"
        )
    declare_by_layout(lib, layout, name)
    if lib.ggml_backend_dev_count() == 0:
        lib.ggml_backend_load_all_from_path(os.fsencode(backends))
    if lib.ggml_backend_dev_count() == 0:
        raise UserError(f"{name}: has no backend that runs on this CPU; pip install {INSTALL}")
    return Installed(lib, name, lib)


def _ggml_release(lib: Any) -> Iterator[str]:
    """ggml's version and commit, where it states both."""
    said = []
    for name in ("ggml_version", "ggml_commit"):
        function = getattr(lib, name, None)
        if function is None:
            return
        function.restype = ctypes.c_char_p
        said.append(function().decode("utf-8", "replace"))
    if said[1] != "unknown":
        yield f"ggml {said[0]} ({said[1]})"
