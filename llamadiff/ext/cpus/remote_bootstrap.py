"""A process of llamadiff's where nothing of that is installed: its own source is sent to it first.

Whatever starts a Python whose standard input and output come through will do: an emulator, a container, ssh.
"""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from functools import cache
from pathlib import Path
from subprocess import PIPE
from typing import Any

from llamadiff import plugins
from llamadiff.system.commands import split_line
from llamadiff.system.errors import UserError
from llamadiff.system.started import Process, kill, start

# All that such a process imports of this package beside what slices name, and nothing that is not Python's own
# (tests/ext/cpus/test_runner.py).
MODULES = (
    "llamadiff.llamacpp.blocks", "llamadiff.llamacpp.child_main",
    "llamadiff.llamacpp.tensor_transport", "llamadiff.llamacpp.installed", "llamadiff.llamacpp.interface",
    "llamadiff.llamacpp.layout", "llamadiff.llamacpp.library", "llamadiff.llamacpp.observer",
    "llamadiff.llamacpp.passes", "llamadiff.llamacpp.probes", "llamadiff.llamacpp.request",
    "llamadiff.llamacpp.run", "llamadiff.llamacpp.session", "llamadiff.llamacpp.steps",
    "llamadiff.llamacpp.tap_names", "llamadiff.llamacpp.tensors", "llamadiff.numerics.types",
    "llamadiff.system.commands", "llamadiff.system.errors", "llamadiff.system.exits", "llamadiff.system.stale_files",
    "llamadiff.system.libraries", "llamadiff.system.output", "llamadiff.system.python_child",
    "llamadiff.system.started", "llamadiff.system.stops", "llamadiff.trace.taps",
)  # fmt: skip
LLAMA_CPP = "llamadiff.llamacpp.child_main"  # what can be started; a slice may have another
ROOT = Path(__file__).parents[3]
SHELLS = ("ssh", "adb", "mosh")  # programs whose words a shell reads once more

# What the Python there runs: it reads the sources, of so many bytes, and finds modules among them.
_READ = """import os, json
b = b""
while len(b) < {count}: b += os.read(0, {count} - len(b)) or exit(1)
exec(json.loads(b)["begin"])"""
_BEGIN = """
import importlib.abc, importlib.util, sys
sent = json.loads(b)
class Sent(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    def find_spec(self, name, path, target=None):
        if name in sent["modules"]:
            spec = importlib.util.spec_from_loader(name, self, is_package=self.is_package(name))
            spec.origin, spec.has_location = self.get_filename(name), True
            return spec
    def is_package(self, name):
        return any(other.startswith(name + ".") for other in sent["modules"])
    def get_filename(self, name):
        return "sent/" + name.replace(".", "/") + ("/__init__.py" if self.is_package(name) else ".py")
    def get_source(self, name):
        return sent["modules"][name]
    def get_data(self, path):
        return sent["files"][path.replace("\\\\", "/").partition("sent/")[2]].encode()
sys.meta_path.insert(0, Sent())
if sys.version_info < (3, 10):
    print(json.dumps({"error": "Python " + sys.version.split()[0] + " is too old; give one of 3.10 or later"}))
    exit(1)
import importlib
importlib.import_module(sent["main"]).main(*sent["words"])
"""


def started_by(runner: str, *words: str, main: str = LLAMA_CPP) -> tuple[list[str], bytes]:
    """The command line that a runner starts the ``main`` of a module with, and what it is sent first.

    Raises UserError for a runner that is no command.
    """
    try:
        parts = split_line(runner)
    except ValueError as error:
        raise UserError(f"runner={runner}: is no command ({error})") from None
    if not parts:
        raise UserError("runner=: is empty; give the words that start a Python, such as 'docker exec -i box python3'")
    sources = {"begin": _BEGIN, "main": main, "words": words, "modules": _sources(), "files": _files()}
    sent = json.dumps(sources).encode()
    code = _READ.format(count=len(sent))
    return [*parts, "-c", shlex.quote(code) if Path(parts[0]).stem in SHELLS else code], sent


def start_there(runner: str, *words: str, main: str = LLAMA_CPP, **streams: Any) -> Process:
    """The process itself, which is sent its source. Raises UserError for a runner that cannot be started."""
    command, sent = started_by(runner, *words, main=main)
    try:
        process = start(command, kill, stdin=PIPE, stdout=PIPE, **streams)
    except OSError as error:
        raise UserError(f"runner={runner}: {command[0]} cannot be started ({error.strerror})") from None
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # who reads its answers is told how it ended
        process.stdin.write(sent)
        process.stdin.flush()
    return process


@cache
def _sources() -> dict[str, str]:
    """The modules and the packages that they lie in, which are empty there."""
    modules = [*MODULES, *(name for names in plugins.ask_all(lambda each: each.remote) for name in names)]
    packages = {".".join(name.split(".")[:depth]) for name in modules for depth in range(1, name.count(".") + 1)}
    found = {name: ROOT.joinpath(*name.split(".")).with_suffix(".py").read_text("utf-8") for name in modules}
    return {**dict.fromkeys(packages, ""), **found}


def _files() -> dict[str, str]:
    names = [name for names in plugins.ask_all(lambda each: each.remote_files) for name in names]
    return {name: (ROOT / name).read_text("utf-8") for name in names}
