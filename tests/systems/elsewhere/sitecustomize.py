"""Makes this Python look, to llamadiff, as one on another system: ELSEWHERE is win32 or darwin.

What that system lacks is not there, when one of llamadiff's modules imports it or asks for it; Python's own library and
other packages see the machine as it is. On win32 a file that is open cannot be renamed or removed, whoever tries, and
what starts a process knows nothing of descriptors, sessions, or code between fork and exec.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import mmap
import os
import select
import signal
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

OURS = {"llamadiff", "llamaref"}
SYSTEM = os.environ.get("ELSEWHERE", "")

# Of Python's documentation: "Availability: Unix", or "Linux" for macOS.
MODULES = {
    "darwin": {"ossaudiodev", "spwd"},
    "win32": {"crypt", "fcntl", "grp", "nis", "ossaudiodev", "posix", "pty", "pwd", "readline", "resource", "spwd",
              "syslog", "termios", "tty", "_posixsubprocess"},
}  # fmt: skip
NAMES = {
    "darwin": {
        os: "copy_file_range eventfd getrandom memfd_create pipe2 posix_fadvise posix_fallocate sched_getaffinity "
            "sched_setaffinity splice unshare O_DIRECT O_TMPFILE",
        signal: "pidfd_send_signal sigtimedwait sigwaitinfo SIGPOLL SIGPWR SIGRTMAX SIGRTMIN SIGSTKFLT",
        select: "epoll",
    },
    "win32": {
        os: "chown chroot confstr copy_file_range ctermid eventfd fchdir fchown fork forkpty fpathconf getegid geteuid "
            "getgid getgrouplist getgroups getloadavg getpgid getpgrp getpriority getrandom getresgid getresuid getsid "
            "getuid initgroups killpg lchown lockf major makedev memfd_create minor mkfifo mknod nice openpty pathconf "
            "pidfd_open pipe2 posix_fadvise posix_fallocate posix_spawn posix_spawnp pread preadv pwrite pwritev "
            "readv register_at_fork sched_getaffinity sched_setaffinity sched_yield sendfile setegid seteuid setgid "
            "setpgid setpriority setsid setuid splice statvfs sync sysconf tcgetpgrp uname unshare wait wait3 wait4 "
            "waitid writev O_ASYNC O_CLOEXEC O_DIRECT O_DIRECTORY O_DSYNC O_NOATIME O_NOCTTY O_NOFOLLOW O_NONBLOCK "
            "O_PATH O_SYNC O_TMPFILE WNOHANG WUNTRACED WCONTINUED P_PID P_ALL RTLD_LAZY RTLD_NOW",
        signal: "alarm getitimer pause pidfd_send_signal pthread_kill pthread_sigmask setitimer siginterrupt "
                "sigpending sigtimedwait sigwait sigwaitinfo SIGALRM SIGBUS SIGCHLD SIGCLD SIGCONT SIGHUP SIGIO "
                "SIGKILL SIGPIPE SIGPOLL SIGPROF SIGPWR SIGQUIT SIGRTMAX SIGRTMIN SIGSTKFLT SIGSTOP SIGSYS "
                "SIGTRAP SIGTSTP SIGTTIN SIGTTOU SIGURG SIGUSR1 SIGUSR2 SIGVTALRM SIGWINCH SIGXCPU SIGXFSZ",
        mmap: "MADV_DONTNEED MADV_FREE MADV_SEQUENTIAL MADV_WILLNEED MAP_ANONYMOUS MAP_PRIVATE MAP_SHARED PROT_READ",
        select: "epoll poll",
    },
}  # fmt: skip


class Seen(ModuleType):
    """A module as the other system has it: without some names, with others, and otherwise the same."""

    def __init__(self, module: ModuleType, lacks: str = "", **has: Any) -> None:
        super().__init__(module.__name__)
        object.__getattribute__(self, "__dict__").update(_module=module, _lacks=set(lacks.split()), _has=has)

    def __getattribute__(self, name: str) -> Any:
        about = object.__getattribute__(self, "__dict__")
        if name in about["_has"]:
            return about["_has"][name]
        if name in about["_lacks"]:
            raise AttributeError(f"module {about['_module'].__name__!r} has no attribute {name!r}", name=name)
        return getattr(about["_module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "__dict__")["_module"], name, value)


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """As subprocess has it on Windows."""

    def __init__(self, *words: Any, creationflags: int = 0, start_new_session: bool = False, **more: Any) -> None:
        if more.get("preexec_fn") is not None or more.get("pass_fds") or start_new_session:
            raise ValueError(f"not supported on Windows platforms: {more}")
        super().__init__(*words, start_new_session=bool(creationflags & NEW_GROUP), **more)


class CDLL(ctypes.CDLL):
    """Windows has no library that is the process itself."""

    def __init__(self, name: Any, *words: Any, **more: Any) -> None:
        if name is None:
            raise TypeError("bad argument type for built-in operation")
        super().__init__(name, *words, **more)


NEW_GROUP, BINARY = 0x200, 1 << 30


def opened(path: Any, flags: int, *more: Any, **options: Any) -> int:
    """os.open; what is not opened as binary has its line ends changed there."""
    if not flags & BINARY:
        raise ValueError(f"{path}: opened as text")
    return os.open(path, flags & ~BINARY, *more, **options)


def killed(process: int, number: int) -> None:
    """os.kill: on Windows it ends the process, whatever the signal."""
    raise PermissionError(f"{process}: would be ended, not sent {number}")


def nobody_s(path: Any) -> os.stat_result:
    """os.lstat: Windows knows no number of a file's owner."""
    mode, inode, device, links, _, _, *more = os.lstat(path)
    return os.stat_result((mode, inode, device, links, 0, 0, *more))


def waited(*_: Any) -> None:
    """select.select: of sockets alone."""
    raise OSError(10038, "An operation was attempted on something that is not a socket")


def held(function: Any) -> Any:
    """os.unlink, os.replace or os.rename, of files that nobody in this process has open or mapped."""

    def checked(*paths: Any, **options: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__") != "tempfile":  # whose nameless files have names there
            for path in paths:
                folder = options.get("dir_fd")
                place = os.readlink(f"/proc/self/fd/{folder}") + "/" if folder is not None else ""
                full = os.path.realpath(place + os.fsdecode(path))
                if os.path.isfile(full) and full in open_files():
                    raise PermissionError(13, "The process cannot access the file because it is being used", full)
        return function(*paths, **options)

    return checked


def open_files() -> set[str]:
    """What this process has open or mapped."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        return found | {line.split(maxsplit=5)[-1].rstrip("\n") for line in file}


def with_peak(memory_info: Any) -> Any:
    """What psutil knows of a process's memory on Windows."""
    return lambda process: SimpleNamespace(**memory_info(process)._asdict(), peak_wset=memory_info(process).rss)


def with_seen(children: Any, error: type[Exception]) -> Any:
    """Who reads SEEN, a named pipe, reads its end when llamadiff has seen an endless sleep among its children."""

    def found(process: Any, **options: Any) -> Any:
        seen = children(process, **options)
        with contextlib.suppress(OSError, error):  # one is gone; nobody reads it yet, or any more
            if any(each.name() == "sleep" for each in seen):
                os.close(os.open(os.environ["SEEN"], os.O_WRONLY | os.O_NONBLOCK))
        return seen

    return found


def elsewhere(system: str) -> dict[str, ModuleType]:
    """The modules that llamadiff sees."""
    names = NAMES[system]
    seen: dict[str, ModuleType] = {"sys": Seen(sys, platform=system)}
    if system == "darwin":
        return seen | {module.__name__: Seen(module, lacks) for module, lacks in names.items()}
    for name in ("unlink", "remove", "replace", "rename"):
        setattr(os, name, held(getattr(os, name)))
    return seen | {
        "os": Seen(
            os, names[os], name="nt", open=opened, O_BINARY=BINARY, kill=killed, lstat=nobody_s, add_dll_directory=str
        ),
        "signal": Seen(signal, names[signal], SIGBREAK=21, CTRL_C_EVENT=0, CTRL_BREAK_EVENT=1),
        "mmap": Seen(mmap, names[mmap]),
        "select": Seen(select, names[select], select=waited),
        "subprocess": Seen(subprocess, Popen=Popen, CREATE_NEW_PROCESS_GROUP=NEW_GROUP),
        "ctypes": Seen(ctypes, CDLL=CDLL),
    }


def install(system: str) -> None:
    """From now on, modules of llamadiff are imported as on that system."""
    seen, found = elsewhere(system), builtins.__import__

    def imported(name: str, globals: Any = None, *more: Any, **options: Any) -> Any:
        space = globals or {}
        importer = space.get("__package__") or space.get("__name__") or ""
        if importer.partition(".")[0] in OURS:
            if name in MODULES[system]:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            if name in seen:
                return seen[name]
        module = found(name, globals, *more, **options)
        if name == "psutil" and not hasattr(module, "SEEN"):
            module.SEEN, module.Process.children = True, with_seen(module.Process.children, module.Error)
            if system == "win32":
                module.Process.memory_info = with_peak(module.Process.memory_info)
        return module

    builtins.__import__ = imported


if SYSTEM:
    install(SYSTEM)
