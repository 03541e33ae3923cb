"""Any program that computes ggml graphs, watched: it runs with watch.c before its libraries, which writes down what
nodes read and gave, and each node is judged here, in a thread beside.

The two share a folder: a ``plan``, which both map, says what is to be watched and counts what was; files ``ask-`` and
``told-`` are about the layout of a ggml's tensors, ``weight-`` and ``graph-`` are what was written down. Each is
complete under its name, and whoever has read it removes it.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from mmap import mmap
from pathlib import Path
from threading import Thread

from threadpoolctl import threadpool_limits

from llamadiff.ggml.check import NodeCheck
from llamadiff.llamacpp.graph_names import GraphNames
from llamadiff.llamacpp.quantizing import q8_way, way_of
from llamadiff.llamacpp.request import Request
from llamadiff.llamacpp.shims import Shim, kept
from llamadiff.llamacpp.watched_ggml import Ggml, asked
from llamadiff.llamacpp.watched_graph import Head, Held, WatchedGraph, head_of, mapped
from llamadiff.system import libraries
from llamadiff.system.errors import UserError
from llamadiff.system.leftovers import temporary_directory
from llamadiff.system.progress import Progress
from llamadiff.system.python_child import give_way
from llamadiff.system.supervised import Program, program

VERSION = 1  # of Plan, and of what watch.c writes
OFTEN = 0.01  # seconds between two looks into the folder
_GRAPH = re.compile(r"graph-(\d+)-(\d+)-(\d+)")
_ASK = re.compile(r"ask-(\d+)-(\d+)")


class Plan(ctypes.Structure):
    """struct plan: what is to be watched, then what was."""

    _fields_ = [
        ("version", ctypes.c_uint64),
        *((name, ctypes.c_int64) for name in ("judge", "from_", "to", "first", "every")),
        *((name, ctypes.c_uint64) for name in ("most", "weights", "large")), ("nodes", ctypes.c_char * 256),
        *((name, ctypes.c_uint64) for name in ("seen", "watched", "put_off", "partial", "failed")),
        *((name, ctypes.c_uint64) for name in ("nodes_large", "nodes_cut", "written", "judged", "kept", "added")),
    ]  # fmt: skip


@dataclass(frozen=True)
class Bounds:
    """What is watched of a program: ``graphs`` from one to another, all of them; or the ``first``, each that is like
    none before, and one in ``every`` (1: all, 0: none).

    ``nodes``: a pattern of names. So many bytes may wait to be judged (``waiting``), so many of ``weights`` are kept,
    and of a node that reads and gives more than ``large`` some rows are judged, or none.
    """

    graphs: tuple[int, int] | None = None
    first: int = 4
    every: int = 10
    nodes: str = ""
    waiting: int = 2 << 30
    weights: int = 16 << 30
    large: int = 1 << 30


@dataclass(frozen=True)
class JudgedGraph:
    """One graph: what it is called, what was found of its nodes, whose ggml computed it, whether on a device."""

    name: str
    head: Head
    checks: Sequence[NodeCheck]
    ggml: Ggml
    on_device: bool


@dataclass(frozen=True)
class Watched:
    """A program that has ended: its return ``code``, or why it has none; how many graphs it computed and how many of
    them were judged; how many were to be, and were ``put_off`` since the judge was behind, or ``failed`` to be written;
    how many nodes were too ``large`` and left out, or judged ``in_part``; how long it ran, and how much of that was
    for watching, in seconds. ``refused``: libraries that could not be read.
    """

    code: int | None
    why: str
    seen: int
    judged: int
    put_off: int
    failed: int
    large: int
    in_part: int
    seconds: float
    added: float
    refused: tuple[Ggml, ...] = ()

    @property
    def slower(self) -> float:
        """How many times slower the program was, at least: by what writing and waiting took of its time."""
        return self.seconds / max(self.seconds - self.added, self.seconds / 1000) if self.seconds else 1.0


def watch(
    arguments: Sequence[str], bounds: Bounds, request: Request, tell: Callable[[JudgedGraph], None], progress: Progress
) -> Watched:
    """Run a program, and have its graphs judged as ``request`` says; ``tell`` is given each, from a thread.

    Raises UserError where nothing can be watched here, or the program cannot be run.
    """
    with temporary_directory() as folder, _plan(folder, bounds) as plan:
        judge = _Judge(folder, plan, request, tell)
        environment = _environment(shim(folder), folder)
        started = time.monotonic()
        with program(arguments, environment) as running:
            judge.start()
            while running.runs:
                judge.answer()
                running.wait(OFTEN)
            seconds = time.monotonic() - started
            code, why = _end_of(arguments, running)
        judge.finish(progress)
        added = min(plan.added / 1e9, 0.999 * seconds)
        refused = tuple(ggml for ggml in judge.ggmls.values() if ggml.refused)
        nodes = plan.nodes_large, plan.nodes_cut
        return Watched(code, why, plan.seen, judge.graphs, plan.put_off, plan.failed, *nodes, seconds, added, refused)


def shim(folder: Path) -> Path:
    """watch.c, compiled, in a folder. Raises UserError where it cannot be, or a system has no such libraries."""
    if not libraries.HERE.before:
        raise UserError("watch: this system puts no library before a program's own; use llamadiff backend")
    made = Shim(
        "watch.c", ("-shared", "-fPIC", "-O2", "-w"), ("-ldl", "-lpthread"), "watch", "for what looks into the program",
        lambda said: f"watch.c does not compile here: {said}; please report it",
    )  # fmt: skip
    library = folder / f"watch{libraries.HERE.ending}"
    library.write_bytes(kept(made, (), ("watch", *made.before), Path.read_bytes))
    return library


def _environment(shim: Path, folder: Path) -> dict[str, str]:
    name = libraries.HERE.before
    before = os.environ.get(name)
    more = dict(libraries.HERE.beside)
    return {name: f"{shim}:{before}" if before else str(shim), "LLAMADIFF_WATCH": str(folder), **more}


@contextmanager
def _plan(folder: Path, bounds: Bounds) -> Iterator[Plan]:
    """What both processes see."""
    path = folder / "plan"
    path.write_bytes(bytes(ctypes.sizeof(Plan)))
    with path.open("r+b") as file:
        memory = mmap(file.fileno(), ctypes.sizeof(Plan))
    plan = Plan.from_buffer(memory)
    plan.judge, plan.first, plan.every = os.getpid(), bounds.first, bounds.every
    plan.from_, plan.to = bounds.graphs or (0, 0)
    plan.most, plan.weights, plan.large = bounds.waiting, bounds.weights, bounds.large
    plan.nodes = os.fsencode(bounds.nodes)[:255]
    plan.version = VERSION
    yield plan


def _end_of(arguments: Sequence[str], running: Program) -> tuple[int | None, str]:
    """The program's return code; or why there is none. Raises UserError for a program that cannot be run."""
    answer = running.answer()
    if "error" in answer:
        raise UserError(f"{arguments[0]}: cannot be run ({answer['error']})")
    code = answer.get("code")
    return (code, "") if isinstance(code, int) else (None, "the process that ran it was killed")


@dataclass
class _Judge:
    """Reads what the program's processes write down, in a thread."""

    folder: Path
    plan: Plan
    request: Request
    tell: Callable[[JudgedGraph], None]
    graphs: int = 0
    ggmls: dict[tuple[int, int], Ggml] = field(default_factory=dict)
    failure: BaseException | None = None
    _ended: bool = False

    def __post_init__(self) -> None:
        self._held, self._names = Held(self.folder), GraphNames()
        self._begun: dict[tuple[int, int], WatchedGraph] = {}
        self._known: dict[str, Ggml] = {}
        self._thread = Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self, progress: Progress) -> None:
        """Judge what is left. Raises what went wrong meanwhile."""
        self._ended = True
        while self._thread.is_alive():
            progress("judging", self.plan.judged >> 20, max(1, self.plan.written >> 20))
            self._thread.join(0.2)
        if self.failure is not None:
            raise self.failure

    def answer(self) -> None:
        """Tell processes that ask for it where the tensors of their ggml have their fields."""
        for name, match in _files(self.folder, _ASK):
            base, cpu, *_ = (self.folder / name).read_text("utf-8", "surrogateescape").split("\n")
            ggml = self._known.get(base) or asked(base, cpu)
            self._known[base] = self.ggmls[int(match[1]), int(match[2])] = ggml
            (self.folder / name).unlink()
            told = self.folder / name.replace("ask", "told")
            part = told.with_suffix(".part")
            part.write_bytes(struct.pack(f"={len(ggml.numbers)}Q", *ggml.numbers))
            part.replace(told)

    def _run(self) -> None:
        try:
            give_way()  # the program's speed is what its user waits for
            with threadpool_limits(1, "blas"):
                while True:
                    self._wait()
                    is_last = self._ended
                    found = sorted(_files(self.folder, _GRAPH), key=lambda file: tuple(map(int, file[1].groups())))
                    for name, _ in found:
                        self._take(self.folder / name)
                    if is_last and not found:
                        return
        except BaseException as error:  # told to whoever waits for the end
            self.failure = error

    def _wait(self) -> None:
        """Leave the processor to the program while there is room for half of what may wait."""
        while not self._ended and 2 * (self.plan.written - self.plan.judged) < self.plan.most:
            time.sleep(OFTEN)

    def _take(self, path: Path) -> None:
        """Judge one more part of a graph."""
        data = mapped(path)
        head = head_of(data)
        key, ggml = (head.process, head.number), self.ggmls[head.process, head.ggml]
        graph = self._begun.get(key)
        if graph is None:
            q8 = way_of(ggml.rounded) if ggml.rounded else q8_way()
            graph = self._begun[key] = WatchedGraph(
                ggml.structure, self._held, self.request, q8, self.graphs + len(self._begun)
            )
        graph.take(data)
        self.plan.judged += len(data)
        if graph.is_whole:
            del self._begun[key]
            self.graphs += 1
            if graph.checks:
                name = self._names.name(graph.read, [*graph.read.values()], graph.nodes, graph.fills)
                self.tell(JudgedGraph(name, head, graph.checks, ggml, graph.on_device))


def _files(folder: Path, form: re.Pattern[str]) -> Iterator[tuple[str, re.Match[str]]]:
    """The files in a folder whose names are of a form."""
    for entry in [*os.scandir(folder)]:
        match = form.fullmatch(entry.name)
        if match is not None:
            yield entry.name, match
