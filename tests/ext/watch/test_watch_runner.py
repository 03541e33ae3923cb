"""A program that is watched where a runner's Python is, with nothing of llamadiff installed: as in a container."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading

import pytest
from command import processes_of, run
from optional import needs
from places import ROOT
from waiting import HANG, eventually

from llamadiff.ext.watch import watch_remote as watch_there
from llamadiff.ext.watch import watched_ggml, watching
from llamadiff.ext.watch.watch_run import Bounds
from llamadiff.llamacpp.request import Request, Settings
from llamadiff.system.errors import UserError
from llamadiff.system.progress import silent

pytestmark = needs("cc")
PROGRAMS = ROOT / "tests/ext/watch/watched_programs.py"
BARE = f"{shlex.quote(sys.executable)} -I -S"
ENVIRONMENT = {**os.environ, "OMP_WAIT_POLICY": "passive", "PYTHONPATH": f"{ROOT}:{ROOT / 'reference'}"}


def command(*words, options=(), runner=BARE):
    place = ["--llama-cpp", f"runner={runner}"] if runner else []
    program = [sys.executable, PROGRAMS, *words] if words else ["true"]
    return [*map(str, [sys.executable, "-m", "llamadiff", "watch", *place, *options, "--", *program])]


def watched(*words, options=(), runner=BARE, **environment):
    return subprocess.run(
        command(*words, options=options, runner=runner), capture_output=True, text=True, check=False, timeout=HANG,
        env={**ENVIRONMENT, **environment},
    )  # fmt: skip


def test_it_is_judged_as_here(small_model, tmp_path):
    path = small_model("llama", "Q8_0")
    there, here = (watched("text", path, 3, 5, options=("--every", 1, "-o", tmp_path / f"{name}.json"), runner=runner)
                   for name, runner in (("there", BARE), ("here", "")))  # fmt: skip
    assert (there.returncode, there.stdout) == (here.returncode, here.stdout) == (0, here.stdout), there.stderr
    assert "4 of 4 graphs were judged" in there.stderr
    assert "the program itself ended with exit code 5" in there.stderr
    assert "llama_model_loader" in there.stderr  # what the program says itself
    found, wanted = (json.loads((tmp_path / f"{name}.json").read_text("utf-8"))["text"] for name in ("there", "here"))
    assert found["taps"] == wanted["taps"]


def test_a_wrong_op_is_found_and_kept_here(small_model, tmp_path):
    done = watched("faulty", small_model("llama", "Q5_1"), options=("--keep", tmp_path / "kept"))
    assert done.returncode == 1, done.stderr
    assert "WRONG  text: embd: python's GET_ROWS by token_embd.weight" in " ".join(done.stderr.split(" "))
    assert run("replay", *(tmp_path / "kept").glob("*.safetensors")).returncode == 0


def test_little_room_makes_the_program_wait_and_loses_nothing(small_model):
    path = small_model("llama", "Q8_0")
    done = watched("text", path, 8, options=("--every", 1, "--max-waiting", "64K"))
    assert done.returncode == 0, done.stderr
    assert "9 of 9 graphs were judged" in done.stderr


@pytest.mark.parametrize("runner", ["", BARE], ids=["here", "there"])
def test_a_judge_that_fails_ends_a_program_that_waits_for_room(runner, small_model, monkeypatch):
    def fails(_self, path):
        raise UserError(f"{path.name}: no room")

    monkeypatch.setattr(watching._Judge, "_take", fails)
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    request = Request("", nodes=True, settings=Settings(runner=runner))
    words = [sys.executable, str(PROGRAMS), "text", str(small_model()), str(10**6)]
    with pytest.raises(UserError, match=r"graph-\d+-1-0: no room"):
        watching.watch(words, Bounds(every=1, waiting=1 << 16), request, lambda graph: None, silent)


def test_a_library_that_hangs_there_is_refused(monkeypatch):
    before = signal.signal(signal.SIGALRM, lambda *_: None)  # as a program that uses llamadiff may have it
    monkeypatch.setattr(watched_ggml, "PATIENCE", 1)
    monkeypatch.setattr(watched_ggml, "main", lambda *_: threading.Event().wait())
    refused = watch_there._asked("base", "cpu").refused
    signal.signal(signal.SIGALRM, before)
    assert "SIGALRM" in refused


def saying(line):
    """A runner that says this, whatever it is to run."""
    return f"sh -c {shlex.quote('echo ' + shlex.quote(line))}"


@pytest.mark.parametrize(("runner", "said"), [
    ("false", "runner=false: ended before the program did"),
    ("no-such-runner", "runner=no-such-runner: no-such-runner cannot be started (No such file"),
    ("echo hello", "runner=echo hello: says what nobody understands (JSONDecodeError"),
    (saying('{"file": "../x", "size": 1}'), "says what nobody understands (ValueError: ../x"),
    (saying('{"file": "graph-1-1-0", "size": 100}'), "ended in the middle of what it sent"),
    (saying('{"stream": 7, "size": 0}'), "says what nobody understands (KeyError: 7"),
    (saying('{"file": "graph-1-1-0", "size": -5}'), "says what nobody understands (ValueError: -5 bytes"),
    (saying('{"stream": 1, "size": 1e12}'), "says what nobody understands (ValueError: 1000000000000.0 bytes"),
    (saying('{"error": "no room"}'), "llamadiff: no room"),
    (saying("[]"), "says what nobody understands (TypeError"),
    ("sh -c 'echo one >&2; echo two >&2; exit 3'", "ended before the program did (it said: two)"),
])  # fmt: skip
def test_a_runner_that_does_not_run_it(runner, said):
    done = watched(runner=runner)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_what_there_is_not_there():
    words = [*command()[:-1], "no-such-program"]
    missing = subprocess.run(words, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert missing.returncode == 2
    assert "no-such-program: cannot be run (No such file" in missing.stderr
    done = watched(CC="no-such-compiler", XDG_CACHE_HOME="/no-such-place")
    assert done.returncode == 2
    assert "watch: no-such-compiler is not installed, and a C compiler is needed" in done.stderr


def test_other_settings_are_the_programs_own():
    done = run("watch", "--llama-cpp", "threads=3", "--", "true")
    assert done.returncode == 2
    assert "of --llama-cpp it takes runner=CMD alone" in done.stderr


def test_a_runner_in_the_environment(small_model):
    done = watched("text", small_model(), 0, runner="", LLAMADIFF_RUNNER="false")
    assert "runner=false: ended before the program did" in done.stderr


# -- signals and kills -------------------------------------------------------------------------------------------------


@pytest.fixture
def started(small_model, tmp_path):
    """A program that goes on until it is stopped, and all that runs it."""
    (tmp_path / "tmp").mkdir()
    environment = {**ENVIRONMENT, "TMPDIR": str(tmp_path / "tmp"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        command("text", small_model(), 10**6, options=("--max-waiting", "16M")), env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    signal.signal(signal.SIGINT, heard)
    try:
        eventually(lambda: processes_of(tmp_path / "tmp", f"{PROGRAMS.name} text"), process)
        eventually(lambda: list((tmp_path / "tmp").glob("*/weight-*")), process)
        seen = set()  # when a third graph comes, one is there to be judged
        eventually(lambda: seen.update((tmp_path / "tmp").glob("*/graph-*")) or len(seen) > 2, process)
        yield process, tmp_path / "tmp"
    finally:
        process.kill()
        process.communicate()


def is_clean(folder):
    return not processes_of(folder) and not list(folder.iterdir())


def test_the_command_killed_leaves_nothing(started):
    process, folder = started
    process.kill()
    process.communicate()
    eventually(lambda: not processes_of(folder))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("to", [os.kill, os.killpg])  # as kill does it; as the terminal does it
def test_a_signal_is_the_programs(to, number, started):
    process, folder = started
    to(process.pid, number)
    _, errors = process.communicate(timeout=HANG)
    assert b"graphs were judged" in errors
    eventually(lambda: is_clean(folder))
