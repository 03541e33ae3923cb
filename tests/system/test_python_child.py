"""Child processes and their parents."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from llamadiff.system.python_child import await_end

CHILD = """
import os, sys
from llamadiff.system.python_child import await_end
await_end(int(sys.argv[1]))
print(os.getppid())
"""
PARENT = "import os, subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1], str(os.getpid())]); {}"


def test_a_dying_parent_is_waited_for():
    for end in ("import time; time.sleep(0.5)", "os._exit(0)"):
        command = [sys.executable, "-c", PARENT.format(end), CHILD]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8") as parent:
            assert int(parent.stdout.read()) != parent.pid


def test_one_that_lives_is_not_waited_for_long():
    started = time.monotonic()
    await_end(os.getppid())
    assert time.monotonic() - started < 5
