"""All C of the package, compiled for Windows, macOS and ARM without a warning. What is made is run nowhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from builds import HEADERS
from cross import OLD_HEADERS, SYSTEMS, warnings
from optional import needs
from places import ROOT

from llamadiff.ext.builds.compiled import flags_of
from llamadiff.ext.writers import writers
from llamadiff.numerics.compiled import library

SOURCES = sorted(path for path in (ROOT / "llamadiff").rglob("*.c*") if path.suffix in (".c", ".cpp"))


def has(headers: Path) -> list[str]:
    """What tells the shim of what these headers have."""
    words = {path.name: {*re.findall(r"\w+", path.read_text("utf-8"))} for path in headers.glob("*.h")}
    return flags_of(set().union(*words.values()), words["llama.h"])


FLAGS = {"kernels": ("-O3",), "shim": (f"-I{OLD_HEADERS}", *has(OLD_HEADERS)), "trace_writer": ()}
# On Windows no library is put before a program's own: `watch` says so, and its C is of no use there.
PAIRS = [(path, system) for path in SOURCES for system in SYSTEMS if path.stem != "watch" or "windows" not in system]
EVERY = pytest.mark.parametrize("system", SYSTEMS)
pytestmark = needs("ziglang")


@pytest.mark.parametrize(("source", "system"), PAIRS, ids=[f"{path.name}-{system}" for path, system in PAIRS])
def test_it_compiles_without_a_warning(source: Path, system: str, tmp_path: Path) -> None:
    assert warnings(system, source, tmp_path / "made.o", *FLAGS.get(source.stem, ())) == ""
    assert (tmp_path / "made.o").stat().st_size > 1000


@EVERY
@pytest.mark.skipif(not HEADERS.is_dir(), reason="this llama-cpp-python was installed without llama.cpp's headers")
def test_the_shim_compiles_against_the_installed_headers(system: str, tmp_path: Path) -> None:
    flags = has(HEADERS)
    assert "-DHAS_flash_attn_type" in flags
    shim = ROOT / "llamadiff/ext/builds/shim.c"
    assert warnings(system, shim, tmp_path / "made.o", f"-isystem{HEADERS}", *flags) == ""


@EVERY
@pytest.mark.parametrize(("added", "said"), [
    ("static int odd(void) { return 1; }", "unused function 'odd'"), ("#include <no_such.h>", "file not found"),
    ("int odd(void) { int x; return 1; }", "unused variable 'x'"),
])  # fmt: skip
def test_a_warning_is_seen(added: str, said: str, system: str, tmp_path: Path) -> None:
    source = tmp_path / "right.c"
    source.write_text((ROOT / "llamadiff/ext/explain/mends/right.c").read_text("utf-8") + added, encoding="utf-8")
    assert said in warnings(system, source, tmp_path / "made.o")


def test_windows_exports_what_is_called(tmp_path: Path) -> None:
    """And what setuptools exports of an extension."""
    kernels, shim = tmp_path / "kernels.o", tmp_path / "shim.o"
    assert warnings("x86_64-windows-gnu", Path(library.__file__).with_name("kernels.c"), kernels) == ""
    assert warnings("x86_64-windows-gnu", ROOT / "llamadiff/ext/builds/shim.c", shim, *FLAGS["shim"]) == ""
    for made, names in (
        (kernels, (*library._ARGUMENTS, "PyInit_kernels")),
        (shim, ("shim_fields", "shim_load_backends", "shim_model", "shim_context", "shim_decode")),
    ):
        for name in names:
            assert f"-export:{name}".encode() in made.read_bytes(), name


@EVERY
def test_the_writer_of_zig_is_analysed_for_it(system: str, tmp_path: Path) -> None:
    (tmp_path / writers.LANGUAGES["zig"].file).write_text(writers.source("zig"), encoding="utf-8")
    (tmp_path / "driver.zig").write_bytes((ROOT / "tests/ext/writers/driver.zig").read_bytes())
    words = ("-m", "ziglang", "build-exe", "driver.zig", "-lc", "-target", system, "-fno-emit-bin")
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
