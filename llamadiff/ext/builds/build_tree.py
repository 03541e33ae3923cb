"""Finds headers and libraries in a directory of llama.cpp: a checkout, a build, or what a build installed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from llamadiff.llamacpp.library import LLAMA, LLAMA_CPP_PYTHON
from llamadiff.system import libraries
from llamadiff.system.errors import UserError

MAX_HEADER = 1 << 22  # bytes
MAX_CACHE = 1 << 22  # bytes of a CMakeCache.txt
HEADERS = ("llama.h", "ggml.h", "ggml-backend.h")
_LIBRARIES = (
    "lib", "lib64", "lib/*", "bin", "", "src", "build/bin", "build/src", "build/lib", "build", "llama_cpp/lib",
    "bin/Release", "build/bin/Release",
)  # fmt: skip
_INCLUDES = ("include", "ggml/include", "", "include/llama.cpp", "src/include")
_OPS = re.compile(r"GGML_(?:OP|UNARY_OP|GLU_OP)_(?!COUNT$|NONE$|UNARY$|GLU$|POOL_(?:MAX|AVG|COUNT)$)(\w+)")
_HOME = re.compile(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.+)$", re.MULTILINE)


@dataclass(frozen=True)
class BuildTree:
    """Where a llama.cpp has its headers and its libllama."""

    folder: Path
    includes: tuple[Path, ...]
    library: Path

    @property
    def headers(self) -> tuple[Path, ...]:
        """Every header beside those that are needed, in order of their names."""
        return tuple(sorted(path for folder in self.includes for path in folder.glob("*.h") if path.is_file()))

    def words(self, *names: str) -> frozenset[str]:
        """All names in the headers that are needed, or in those of ``names``."""
        found = (_first(self.includes, name) for name in names or HEADERS)
        return frozenset(word for path in found if path for word in re.findall(r"\w+", _text(path, MAX_HEADER)))

    def ops(self) -> frozenset[str]:
        """The ops that ggml.h has: unary ops and GLUs by their own names."""
        return frozenset(match[1] for match in map(_OPS.fullmatch, self.words()) if match)


def find(folder: Path) -> BuildTree:
    """What a directory holds. Raises UserError that says what is not there."""
    tree = find_library(folder)
    lacking = [name for name in HEADERS if _first(tree.includes, name) is None]
    if lacking:
        raise UserError(
            f"--llama-cpp {folder}: no {lacking[0]} in it (nor in include, ggml/include); give a checkout, its build, "
            "or an install with headers"
        )
    return tree


def find_library(folder: Path) -> BuildTree:
    """What a directory holds, with headers or without. Raises UserError for one that has no libllama."""
    if not folder.is_dir():
        raise UserError(f"--llama-cpp {folder}: is not a directory; give a build or an install of llama.cpp")
    folder = folder.resolve()
    library = next(_libraries(folder, LLAMA, libraries.HERE.names), None)
    if library is None:
        raise UserError(
            f"--llama-cpp {folder}: no {libraries.HERE.name(LLAMA)} in it (nor in lib, bin, build/bin); "
            "build llama.cpp with -DBUILD_SHARED_LIBS=ON, and give the directory of the build"
        )
    return BuildTree(folder, tuple(_includes(folder)), library)


def backends(tree: BuildTree) -> Path:
    """The folder of the backends that ggml loads by itself: libllama's, as a rule."""
    names = (*libraries.HERE.names, *libraries.HERE.modules)
    return next((path.parent for path in _libraries(tree.folder, "ggml-cpu*", names)), tree.library.parent)


def _libraries(folder: Path, stem: str, names: Iterable[str]) -> Iterator[Path]:
    for place in _places(folder, _LIBRARIES):
        for name in names:
            yield from sorted(place.glob(name.format(stem)))


def _includes(folder: Path) -> Iterator[Path]:
    """Directories that hold a header that is needed, each header in the first place only."""
    seen = set[str]()
    for place in (
        *_places(folder, _INCLUDES),
        *(found for home in _homes(folder) for found in _places(home, _INCLUDES)),
    ):
        there = {name for name in HEADERS if (place / name).is_file()}
        if there - seen:
            yield place
        seen |= there


def _homes(folder: Path) -> Iterator[Path]:
    """The sources that a build was made from, as CMake notes them; else the directory that the build lies in.

    What lies beside a Python package is another's: llama-cpp-python alone has its headers there.
    """
    cache = folder / "CMakeCache.txt"
    match = _HOME.search(_text(cache, MAX_CACHE)) if cache.is_file() else None
    if match:
        yield Path(match[1])
    elif folder.name == LLAMA_CPP_PYTHON.module or not (folder / "__init__.py").is_file():
        yield folder.parent


def _places(folder: Path, names: Iterable[str]) -> Iterator[Path]:
    for name in names:
        found = sorted(folder.glob(name)) if name else [folder]
        yield from (path for path in found if path.is_dir())


def _first(folders: Iterable[Path], name: str) -> Path | None:
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def _text(path: Path, most: int) -> str:
    """A file's text. Raises UserError for one that is far too large, or cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if len(data) > most:
        raise UserError(f"{path}: more than {most >> 20} MiB; that is no file of llama.cpp's")
    return data.decode("utf-8", "replace")
