"""Killed and interrupted at any moment: nothing is left after the next start, and nobody is shown a traceback.

Quick tests kill what stays where it is until then; moments that are random are for slow ones.
"""

from __future__ import annotations

import errno
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from command import kill_all_of, processes_of
from holding import hold_llama_cpp
from models import small
from places import ROOT
from waiting import HANG, eventually

ENTRY = re.search(r'^llamadiff = "(.+):(.+)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
IDS = ("--tokens", "1,17,5")

# An engine with a child, a child that left its session, and that one's child; then it writes, and does not hurry, or
# stays in the middle of it.
ENGINE = """
import os, signal, subprocess, sys, time
subprocess.Popen(["sleep", "infinity"])
subprocess.Popen(["sh", "-c", "sleep infinity & sleep infinity"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.pause()
    os._exit(0)
os.makedirs(sys.argv[1])
for i in range(40):
    with open(f"{sys.argv[1]}/l_out-{i}.f32", "wb") as file:
        file.write(bytes(3 * 256 * 4))
    if i == 20 and "held" in sys.argv:
        open(os.environ["HELD"], "wb").close()
        signal.pause()
    time.sleep(0.02)
"""


@contextmanager
def heeded() -> Iterator[None]:
    """Processes that begin here heed what those who run the tests may ignore (nohup, a shell's &)."""
    before = [(number, signal.signal(number, signal.SIG_DFL)) for number in (signal.SIGHUP, signal.SIGINT)]
    yield
    for number, handler in before:
        signal.signal(number, handler)


class Place:
    """A folder in which commands are started, with a TMPDIR of its own, which marks its processes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.temporary = folder, folder / "tmp"
        self.temporary.mkdir()
        small.write_model(folder / "m.gguf")
        (folder / "engine.py").write_text(ENGINE, encoding="utf-8")
        self.environment = {**os.environ, "TMPDIR": str(self.temporary), "XDG_CACHE_HOME": str(folder / "cache")}
        self.environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "reference")])

    def start(self, *arguments: str, **options: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "llamadiff", *arguments]
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with heeded():
            return subprocess.Popen(
                command, cwd=self.folder, env=self.environment, start_new_session=True, **{**streams, **options}
            )

    def start_held(self, *arguments: str) -> subprocess.Popen[bytes]:
        """A command that stays in the middle of its work: in its candidate's command, or in llama.cpp."""
        mark, before = self.folder / "held", self.environment
        if ENGINE_COMMAND in arguments:
            arguments = tuple(f"{word} held" if word == ENGINE_COMMAND else word for word in arguments)
            self.environment = {**before, "HELD": str(mark)}
        else:
            self.environment = {**before, **hold_llama_cpp(self.folder / "path", mark)}
            self.environment["PYTHONPATH"] += os.pathsep + before["PYTHONPATH"]
        child = self.start(*arguments)
        self.environment = before
        eventually(mark.exists, child)
        mark.unlink()
        return child

    def parts(self) -> Iterator[str]:
        for folder, _, names in os.walk(self.folder):  # which may vanish meanwhile
            yield from (os.path.join(folder, name) for name in names if name.endswith(".part"))

    def left(self) -> list[str]:
        """Whatever commands left behind."""
        return [*map(str, self.temporary.iterdir()), *self.parts(), *processes_of(self.temporary)]

    def wait_until_quiet(self) -> None:
        """Until what the dead had started has noticed."""
        eventually(lambda: not processes_of(self.temporary))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Commands heed Ctrl-C, even where these tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    made = Place(tmp_path)
    yield made
    kill_all_of(made.temporary)
    signal.signal(signal.SIGINT, before)


ENGINE_COMMAND = f"cmd: {shlex.quote(sys.executable)} engine.py {{out}}"
COMMANDS: list[tuple[str, ...]] = [
    ("compare", "m.gguf", *IDS, "-o", "kept/", "-o", "json:r.json"),
    ("compare", "m.gguf", *IDS, "--partial", "--candidate", ENGINE_COMMAND),
    ("capture", "m.gguf", *IDS, "--n-predict", "100", "-o", "t.safetensors"),
    ("compare", "m.gguf", *IDS, "--n-predict", "20"),
    ("compare", "m.gguf", *IDS, "--engine", "graph", "--candidate", ENGINE_COMMAND, "-o", "other/"),
    ("backend", "m.gguf", *IDS, "--keep", "ops"),
]


def test_kills_leave_nothing_after_the_next_start(place: Place) -> None:
    for command in COMMANDS:
        child = place.start_held(*command)
        assert place.left()
        kill(child)
    check_nothing_is_left_after_the_next_start(place)


def test_a_candidate_that_writes_on_while_others_sweep_leaves_nothing(place: Place) -> None:
    """Whoever sweeps first removes the folder in which it writes; it makes the folder again."""
    (place.folder / "engine.py").write_text(
        "import os, sys, time\nwhile True:\n    os.makedirs(sys.argv[1], exist_ok=True)\n    time.sleep(0.1)\n",
        encoding="utf-8",
    )
    child = place.start("compare", "m.gguf", *IDS, "--partial", "--candidate", ENGINE_COMMAND)
    eventually(lambda: processes_of(place.temporary, f"engine.py {place.temporary}"))
    (supervisor,) = (int(line.split()[0]) for line in processes_of(place.temporary, "llamadiff.system.supervisor"))
    os.kill(supervisor, signal.SIGSTOP)
    kill(child)
    eventually(lambda: [path for path in place.temporary.iterdir() if not (path / "lock").exists()])  # made again
    os.kill(supervisor, signal.SIGCONT)
    check_nothing_is_left_after_the_next_start(place)


@pytest.mark.slow
def test_200_kills_at_random_moments_leave_nothing_after_the_next_start(place: Place) -> None:
    rng = random.Random(200)
    seconds = [duration(place, command) for command in COMMANDS]
    assert not place.left()
    littered = 0
    for i in range(200):
        child = place.start(*COMMANDS[i % len(COMMANDS)])
        time.sleep(rng.uniform(0, 1.1 * seconds[i % len(COMMANDS)]))
        kill(child)
        littered += bool(place.left())
    print(f"{littered} of 200 kills left something for a while; whole runs take {np.round(seconds, 1)} s")
    check_nothing_is_left_after_the_next_start(place)
    assert littered > 40  # or they all came too early, or too late


STOPS = [
    (signal.SIGINT, os.killpg), (signal.SIGINT, os.kill), (signal.SIGTERM, os.kill), (signal.SIGHUP, os.killpg),
    (signal.SIGTERM, os.killpg),
]  # fmt: skip


@pytest.fixture
def busy() -> Iterator[None]:
    """Four processes that do nothing but keep the machine from the others."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    yield
    for process in spinning:
        kill(process)


@pytest.mark.parametrize("which", range(len(COMMANDS)))
def test_a_command_that_is_stopped_is_gone_with_all_of_its_processes(which: int, place: Place) -> None:
    """At once: not a moment later."""
    number, send = STOPS[which % len(STOPS)]
    child = place.start_held(*COMMANDS[which])
    send(child.pid, number)
    assert child.wait(HANG) == -number
    assert not place.left()


@pytest.mark.slow
@pytest.mark.usefixtures("busy")
def test_1000_commands_that_are_stopped_at_random_moments_are_gone_with_all_of_their_processes(place: Place) -> None:
    rng, times = random.Random(1000), 1000
    seconds = [duration(place, command) for command in COMMANDS]
    left, stopped = dict[int, list[str]](), 0
    for i in range(times):
        number, send = STOPS[i % len(STOPS)]
        child = place.start(*COMMANDS[i % len(COMMANDS)])
        time.sleep(rng.uniform(0, 1.1 * seconds[i % len(COMMANDS)]))
        send(child.pid, number)
        stopped += child.wait(HANG) == -number
        if found := processes_of(place.temporary):
            left[i] = found
            place.wait_until_quiet()
    print(f"{stopped} of {times} were stopped before their end; whole runs take {np.round(seconds, 1)} s")
    assert left == {}
    assert 2 * stopped > times


def duration(place: Place, command: tuple[str, ...]) -> float:
    """Seconds that a command takes when nobody kills it."""
    started = time.monotonic()
    assert place.start(*command).wait(HANG) in (0, 1, 2)
    return time.monotonic() - started


def kill(child: subprocess.Popen[bytes]) -> None:
    """The command alone: what it has started has to find out."""
    child.kill()
    child.wait()


def check_nothing_is_left_after_the_next_start(place: Place) -> None:
    place.wait_until_quiet()
    assert not processes_of(place.temporary)
    assert place.start("writer", "c").wait(HANG) == 0
    assert not place.left()


# Does something, in a process that is to be interrupted, when a module begins to be imported.
MARKED = """
import os, signal, sys
class Mark:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(Mark)
            {act}
sys.meta_path.insert(0, Mark)
from {entry[1]} import {entry[2]} as main
sys.exit(main())
"""
EARLY = (
    "llamadiff.cli",
    "llamadiff.system.exits",
    "llamadiff.llamacpp.child",
    "typer",
    "rich",
    "numpy",
    "llamadiff.plugins",
)


def start_marked(place: Place, module: str, act: str) -> subprocess.Popen[bytes]:
    """A long comparison, whose main function does that when the module is imported."""
    code = MARKED.format(module=module, act=act, entry=ENTRY)
    with heeded():
        return subprocess.Popen(
            [sys.executable, "-c", code, "compare", "m.gguf", *IDS, "--n-predict", "100"], cwd=place.folder,
            env=place.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip


def check_interrupted(child: subprocess.Popen[bytes]) -> None:
    """It dies of Ctrl-C, and says so, or nothing."""
    _, err = child.communicate(timeout=HANG)
    assert err in (b"", b"llamadiff: stopped\n")
    assert child.returncode == -signal.SIGINT


@pytest.mark.parametrize("module", EARLY)
def test_ctrl_c_early_shows_no_traceback(module: str, place: Place) -> None:
    """From the first import that takes time on: Python's own start, before any line of ours, is out of our hands."""
    check_interrupted(start_marked(place, module, "signal.raise_signal(signal.SIGINT)"))


@pytest.mark.slow
def test_ctrl_c_at_random_moments_shows_no_traceback(place: Place) -> None:
    rng = random.Random(30)
    for _ in range(30):
        child = start_marked(place, EARLY[0], 'os.write(1, b".")')
        assert child.stdout is not None
        assert os.read(child.stdout.fileno(), 1) == b"."
        time.sleep(rng.uniform(0, 0.3))
        child.send_signal(signal.SIGINT)
        check_interrupted(child)


def test_the_entry_point_imports_next_to_nothing() -> None:
    assert ENTRY is not None
    code = f"import sys; before = set(sys.modules); import {ENTRY[1]}; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, encoding="utf-8"
    )
    assert {"signal", "llamadiff"} <= set(done.stdout.split())
    assert not {"typing", "typer", "pathlib", "json", "subprocess", "numpy"} & set(done.stdout.split())
    assert not [name for name in done.stdout.split() if name.startswith("llamadiff.") and name != ENTRY[1]]


LOST = """
import signal, sys
from llamadiff.system import exits

class Unlucky:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
        sum(range(10))  # here, or before, the exception is raised, and dropped

def command():
    Unlucky()
    while True:
        pass

sys.exit(exits.run(command, lambda reason: print("ended:", reason)))
"""


def test_a_signal_in_a_destructor_is_not_lost(place: Place) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOST], cwd=ROOT, env=place.environment, capture_output=True, text=True,
        timeout=HANG, check=False,
     encoding="utf-8")  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "ended: stopped\n", "")


def test_a_command_takes_its_descendants_with_it(place: Place) -> None:
    """Those that left its session too, and when nobody was killed."""
    child = place.start(*COMMANDS[1])
    assert child.wait(HANG) in (0, 1, 2)
    assert not place.left()


def test_a_supervisor_that_is_killed_takes_the_command_with_it(place: Place) -> None:
    engine = f"cmd: {shlex.quote(sys.executable)} -c 'import signal; signal.pause()' {{out}}"
    child = place.start("compare", "m.gguf", *IDS, "--candidate", engine, stderr=subprocess.PIPE)
    supervisor = eventually(lambda: processes_of(place.temporary, "llamadiff.system.supervisor"))
    eventually(lambda: processes_of(place.temporary, "-c import signal; signal.pause()"))
    os.kill(int(supervisor[0].split()[0]), signal.SIGKILL)
    _, err = child.communicate(timeout=HANG)
    assert child.returncode == 2
    assert b"its supervising process was killed by signal 9 (SIGKILL)" in err
    place.wait_until_quiet()
    assert not place.left()


# -- what is swept, and what is not ----------------------------------------------------------------

# Makes a file and a directory with something in it, says where, and waits to be killed.
LITTERING = """
import os, signal, sys
from pathlib import Path
from llamadiff.system.stale_files import temporary_directory, temporary_file
with temporary_file(Path(sys.argv[1])) as file, temporary_directory() as folder:
    file.write_text("half of it")
    (folder / "big").write_text("gigabytes")
    (folder / "link").symlink_to(sys.argv[2])
    if "fork" in sys.argv and os.fork() == 0:
        sys.stdin.read()
        os._exit(0)
    print(file, folder, flush=True)
    signal.pause()
"""


class Dead:
    """What a killed process left: a file and a directory."""

    def __init__(self, place: Place, *options: str, kill: bool = True) -> None:
        self.precious = place.folder / "precious"
        self.precious.mkdir()
        (self.precious / "work").write_text("years of it", encoding="utf-8")
        self.process = subprocess.Popen(
            [sys.executable, "-c", LITTERING, str(place.folder / "t.safetensors"), str(self.precious), *options],
            env=place.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
         encoding="utf-8")  # fmt: skip
        assert self.process.stdout is not None
        self.file, self.folder = map(Path, self.process.stdout.readline().split())
        if kill:
            self.process.kill()
            self.process.wait()
        assert self.file.exists()
        assert self.folder.is_dir()

    def note(self) -> Path:
        """Where it says that it made the file."""
        (note,) = self.folder.parent.glob("*/note")
        return note

    def check_precious(self) -> None:
        assert (self.precious / "work").read_text("utf-8") == "years of it"


def next_start(place: Place) -> None:
    child = place.start("writer", "c", stderr=subprocess.PIPE)
    _, err = child.communicate(timeout=HANG)
    assert (child.returncode, err) == (0, b"")


@pytest.mark.parametrize("options", [(), ("fork",)])
def test_a_dead_process_is_cleaned_up_after(options: tuple[str, ...], place: Place) -> None:
    """Even while a fork of it lives on."""
    dead = Dead(place, *options)
    next_start(place)
    assert not dead.file.exists()
    assert not dead.folder.exists()
    dead.check_precious()


def test_a_living_process_is_left_alone(place: Place) -> None:
    living = Dead(place, kill=False)
    next_start(place)
    assert living.file.read_text("utf-8") == "half of it"
    assert (living.folder / "big").exists()
    living.process.terminate()
    living.process.wait()
    next_start(place)
    assert not living.folder.exists()


def test_what_only_looks_alike_is_left_alone(place: Place) -> None:
    dead = Dead(place)
    prefix, _, token = dead.folder.name.rpartition("-")
    part = f".t.safetensors.{'0' * 16}.part"  # nobody's: no note names it
    alike = [place.folder / name for name in (part, ".t.safetensors.1234.part", "t.safetensors.part")]
    folders = [place.temporary / name for name in (f"llamadiff-{token}", f"{prefix}-{token}-1", f"elsewhere-{token}")]
    for path in alike:
        path.write_text("another's", encoding="utf-8")
    for path in folders:
        path.mkdir()
    next_start(place)
    assert all(path.exists() for path in (*alike, *folders))
    assert not dead.folder.exists()


def test_what_has_taken_the_place_of_litter_is_left_alone(place: Place) -> None:
    dead = Dead(place)
    kept = dead.file.with_name("kept")
    dead.file.rename(kept)
    dead.file.symlink_to(kept)
    next_start(place)
    assert dead.file.is_symlink()
    assert kept.read_text("utf-8") == "half of it"
    dead.folder.symlink_to(dead.precious)
    next_start(place)
    assert dead.folder.is_symlink()
    dead.check_precious()


@pytest.mark.parametrize("said", ["precious", "precious/work", "\0", "", "cut"])
def test_a_note_may_name_nothing_but_a_temporary_file(said: str, place: Place) -> None:
    dead = Dead(place)
    note = dead.note()
    cut = note.read_bytes()[:-6]
    Path(os.fsdecode(cut)).write_text("another's", encoding="utf-8")
    note.write_bytes(cut if said == "cut" else os.fsencode(place.folder / said))
    next_start(place)
    assert not list(place.temporary.iterdir())
    assert Path(os.fsdecode(cut)).exists()
    dead.check_precious()


def test_what_another_machine_left_is_left_alone(place: Place) -> None:
    dead = Dead(place)
    token = dead.folder.name.rpartition("-")[2]
    theirs = dead.folder.rename(place.temporary / f"llamadiff-elsewhere-{token}")
    next_start(place)
    assert (theirs / "big").exists()


@pytest.mark.parametrize("planted", ["a link", "open to all"])
def test_a_note_that_others_may_have_written_is_not_read(planted: str, place: Place) -> None:
    dead = Dead(place)
    folder = dead.note().parent
    if planted == "a link":
        folder.symlink_to(folder.rename(place.folder / "elsewhere"))
    else:
        folder.chmod(0o777)
    next_start(place)
    assert dead.file.exists()
    assert (place.folder / "elsewhere" / "note").exists() == (planted == "a link")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="root can give files away")
def test_what_is_anothers_is_left_alone(place: Place) -> None:
    dead = Dead(place)
    os.chown(dead.folder, 12345, 12345)
    os.chown(dead.note().parent, 12345, 12345)
    next_start(place)
    assert dead.folder.is_dir()
    assert dead.file.exists()


def test_without_any_place_for_notes_work_goes_on(place: Place) -> None:
    place.environment["TMPDIR"] = "/dev/null/none"
    words = ("capture", "m.gguf", *IDS, "-o", "t.safetensors")
    assert place.start(*words).wait(HANG) == 0
    assert (place.folder / "t.safetensors").exists()
    assert not list(place.parts())


# -- a full disk -----------------------------------------------------------------------------------

# No byte fits into what is made in TMPDIR, as on a disk that is full.
FULL = """
import errno, os, pathlib
def on_full_disk(path):
    return str(path).startswith(os.environ["TMPDIR"] + "/")
def refuse(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
write, write_bytes, write_text = os.write, pathlib.Path.write_bytes, pathlib.Path.write_text
os.write = lambda file, data: (
    refuse() if on_full_disk(os.readlink(f"/proc/self/fd/{file}")) else write(file, data))
pathlib.Path.write_bytes = lambda self, data: refuse() if on_full_disk(self) else write_bytes(self, data)
pathlib.Path.write_text = lambda self, *a, **k: refuse() if on_full_disk(self) else write_text(self, *a, **k)
"""


@pytest.mark.parametrize("command", [("backend",), ("compare", "--engine", "graph")])
def test_what_is_judged_meanwhile_needs_no_room(command: tuple[str, ...], place: Place) -> None:
    (place.folder / "path").mkdir()
    (place.folder / "path" / "sitecustomize.py").write_text(FULL, encoding="utf-8")
    place.environment["PYTHONPATH"] += os.pathsep + str(place.folder / "path")
    child = place.start(*command, "m.gguf", *IDS, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, _ = child.communicate(timeout=HANG)
    assert (out[:5], child.returncode) == (b"MATCH", 0)
    assert not place.left()


@pytest.mark.parametrize("command", [("compare",), ("compare", "--n-predict", "3"), ("compare", "--only", "embd")])
def test_a_full_tmpdir_is_named_with_what_was_needed(command: tuple[str, ...], place: Place) -> None:
    (place.folder / "path").mkdir()
    (place.folder / "path" / "sitecustomize.py").write_text(FULL, encoding="utf-8")
    place.environment["PYTHONPATH"] += os.pathsep + str(place.folder / "path")
    child = place.start(*command, "m.gguf", *IDS, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = child.communicate(timeout=HANG)
    found = re.fullmatch(
        rf"llamadiff: {re.escape(str(place.temporary))}: no room for what is recorded "
        r"\(([0-9.]+) ([kM]B) are needed, [0-9.]+ [kMGT]B are free\); set TMPDIR to a directory with room\n",
        err.decode(),
    )
    assert (out, child.returncode) == (b"", 2)
    assert found is not None, err
    assert float(found[1]) > 0
    assert not place.left()


def test_what_is_needed_is_what_a_trace_takes(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figure of a full disk is the size of the file that would have been."""
    from llamadiff.system.errors import NoRoomError
    from llamadiff.trace.metadata import Info
    from llamadiff.trace.writer import TraceWriter

    def write() -> Path:
        with TraceWriter(place.folder / "t.safetensors") as writer:
            for i in range(3):
                writer.add(f"l_out-{i}", np.ones((2, 5000), np.float32), 0, (3, 5000))
            for i in range(3):
                writer.add(f"l_out-{i}", np.ones((1, 5000), np.float32), 0, (3, 5000), 2)
            writer.finish(Info((1, 2, 3)))
        return place.folder / "t.safetensors"

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    size = write().stat().st_size
    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(NoRoomError, match=f"{size / 1000:.0f} kB are needed"):
        write()
