"""The child process: serves the parent's requests (capture.py), and puts what goes wrong into an answer.

A request is a JSON line on standard input, which stays open as long as the parent lives; answers are JSON lines
on standard output (llama.cpp's own output is sent to standard error), the last of them ``done`` or an ``error``.
It may die: llama.cpp aborts on some files.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from queue import Queue
from types import ModuleType
from typing import TYPE_CHECKING

from llamadiff.llamacpp.library import INSTALL, LLAMA_CPP_PYTHON, Package, behind, find_package
from llamadiff.llamacpp.request import Request
from llamadiff.llamacpp.tensor_transport import Voice
from llamadiff.system import libraries
from llamadiff.system.errors import NoRoomError, UnrunnableError, UserError
from llamadiff.system.exits import reason
from llamadiff.system.python_child import await_end, leave_no_core, watch_parent
from llamadiff.system.stale_files import remove_own, sweep

if TYPE_CHECKING:
    from llamadiff.llamacpp.interface import Library
    from llamadiff.llamacpp.session import Loaded


def main(build: str = "", shared: str = "", word: str = "", opener: str = "") -> None:
    """Serve requests until the parent has no more, with llama.cpp of a ``build``, or the one that is installed.

    ``opener``: ``module:name`` of what loads that. ``shared``: the descriptor of a file that begins with the ``word``,
    where this process has what the parent has open.
    """
    _die_quietly()
    say, memory = _only_voice(), _shared_file(shared, word)
    heard = watch_parent(partial(_leave, os.getppid()))
    library = _open_library(build, opener)  # while the parent opens the model
    say(opened=True)  # whatever this process dies of from now on, it is not its library that cannot be loaded
    loaded = None
    while True:
        said = json.loads(heard.get())
        if "ahead" in said:
            loaded = _load_model(library, Request.from_json(said["ahead"]))
        elif "model" in said:  # what else there is was about a run that has ended
            with suppress(BrokenPipeError):  # nobody is there to be told: the end of the input is about to be seen
                _serve(library, Request.from_json(said), say, heard, memory, loaded)
            loaded = None


def _load_model(library: Library | UserError, request: Request) -> Loaded | None:
    """The model of a request that will come; None where it cannot be loaded, which that request will be told."""
    with suppress(Exception):
        if not isinstance(library, UserError):
            from llamadiff.llamacpp.session import Loaded

            return Loaded(library, request)
    return None


def _serve(
    library: Library | UserError,
    request: Request,
    say: Voice,
    hear: Queue[str],
    shared: int | None,
    loaded: Loaded | None = None,
) -> None:
    """One request; its model was ``loaded`` before, perhaps."""
    try:
        if isinstance(library, UserError):
            raise library
        from llamadiff.llamacpp.run import run

        run(library, request, say, hear, shared, loaded)
    except MemoryError:
        say(error=f"{request.model}: there is not enough memory to run it in llama.cpp; give fewer tokens")
    except NoRoomError as error:
        say(error=str(error), needs=error.needs)
    except Exception as error:  # our own faults too: the parent would lay them to llama.cpp
        say(error=reason(error, "llama.cpp's process"), unrunnable=isinstance(error, UnrunnableError))


def _die_quietly() -> None:
    """No core file, no debugger attached by an assertion; Ctrl-C is the parent's to handle.

    Nor do idle threads spin: this process and its parent work at the same time.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["GGML_NO_BACKTRACE"] = "1"
    leave_no_core()


def _only_voice() -> Voice:
    """Keep standard output for answers; whatever C code prints there goes to standard error."""
    voice = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return Voice(voice)


def _shared_file(descriptor: str, word: str) -> int | None:
    """The file that parent and child share, if it is there: no container and no other machine has it."""
    with suppress(OSError, ValueError):
        os.lseek(int(descriptor), 0, os.SEEK_SET)
        if word and os.read(int(descriptor), len(word)) == word.encode():
            return int(descriptor)
    return None


def _leave(parent: int) -> None:
    """The parent is gone, perhaps killed: leave nothing of what this process made, nor of what that one did."""
    await_end(parent)
    remove_own()
    sweep()


def _open_library(build: str = "", opener: str = "") -> Library | UserError:
    """Import llama.cpp and what tells of it -> what is wrong if it is not there, or cannot be loaded."""
    try:
        import llamadiff.llamacpp.run  # noqa: F401

        opened: Library = resolve_name(opener)(build) if build else _open_package(find_package(), opener)
        return opened  # no other llama.cpp must be loaded beside it
    except UserError as error:
        return error if build else UnrunnableError(str(error))
    except Exception as error:  # a library that does not fit this machine fails in many ways
        return _unloadable(error)


def _open_package(package: Package, opener: str) -> Library:
    """The llama.cpp of a package. Raises UserError for one that was not compiled here where no slice opens that."""
    if package != LLAMA_CPP_PYTHON and not opener:
        raise UserError(f"{package.name}: the slice that opens it is missing; mend llamadiff, or pip install {INSTALL}")
    return _llama_cpp_python() if package == LLAMA_CPP_PYTHON else resolve_name(opener)(str(package.folder))


def _llama_cpp_python() -> Library:
    """llama-cpp-python's.

    Of it only the low-level module is wanted, and its package would import much else; so the package is put in place
    without being run.
    """
    package = ModuleType(LLAMA_CPP_PYTHON.module)
    package.__spec__, package.__path__ = find_spec(LLAMA_CPP_PYTHON.module), [str(LLAMA_CPP_PYTHON.folder)]
    sys.modules[package.__name__] = package
    from llama_cpp import llama_cpp

    from llamadiff.llamacpp.installed import Installed

    llama = Path(llama_cpp._lib._name)
    return Installed(libraries.Loaded(llama, behind(llama)), LLAMA_CPP_PYTHON.release, llama_cpp)


def _unloadable(error: Exception) -> UnrunnableError:
    return UnrunnableError(
        f"llama.cpp cannot be loaded ({type(error).__name__}: {error}), so there is no baseline: "
        f"pip install --force-reinstall --no-cache-dir {INSTALL}"
    )
