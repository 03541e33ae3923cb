"""How a command ends: an exit code, and one line for whatever ended it early."""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

from llamadiff.system.errors import UserError
from llamadiff.system.stale_files import remove_own, sweep
from llamadiff.system.started import all_ended
from llamadiff.system.stops import SIGNALS, Stopped, heed_signals, listen

COULD_NOT_TELL = 2
OWN_FAULT = 70  # as sysexits.h has it for an internal error of the program


def run(command: Callable[[], Any], say: Callable[[str], None]) -> int:
    """The exit code of a command. ``say`` is given one line if it ends before its time.

    A program error gives one line as well, and a code of its own, since Python's for it would mean "wrong"; in
    Python's development mode (-X dev) it keeps its traceback. What was stopped by a signal, or lost its reader, has no
    exit code: when all is cleaned up, it dies of the signal, as it would have without cleaning up. A shell calls that
    128 plus the signal's number: 130 after Ctrl-C.
    """
    _open_streams()
    listen()
    code, fatal = COULD_NOT_TELL, 0
    try:
        sweep()
        with all_ended(), heed_signals():
            code = int(command() or 0)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # rich and typer exit when a reader such as head has gone
        fatal = getattr(signal, "SIGPIPE", 0)
    except (Exception, Stopped) as error:
        if sys.flags.dev_mode:
            raise
        ended_by = _stop_behind(error) or error
        say(reason(ended_by))
        code, fatal = code_of(ended_by), ended_by.number if isinstance(ended_by, Stopped) else 0
    for number in SIGNALS:  # too late to stop anything: the end stands
        signal.signal(number, signal.SIG_IGN)
    _finish_output()
    remove_own()  # what could not be removed while it was open
    gc.freeze()  # or Python would look through all that is left for circles, on its way out
    return _die_of(fatal) if fatal else code


def _stop_behind(error: BaseException | None) -> Stopped | None:
    """The stop behind an error: before 3.12 Python raises RuntimeError in place of what finds it making a class."""
    while error is not None and not isinstance(error, Stopped):
        error = error.__cause__
    return error


def _die_of(number: int) -> int:
    """End of a signal -> the exit code where that does not end a process, the first one of a container for one."""
    if sys.platform != "win32":  # where a signal raised ends in an exit code that says nothing
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    return 128 + number


def code_of(error: BaseException) -> int:
    """The exit code of what ended a command: a fault of this program's own is told from all others."""
    is_explained = isinstance(error, (UserError, Stopped, MemoryError, OSError)) or hasattr(error, "format_message")
    return COULD_NOT_TELL if is_explained else OWN_FAULT


def reason(error: BaseException, unnamed: str = "standard output") -> str:
    """What ended a command, in words. ``unnamed``: the one file whose errors do not name it."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, Stopped):
        return "stopped"
    if isinstance(error, MemoryError):
        return "there is not enough memory; give fewer tokens"
    if isinstance(error, OSError):
        return f"{error.filename or unnamed}: {error.strerror or error}"
    if hasattr(error, "format_message"):  # the command line was not understood
        return f"{error.format_message()} (llamadiff --help)"
    return f"a fault in llamadiff, please report it: {type(error).__name__}: {error} ({_place(error)})"


def _place(error: BaseException) -> str:
    """File and line where an exception was raised."""
    for frame in traceback.extract_tb(error.__traceback__, limit=-1):
        return f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return "nowhere"


def _open_streams() -> None:
    """Somewhere to write where the caller closed a stream; a character that a stream cannot show is escaped."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        getattr(sys, name).reconfigure(errors="backslashreplace")


def _finish_output() -> None:
    """Write out what was printed; where that fails, send it nowhere, or Python would try and fail again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
