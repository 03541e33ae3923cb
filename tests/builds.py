"""A llama.cpp of one's own: the installed one as a build leaves it, and libraries that are compiled in its place."""

from __future__ import annotations

import subprocess
from pathlib import Path

from llamadiff.llamacpp.library import LLAMA_CPP_PYTHON

INSTALLED = LLAMA_CPP_PYTHON.folder  # llama_cpp, with its libraries in lib
HEADERS = INSTALLED.parent / "include"


def checkout(folder: Path) -> Path:
    """The installed llama.cpp in a directory as a build leaves it: headers apart, libraries in bin."""
    (folder / "build").mkdir(parents=True)
    (folder / "include").symlink_to(HEADERS)
    (folder / "build/bin").symlink_to(INSTALLED / "lib")
    return folder


def other_library(build: Path, source: str) -> None:
    """A libllama of one's own in the build's place."""
    (build / "build/bin").unlink()
    (build / "build/bin").mkdir()
    compiled(build / "build/bin/libllama.so", source)


def compiled(library: Path, source: str, *flags: str) -> None:
    code = library.with_suffix(".c")
    code.write_text(source, encoding="utf-8")
    subprocess.run(["cc", "-shared", "-fPIC", str(code), *flags, "-o", str(library)], check=True)
