"""The parent's side: sends a request to llama.cpp's process, and opens the trace that it wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from llamadiff.ggml.check import NodeCheck
from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.request import Request
from llamadiff.system.errors import NoRoomError, UserError
from llamadiff.system.leftovers import temporary_directory, temporary_place
from llamadiff.system.output import check_target
from llamadiff.system.progress import Progress, silent
from llamadiff.trace.metadata import Info
from llamadiff.trace.reader import Trace


def capture(request: Request, progress: Progress = silent, child: Child | None = None) -> Trace:
    """Run llama.cpp on a request with an ``output`` and open the trace it wrote. Raises UserError.

    ``child``: one that was made before, to be ready by now; it stays open.
    """
    assert request.output is not None
    check_target(Path(request.output))
    with nullcontext(child) if child else Child(request.settings.llama_cpp) as ready:
        ready.ask(request, progress)
    return Trace.open(request.output)


@dataclass(frozen=True)
class Nodes:
    """What a run that checked every node found: the run's facts, and its nodes in graph order, pass by pass.

    ``trusted``: how many tensors ggml decoded as gguf-py does, bit for bit; ``refused`` names those where it did not.
    """

    info: Info
    checks: tuple[NodeCheck, ...]
    trusted: int
    refused: tuple[str, ...]


def check_nodes(request: Request, progress: Progress = silent, child: Child | None = None) -> Nodes:
    """Run llama.cpp and compute every node again as it runs. Raises UserError."""
    assert request.output is not None
    with nullcontext(child) if child else Child(request.settings.llama_cpp) as ready:
        ready.ask(request, progress)
    data = json.loads(Path(request.output).read_text(encoding="utf-8"))
    fields = {key: value for key, value in data["info"].items() if key != "schema"}
    info = Info(**{**fields, "tokens": tuple(fields["tokens"]), "positions": tuple(fields["positions"]),
                   "batches": tuple(fields.get("batches", ()))})  # fmt: skip
    checks = tuple(NodeCheck.from_json(node) for node in data["nodes"])
    return Nodes(info, checks, data["trusted"], tuple(data["refused"]))


@dataclass(frozen=True)
class Facts:
    """How llama.cpp was built, where its tensors have their fields, and its devices: name and description."""

    version: str
    build: str
    layout: str
    devices: tuple[tuple[str, str], ...]


def probe(llama_cpp: str = "") -> Facts:
    """Ask a library about itself: llama-cpp-python's, or a build's. Raises UserError if it cannot be loaded."""
    with Child(llama_cpp) as child:
        answers = child.ask(Request(model=""), silent)
    devices = tuple((name, words) for name, words in answers["devices"])
    return Facts(answers["version"], answers["build"], answers["layout"], devices)


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
