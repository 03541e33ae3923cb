"""Other systems' compilers: zig brings headers and libraries of all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from places import TESTS

from llamadiff.system.libraries import LINUX, MACOS, WINDOWS

# A system as zig calls it, and how libraries are there
SYSTEMS = {"x86_64-windows-gnu": WINDOWS, "aarch64-macos": MACOS, "aarch64-linux-gnu": LINUX}
OLD_HEADERS = TESTS / "ext/builds/old_headers"
PEDANTIC = ("-Wall", "-Wextra", "-pedantic")


def compiler(system: str, language: str = "cc") -> list[str]:
    """A compiler of C, or of C++ (c++), for a system."""
    return [sys.executable, "-m", "ziglang", language, "-target", system]


def warnings(system: str, source: Path, made: Path, *flags: str) -> str:
    """What is said of a file of C or C++ that is compiled for a system with every warning on."""
    words = compiler(system, "c++" if source.suffix == ".cpp" else "cc")
    command = [*words, *PEDANTIC, *flags, "-c", "-o", str(made), str(source)]
    return subprocess.run(command, capture_output=True, check=False).stderr.decode()
