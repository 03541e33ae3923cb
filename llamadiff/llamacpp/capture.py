"""The parent's side: sends a request to llama.cpp's process, and reads what that tells of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from llamaref import Weights

from llamadiff import plugins
from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.readers import RunReader, TapReader, Tell
from llamadiff.llamacpp.request import Request, Settings
from llamadiff.system.errors import NoRoomError, UserError
from llamadiff.system.output import check_target
from llamadiff.system.progress import Progress, silent
from llamadiff.system.stale_files import temporary_directory, temporary_place
from llamadiff.trace.hashing import is_remembered
from llamadiff.trace.reader import Trace


def capture(
    request: Request,
    progress: Progress = silent,
    child: Child | None = None,
    kind: Callable[[Request, Tell], RunReader] = TapReader,
) -> Trace:
    """Run llama.cpp on a request with an ``output`` and open the trace of it. Raises UserError.

    ``child``: one that was made before, to be ready by now; it stays open. ``kind``: who reads it.
    """
    assert request.output is not None
    check_target(Path(request.output))
    read_run(request, progress, child, kind)
    return Trace.open(request.output)


def read_run(
    request: Request,
    progress: Progress = silent,
    child: Child | None = None,
    kind: Callable[[Request, Tell], RunReader] = TapReader,
) -> RunReader:
    """Run llama.cpp on a request, and have it read, as a trace or by another ``kind`` of reader. Raises UserError."""
    request = prepare_request(request)
    with nullcontext(child) if child else Child(request.settings) as ready:
        with kind(request, ready.tell) as reader:
            ready.ask(request, progress, reader.read_answer)
            reader.finish()
        return reader


def prepare_request(request: Request) -> Request:
    """A request with what llama.cpp's process is to know of the file, which it does not read itself."""
    files = request.files or (request.model,)
    describes = request.nodes or request.graph is not None or request.keep_graph
    weights = request.weights or (tuple(Weights(request.model)) if describes else ())
    listener = plugins.ask_first(lambda each: each.listener) or ""
    return replace(request, weights=weights, alone=all(map(is_remembered, files)), listener=listener)


@dataclass(frozen=True)
class Facts:
    """How llama.cpp was built, where tensors have their fields, its machine, its devices (name, description, kind)."""

    version: str
    build: str
    layout: str
    machine: str
    devices: tuple[tuple[str, str, str], ...]


def probe(settings: Settings | None = None) -> Facts:
    """Ask the library of some settings about itself. Raises UserError if it cannot be loaded."""
    with Child(settings) as child:
        answers = child.ask(Request(model=""), silent)
    devices = tuple((name, words, kind) for name, words, kind in answers["devices"])
    return Facts(answers["version"], answers["build"], answers["layout"], answers["machine"], devices)


@contextmanager
def scratch_directory() -> Iterator[str]:
    """A directory for traces nobody asked to keep, gone at the end. Raises UserError if it cannot be made."""
    with ExitStack() as stack:
        try:
            place = stack.enter_context(temporary_directory())
        except OSError as error:
            raise UserError(
                f"{temporary_place()}: cannot be written ({error.strerror}); "
                "set TMPDIR to a directory with room for the trace"
            ) from None
        try:
            yield str(place)
        except NoRoomError as error:
            raise UserError(
                f"{place.parent}: no room for what is recorded ({error.needs}); set TMPDIR to a directory with room"
            ) from None
