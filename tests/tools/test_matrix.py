"""A bare Debian in the matrix: README is what it goes by, and what cannot be tried fails nothing and is said."""

from __future__ import annotations

import shutil
import sys

import pytest
from places import ROOT

from tools import debian, matrix
from tools.parts import MissingPartError

LOG = "Downloading a.whl (66.1 MB)\n  Downloading b.tar.gz (500 kB)\n Downloading a.whl (66.1 MB)\n"
PYTEST = "===== 4000 passed, 90 skipped in 700.00s (0:11:40) =====\n"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """machine(code, words, log): debootstrap works, README's commands end and print so, pip's log is that."""

    def be(code: int, words: str, log: str = "") -> list[str]:
        commands: list[str] = []

        def inside(place, command, part="0/1"):
            commands.append(command)
            (place / "srv").mkdir(exist_ok=True)
            (place / debian.LOG[1:]).write_text(log, "utf-8")
            return debian.Ran(0, "", 0) if "apt-get" in command else debian.Ran(code, words, 0)

        monkeypatch.setattr(debian, "inside", inside)
        return commands

    (tmp_path / "debian").mkdir()
    monkeypatch.setattr(debian, "FILES", ())
    monkeypatch.setattr(debian.subprocess, "run", lambda command, **_: debian.subprocess.CompletedProcess(command, 0))
    monkeypatch.setattr(matrix, "_copied", lambda corner, place: place)
    return be


BARE = next(each for each in matrix.CORNERS if each.release == "trixie")


def test_a_newcomer_does_what_readme_says(machine, tmp_path):
    commands = machine(0, PYTEST, LOG)
    outcome = matrix.run(BARE, "0/1", tmp_path)
    assert commands == [
        "apt-get update && apt-get install --yes git make python3-venv",
        "cd /srv/llamadiff && make demo",
        "apt-get install --yes g++",
        "cd /srv/llamadiff && make test",
    ]
    assert outcome.good
    assert matrix.table([outcome], {}).count("| 4000 passed, 90 skipped, 67 MB by pip |") == 1
    readme = (ROOT / "README.md").read_text("utf-8")
    assert all(f"\n    {command} " in readme for command in (debian.DEMO, debian.TEST))


@pytest.mark.parametrize(("code", "words", "log"), [
    (2, PYTEST.replace("4000 passed", "1 failed, 3999 passed"), ""),
    (2, PYTEST, ""),  # the recorded traces, after the tests
    (2, "error: Python.h: No such file or directory", ""),
    (0, PYTEST, "Downloading torch.whl (532.1 MB)"),
], ids=["a test", "make", "a compile", "too many MB"])  # fmt: skip
def test_what_fails_there_is_red(code, words, log, machine, tmp_path):
    machine(code, words, log)
    outcome = matrix.run(BARE, "0/1", tmp_path)
    assert not outcome.good
    assert "| RED |" in matrix.table([outcome], {})


OFF = "WARNING: Retrying (total=0) after connection broken by 'NewConnectionError'\nERROR: No matching distribution\n"


def test_without_a_network_it_is_not_tried(machine, tmp_path):
    machine(2, OFF)
    with pytest.raises(MissingPartError, match="connection broken by 'NewConnectionError'"):
        matrix.run(BARE, "0/1", tmp_path)


def test_a_network_that_stammered_before_all_was_installed_excuses_no_failure(machine, tmp_path):
    stamp = tmp_path / "debian" / "srv" / "llamadiff" / ".venv" / "developing"
    stamp.parent.mkdir(parents=True)
    stamp.touch()
    machine(2, OFF + PYTEST.replace("4000 passed", "1 failed, 3999 passed"))
    assert not matrix.run(BARE, "0/1", tmp_path).good


def test_a_turn_that_cannot_be_taken_goes_to_the_next_corner(monkeypatch, capsys):
    def run(corner, part, folder):
        if corner.release:
            raise MissingPartError("debootstrap: no answer")
        return matrix.Outcome(corner, {"passed": 7}, 1.0, "")

    monkeypatch.setattr(matrix, "run", run)
    monkeypatch.setattr(matrix, "CORNERS", (matrix.Corner("plain"), BARE))
    monkeypatch.setattr(debian, "lacking", lambda: "")
    monkeypatch.setattr(sys, "argv", ["matrix.py", "--turn", "1"])
    with pytest.raises(SystemExit) as end:
        matrix.main()
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert "| plain | green | 7 passed | 1 |" in printed
    assert f"| {BARE.name} | not tried: debootstrap: no answer |" in printed


def test_a_machine_without_debootstrap_says_so(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "debootstrap" else name)
    assert BARE.lacks() == "no debootstrap here: apt install debootstrap"
