"""The main commands on Linux, in processes that see of it no more than Windows or macOS has (elsewhere/).

It shows that nothing of POSIX is needed, and that no file is renamed or removed while it is open. What those systems do
in their own way, nobody has seen here: README says what was run where.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import kill_all_of, processes_of
from models import small
from places import ROOT
from waiting import HANG, eventually

from llamadiff.llamacpp.library import LLAMA_CPP_PYTHON
from llamadiff.system.libraries import MACOS, WINDOWS

HERE = Path(__file__).parent / "elsewhere"
IDS = ("--tokens", "1,17,5")

# An engine whose grandchild has left its session and lost its parent, when it was SEEN; the others run on.
ENGINE = """
import subprocess, sys, threading
middle = "import subprocess; subprocess.Popen(['sleep', 'infinity'], start_new_session=True); open('seen').read()"
subprocess.Popen([sys.executable, "-c", middle])
threading.Event().wait()
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shows on Linux what other systems lack")


class Elsewhere:
    """A folder, and commands that are run in it as on another system."""

    def __init__(self, folder: Path, system: str) -> None:
        self.folder, self.system, self.temporary = folder, system, folder / "tmp"
        self.temporary.mkdir()
        small.write_model(folder / "m.gguf")
        (folder / "engine.py").write_text(ENGINE, encoding="utf-8")
        os.mkfifo(folder / "seen")
        self.environment = {
            **os.environ, "TMPDIR": str(self.temporary), "XDG_CACHE_HOME": str(folder / "cache"), "ELSEWHERE": system,
            "SEEN": str(folder / "seen"),
            "PYTHONPATH": os.pathsep.join(map(str, (HERE, named_as_there(folder, system), ROOT, ROOT / "reference"))),
        }  # fmt: skip

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "llamadiff", *words], cwd=self.folder, env=self.environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8",
        )  # fmt: skip

    def run(self, *words: str) -> str:
        """What a command prints, which finds nothing wrong."""
        command = self.start(*words)
        out, err = command.communicate(timeout=HANG)
        assert command.returncode == 0, err
        assert not self.left()
        return out

    def engine(self) -> str:
        """A candidate's command, in words as this system cuts them."""
        words = [sys.executable, "engine.py"]
        return "cmd: " + (subprocess.list2cmdline(words) if self.system == "win32" else shlex.join(words))

    def has_orphan(self) -> bool:
        """Whether the engine's grandchild runs on without its parent."""
        return bool(processes_of(self.temporary, "sleep infinity")) and not processes_of(self.temporary, "open('seen')")

    def left(self) -> list[str]:
        """Processes, and what should have been for the time being."""
        return [*processes_of(self.temporary), *map(str, (*self.temporary.iterdir(), *self.folder.rglob("*.part")))]


def named_as_there(folder: Path, system: str) -> Path:
    """llama-cpp-python with its libraries under the names that they have on another system, too."""
    real, packages = LLAMA_CPP_PYTHON.folder, folder / "packages"
    assert real is not None
    (packages / "llama_cpp" / "lib").mkdir(parents=True)
    for path in real.iterdir():
        if path.name not in {"lib", "__pycache__"}:
            (packages / "llama_cpp" / path.name).symlink_to(path)
    for path in (real / "lib").iterdir():
        (packages / "llama_cpp" / "lib" / path.name).symlink_to(path)
        if path.suffix == ".so":
            name = {"win32": WINDOWS, "darwin": MACOS}[system].name(path.stem.removeprefix("lib"))
            (packages / "llama_cpp" / "lib" / name).symlink_to(path)
    return packages


@pytest.fixture(params=["win32", "darwin"])
def elsewhere(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Elsewhere]:
    made = Elsewhere(tmp_path, request.param)
    yield made
    kill_all_of(made.temporary)


def test_the_demo(elsewhere: Elsewhere) -> None:
    said = elsewhere.run("demo")
    assert "MATCH  every op of llama.cpp is right" in said
    assert "WRONG  RoPE, layers 0-2: rotates (i, i+32); this model needs (2i, 2i+1)" in said


def test_a_trace_is_written_and_read(elsewhere: Elsewhere) -> None:
    """Kept, checked, recorded anew in its own place, and judged as a candidate's; a sketch too."""
    elsewhere.run("capture", "m.gguf", *IDS, "-o", "t.safetensors")
    assert "MATCH" in elsewhere.run("check", "t.safetensors", "--model", "m.gguf")
    elsewhere.run("check", "t.safetensors", "--model", "m.gguf", "--update")
    elsewhere.run("compare", "m.gguf", *IDS, "--candidate", "t.safetensors", "-o", "json:r.json", "-o", "kept/")
    assert json.loads((elsewhere.folder / "r.json").read_text("utf-8"))["verdict"] == "match"
    assert {path.name for path in (elsewhere.folder / "kept").iterdir()} == {
        "baseline.safetensors",
        "engine.safetensors",
    }
    elsewhere.run("capture", "m.gguf", *IDS, "--n-predict", "2", "--sketch", "-o", "s.safetensors")


@pytest.mark.parametrize(
    "words",
    [("backend", "m.gguf", *IDS, "--keep", "ops"), ("variants", "m.gguf", *IDS), ("check", "captures", "--jobs", "2"),
     ("weights", "m.gguf"), ("doctor",)],
    ids=lambda words: words[0],
)  # fmt: skip
def test_other_commands(words: tuple[str, ...], elsewhere: Elsewhere) -> None:
    captures = elsewhere.folder / "captures"
    captures.mkdir()
    for kind in ("F16", "Q4_K_M"):
        (captures / f"tiny.{kind}.safetensors").symlink_to(ROOT / "captures" / f"tiny.{kind}.safetensors")
    elsewhere.run(*words)


def test_a_command_that_runs_on_is_ended_with_all_of_its_processes(elsewhere: Elsewhere) -> None:
    """Those whose own parents are dead, too: there was a time when these lived."""
    command = elsewhere.start("compare", "m.gguf", *IDS, "--timeout", "3", "--candidate", elsewhere.engine())
    _, err = command.communicate(timeout=HANG)
    assert "still running after 3 s (--timeout)" in err
    assert command.returncode == 2
    assert not elsewhere.left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_command_is_stopped(number: signal.Signals, elsewhere: Elsewhere) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # heeded, even where tests run in the background
    command = elsewhere.start("compare", "m.gguf", *IDS, "--candidate", elsewhere.engine())
    signal.signal(signal.SIGINT, before)
    eventually(elsewhere.has_orphan, command)
    command.send_signal(number)
    _, err = command.communicate(timeout=HANG)
    assert err == ("llamadiff: stopped\n" if number == signal.SIGINT else "")
    as_windows_ends = elsewhere.system == "win32" and number == signal.SIGINT
    assert command.returncode == (128 + number if as_windows_ends else -number)
    eventually(lambda: not processes_of(elsewhere.temporary))
    elsewhere.run("writer", "c")  # the next command removes what a killed one has left


HIDDEN = {
    "win32": (
        "import fcntl", "from resource import getrlimit", "import os; os.geteuid()", "import signal; signal.SIGHUP",
        "import os; os.open('m.gguf', os.O_RDONLY)", "import subprocess; subprocess.Popen('ls', pass_fds=(1,))",
        "import os; file = open('m.gguf', 'rb'); os.unlink('m.gguf')", "import select; select.select([0], [], [])",
        "import ctypes; ctypes.CDLL(None)",
    ),
    "darwin": ("import os; os.memfd_create('x')", "import select; select.epoll()"),
}  # fmt: skip


def test_what_is_hidden_is_not_found(elsewhere: Elsewhere) -> None:
    """What this suite would show, were it in any module of llamadiff."""
    for line in HIDDEN[elsewhere.system]:
        code = f"exec({line!r}, {{'__package__': 'llamadiff.system'}})"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=elsewhere.folder,
            env=elsewhere.environment,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 1, line
    assert (elsewhere.folder / "m.gguf").exists()
