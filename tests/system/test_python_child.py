"""Child processes and their parents."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llamadiff.system.python_child import await_end

LARGE = "memory = bytearray(1 << 30); memory[::4096] = bytes(len(memory) >> 12); print(flush=True); input()"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells it")
def test_whoever_waits_for_an_end_waits_for_all_of_it():
    """A process that has much to give back takes a while to die."""
    for _ in range(3):
        pipe = subprocess.PIPE
        with subprocess.Popen([sys.executable, "-c", LARGE], stdin=pipe, stdout=pipe) as process:
            assert process.stdout.readline() == b"\n"
            await_end(process.pid)  # it lives
            assert process.poll() is None
            process.kill()
            while not is_dying(process.pid):
                pass
            await_end(process.pid)
            assert os.waitpid(process.pid, os.WNOHANG) == (process.pid, 9)


def is_dying(process):
    return bool(int(Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[6]) & 4)
