"""Child processes and their parents."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from waiting import Clock

from llamadiff.system import python_child
from llamadiff.system.python_child import await_end

CHILD = """
import contextlib, math, os, sys
from llamadiff.system import python_child
python_child._DYING = math.inf
with contextlib.suppress(BrokenPipeError):
    os.write(2, b".")
python_child.await_end(int(sys.argv[1]))
print(os.getppid())
"""
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())], stderr=subprocess.PIPE)
"""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(python_child, "time", clock)
    return clock


@pytest.mark.parametrize("end", ["child.stderr.read(1)", "os._exit(0)"])
def test_a_dying_parent_is_waited_for(end):
    command = [sys.executable, "-c", PARENT + end, CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8") as parent:
        assert int(parent.stdout.read()) != parent.pid


def test_it_is_waited_for_until_it_is_dead(clock, monkeypatch):
    monkeypatch.setattr(os, "getppid", lambda: 5 if clock.now < 0.5 else 1)
    await_end(5)
    assert clock.now == pytest.approx(0.5, abs=0.01)


def test_one_that_lives_is_not_waited_for_long(clock):
    await_end(os.getppid())
    assert clock.now == pytest.approx(1, abs=0.01)
