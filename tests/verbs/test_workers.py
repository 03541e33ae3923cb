"""Processes side by side: order, faults, deaths; and none is left behind."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT
from waiting import HANG, eventually

from llamadiff.system.errors import UserError
from llamadiff.verbs.workers import side_by_side

CAPTURES = ROOT / "captures"


def squared(number: int) -> tuple[int, int]:
    return number**2, os.getpid()


def squared_last(thing: tuple[Path, int]) -> tuple[int, int]:
    """The first is there when all the others are."""
    folder, number = thing
    if number == 0:
        eventually(lambda: len(list(folder.iterdir())) == 7)
    else:
        (folder / str(number)).touch()
    return squared(number)


def faulty(number: int) -> int:
    if number == 2:
        raise ValueError("no such number")
    if number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_answers_come_in_order_from_several_processes(tmp_path: Path) -> None:
    answers = list(side_by_side(squared_last, [(tmp_path, number) for number in range(8)], 2))
    assert [square for square, _ in answers] == [number**2 for number in range(8)]
    assert os.getpid() not in {process for _, process in answers}
    assert len({process for _, process in answers}) == 2


@pytest.mark.parametrize(("things", "processes"), [(range(3), 1), (range(1), 4)])
def test_one_process_or_one_thing_is_done_here(things: range, processes: int) -> None:
    assert {process for _, process in side_by_side(squared, things, processes)} == {os.getpid()}


def test_what_the_work_raises_is_raised() -> None:
    answers = side_by_side(faulty, range(4), 2)
    assert [next(answers), next(answers)] == [0, 1]
    with pytest.raises(ValueError, match="no such number"):
        next(answers)


def test_a_process_that_dies_is_told() -> None:
    with pytest.raises(UserError, match="was killed, perhaps for want of memory; with --jobs 1"):
        list(side_by_side(faulty, [4, 5, 6], 2))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_goes_on_when_the_command_is_gone(number: signal.Signals, tmp_path: Path) -> None:
    """Neither its workers nor the engines that these run: each engine writes down that it lives."""
    script = tmp_path / "engine.py"
    script.write_text(
        "import os, signal, sys; open(sys.argv[1] + str(os.getpid()), 'w'); signal.pause()", encoding="utf-8"
    )
    engine = "cmd: " + shlex.join([sys.executable, str(script), f"{tmp_path}/alive-"])
    words = [sys.executable, "-m", "llamadiff", "check", str(CAPTURES), "--jobs", "2", "--candidate", engine]
    command = subprocess.Popen(
        words, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    )
    eventually(lambda: len(list(tmp_path.glob("alive-*"))) >= 2, command)
    (os.kill if number == signal.SIGKILL else os.killpg)(command.pid, number)
    _, said = command.communicate(timeout=HANG)
    assert said == ("" if number == signal.SIGKILL else "llamadiff: stopped\n")
    assert command.returncode == -number
    engines = [int(path.name.removeprefix("alive-")) for path in tmp_path.glob("alive-*")]
    eventually(lambda: not any(Path(f"/proc/{engine}").exists() for engine in engines))
