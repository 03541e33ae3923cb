"""llama.cpp's process, started warm: forked from one that has imported all it needs, for a fifth of the time.

A starter, itself a fresh Python, imports what the child process imports, waits, and forks once for each start. The
child has the environment, the folder and the streams that it would have been started with, and dies as it would have
died: alone.
"""

from __future__ import annotations

import ast
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import IO, Any

MODULE = "llamadiff.llamacpp.child_main"
SHARED = 3  # the descriptor that the file has there which both share
MOST = 1 << 18  # bytes of a message
MOST_FILES = 1 << 8  # that a starter may have open
_NUMBER = struct.Struct("i")


# -- where a child is wanted -------------------------------------------------------------------------------------------


def popen(command: Sequence[str], **options: Any) -> Any:
    """``subprocess.Popen``, and warm if the command is llama.cpp's process as this Python would start it."""
    _, _, given = command[2].partition(f"; from {MODULE} import main; main(") if len(command) > 2 else ("", "", "")
    is_own = bool(given) and [command[0], *command[3:]] == [sys.executable, *sys.path]
    words = ast.literal_eval(f"[{given.removesuffix(')')}]") if is_own else []
    if not is_own or words[0]:  # a build is loaded by a process of its own
        return subprocess.Popen(command, **options)
    return Warm(options["stderr"], words)


class Warm:
    """What Child needs of a Popen: streams to a process, and its return code."""

    def __init__(self, log: IO[bytes], words: Sequence[str]) -> None:
        """``words`` are main's: a build, a descriptor that the process is to have, and what is in that file."""
        self.returncode: int | None = None
        self._one = threading.Lock()
        stdin, given = os.pipe()
        taken, stdout = os.pipe()
        ends, self._end = socket.socketpair()
        about = {"environment": dict(os.environ), "folder": os.getcwd(), "words": [words[0], str(SHARED), words[2]]}
        streams = [stdin, stdout, log.fileno(), int(words[1]), ends.fileno()]
        socket.send_fds(_starter(os.getpid()), [json.dumps(about).encode()], streams)
        for file in (stdin, stdout):
            os.close(file)
        ends.close()
        self.stdin, self.stdout = os.fdopen(given, "wb"), os.fdopen(taken, "rb")
        self.pid = self._told()

    def _told(self) -> int:
        return int(_NUMBER.unpack(self._end.recv(_NUMBER.size, socket.MSG_WAITALL))[0])

    def poll(self) -> int | None:
        if self._one.acquire(blocking=False):  # else another thread waits, and is told
            try:
                if self.returncode is None and select.select([self._end], [], [], 0)[0]:
                    self._learn()
            finally:
                self._one.release()
        return self.returncode

    def wait(self) -> int:
        with self._one:
            if self.returncode is None:
                self._learn()
        assert self.returncode is not None
        return self.returncode

    def _learn(self) -> None:
        self.returncode = self._told()
        self._end.close()

    def kill(self) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(self.pid, signal.SIGKILL)


@cache
def _starter(_parent: int) -> socket.socket:
    """The way to this process's own starter, which ends with it."""
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = "import sys; sys.path[:] = sys.argv[2:]; import warm; warm.serve(int(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(other.fileno()), *sys.path]
    subprocess.Popen(command, pass_fds=[other.fileno()], stdin=subprocess.DEVNULL)
    other.close()
    return own


# -- where it is started -----------------------------------------------------------------------------------------------


def serve(number: int) -> None:
    """Start a child for each message, and tell its end, until the other side is gone."""
    from llamadiff import llamacpp
    from llamadiff.llamacpp import child_main
    from llamadiff.system.errors import UserError

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    died, written = os.pipe()
    for file in (died, written):
        os.set_blocking(file, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    for module in pkgutil.iter_modules(llamacpp.__path__, f"{llamacpp.__name__}."):
        importlib.import_module(module.name)
    library = child_main._open_library()
    if not isinstance(library, UserError):
        assert library.ggml  # where tensors have their fields is found once
    child_main._open_library = lambda *_: library
    gc.collect()
    gc.freeze()  # or each child would copy what it looks through
    door = socket.socket(fileno=number)
    ends: dict[int, socket.socket] = {}
    while True:
        heard, _, _ = select.select([door, died], [], [])
        if died in heard:
            os.read(died, MOST)
            for child in list(ends):
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    _tell(ends.pop(child), os.waitstatus_to_exitcode(status))
        if door in heard:
            about, files, *_ = socket.recv_fds(door, MOST, 5)
            if not about:
                return
            child = os.fork()
            if not child:
                _become(json.loads(about), files[:4], child_main.main)
            ends[child] = socket.socket(fileno=files.pop())
            _tell(ends[child], child)
            for file in files:
                os.close(file)


def _tell(end: socket.socket, number: int) -> None:
    with suppress(OSError):  # nobody may be there any more
        end.send(_NUMBER.pack(number))


def _become(about: dict[str, Any], streams: Sequence[int], main: Callable[..., None]) -> None:
    """Be what was asked for, and end."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number, file in enumerate(streams):
            os.dup2(file, number)
        os.closerange(SHARED + 1, MOST_FILES)
        os.environ.clear()
        os.environ.update(about["environment"])
        os.chdir(about["folder"])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        main(*about["words"])
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
