"""Child processes: another Python that imports what this one imports, and that lives no longer than it."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_KILL = 9
_FAULTS = {getattr(signal, f"SIG{name}", 0) for name in ("ABRT", "SEGV", "BUS", "ILL", "FPE", "SYS", "TRAP")}
_CHUNK = 1 << 16
_DYING = 1.0  # seconds that a process takes to die when it has closed some of its files, at most


def command(module: str, *words: str) -> list[str]:
    """The command line that runs ``main(*words)`` of a module of this package."""
    given = ", ".join(map(ascii, words))
    code = f"import sys; sys.path[:] = sys.argv[1:]; from {module} import main; main({given})"
    return [sys.executable, "-c", code, *sys.path]


def how_it_ended(code: int) -> str:
    """The return code of a process, in words: ``died of SIGSEGV``, ``was killed by signal 15 (SIGTERM)``."""
    if code >= 0:
        return f"ended with exit code {code if code < 1 << 16 else hex(code)}"  # Windows has faults as 0xc0000005
    return f"died of {signal_name(-code)}" if is_fault(code) else f"was killed by signal {-code} ({signal_name(-code)})"


def is_fault(code: int) -> bool:
    """Whether a process that ended so did it itself; no such signal comes from outside, as a rule."""
    return code >= 0 or -code in _FAULTS


def signal_name(number: int) -> str:
    """SIGKILL for 9; real-time signals have no name of their own."""
    return signal.Signals(number).name if number in set(signal.Signals) else "a real-time signal"


def watch_parent(leave: Callable[[], None]) -> queue.Queue[str]:
    """In a child: watch standard input from now on -> its lines.

    The parent keeps its end open as long as it wants the child. When it is closed, by the parent or by its death, the
    child calls ``leave`` and ends, whatever it is doing.
    """
    lines = queue.Queue[str]()

    def watch() -> None:
        heard = b""
        while chunk := os.read(0, _CHUNK):
            *whole, heard = (heard + chunk).split(b"\n")
            for line in whole:
                lines.put(line.decode())
        leave()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    return lines


def await_end(parent: int) -> None:
    """Wait for a parent that dies: until its last thread has closed its files, what it has locked is a living one's."""
    until = time.monotonic() + _DYING
    while os.getppid() == parent and time.monotonic() < until:
        time.sleep(0.001)


def die_with_parent() -> None:
    """In a child that cannot watch its input: be killed when the parent's thread that made it ends (Linux)."""
    _control(_PR_SET_PDEATHSIG, _KILL)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parents die, wherever they hide (Linux)."""
    _control(_PR_SET_CHILD_SUBREAPER, 1)


def _control(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def nameless_file() -> IO[bytes]:
    """A file that ends with the processes that have it open: in memory, where the system can."""
    if sys.platform == "linux":
        file = os.fdopen(os.memfd_create("log"), "w+b")
    else:
        from tempfile import TemporaryFile

        file = TemporaryFile()  # noqa: SIM115
    return file


def inherits(file: IO[bytes]) -> dict[str, Any]:
    """What a child is started with that is to have a file by its descriptor, where the system can."""
    return {} if sys.platform == "win32" else {"pass_fds": (file.fileno(),)}


def leave_no_core() -> None:
    """Die without a core file, which Windows does not write."""
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def take_no_more(memory: int) -> None:
    """Raise MemoryError beyond so many bytes of address space, where the system has such a limit."""
    if sys.platform != "win32":
        import resource

        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


def end_session(process: int) -> None:
    """Kill a process that has a session of its own, with all that is in it, where the system has such."""
    if sys.platform != "win32":
        with suppress(OSError):
            os.killpg(process, _KILL)


def said_in_a_fork(say: Callable[[], None], seconds: int) -> tuple[bytes, int]:
    """What a function prints in a process of its own in ``seconds`` -> and its return code; nothing without forks."""
    said, code = b"", 0
    if sys.platform != "win32":
        read, write = os.pipe()
        child = os.fork()
        if not child:
            with suppress(BaseException):
                signal.signal(signal.SIGALRM, signal.SIG_DFL)  # whoever uses this package may have a handler
                signal.alarm(seconds)
                os.dup2(write, 1)
                say()
                sys.stdout.flush()
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as printed:
            said = printed.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return said, code


def give_way() -> None:
    """Compute when nobody else wants to, from now on, where the system can be told so."""
    if sys.platform != "win32":
        with suppress(OSError):
            os.nice(15)


def taken_by(process: int) -> tuple[int, float]:
    """The memory, in bytes, and the seconds of computation that a process has taken; of one that ended, none."""
    import psutil

    with suppress(psutil.Error):
        watched = psutil.Process(process)
        return int(watched.memory_info().rss), float(sum(watched.cpu_times()[:2]))
    return 0, 0.0


def peak_rss_mb() -> float:
    """The larger peak of this process and its children, in MiB (memory-mapped model pages count)."""
    if sys.platform == "win32":
        import psutil

        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        peak, unit = max(process.memory_info().peak_wset for process in family), 1 << 20
    else:
        import resource

        peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
    return float(peak / unit)
