"""Any program that computes ggml graphs, watched: it runs with watch.c before its libraries, which writes down what
nodes read and gave (watch_run.py), and each node is judged here, in a thread beside.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from threadpoolctl import threadpool_limits

from llamadiff.ext.graph.check import NodeCheck
from llamadiff.ext.watch.graph_names import GraphNames
from llamadiff.ext.watch.watch_run import GRAPH, OFTEN, Bounds, files
from llamadiff.ext.watch.watched_ggml import Ggml
from llamadiff.ext.watch.watched_graph import Head, ProgramWeights, WatchedGraph, head_of, mapped
from llamadiff.ext.watch.watched_runs import Watchable, here, there
from llamadiff.llamacpp.quantizing import EightBits
from llamadiff.llamacpp.request import Request
from llamadiff.system.errors import UserError
from llamadiff.system.progress import Progress
from llamadiff.system.python_child import give_way
from llamadiff.system.stale_files import temporary_directory


@dataclass(frozen=True)
class JudgedGraph:
    """One graph: what it is called, what was found of its nodes, whose ggml computed it, whether on a device.

    ``fed``: inputs of an encoder that it was given, by their names; ``is_inserted``: whether a text model was given
    embeddings.
    """

    name: str
    head: Head
    checks: Sequence[NodeCheck]
    ggml: Ggml
    on_device: bool
    fed: Sequence[str] = ()
    is_inserted: bool = False


@dataclass(frozen=True)
class Watched:
    """A program that has ended: its return ``code``, or why it has none; how many graphs it computed and how many of
    them were judged; how many were to be, and were ``put_off`` since the judge was behind, or ``failed`` to be written;
    how many nodes were too ``large`` and left out, or judged ``in_part``; how long it ran, and how much of that was
    for watching, in seconds. ``refused``: libraries that could not be read; ``version``: of the first other one.
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
    version: str = ""

    @property
    def slower(self) -> float:
        """How many times slower the program was, at least: by what writing and waiting took of its time."""
        return self.seconds / max(self.seconds - self.added, self.seconds / 1000) if self.seconds else 1.0


def watch(
    arguments: Sequence[str], bounds: Bounds, request: Request, tell: Callable[[JudgedGraph], None],
    progress: Progress, reader: Callable[..., WatchedGraph] = WatchedGraph, streams: Mapping[str, Any] | None = None,
) -> Watched:  # fmt: skip
    """Run a program, and have its graphs judged as ``request`` says; ``tell`` is given each, from a thread.

    ``reader`` makes what reads a graph; ``streams``: a program's here, which has this process's else. Raises UserError
    where nothing can be watched here, or the program cannot be run.
    """
    with temporary_directory() as folder:
        run = there if request.settings.runner else here
        with run(arguments, bounds, folder, request.settings.runner, streams) as running:
            judge = _Judge(folder, running, request, tell, reader)
            judge.start()
            try:
                code, why, seconds = running.end()
            except UserError:
                judge.check()
                raise
        judge.finish(progress)
        plan = running.plan
        added = min(plan.added / 1e9, 0.999 * seconds)
        refused = tuple(ggml for ggml in running.ggmls.values() if ggml.refused)
        nodes = plan.nodes_large, plan.nodes_cut
        version = next((ggml.version for ggml in running.ggmls.values() if not ggml.refused), "")
        counts = plan.seen, judge.graphs, plan.put_off, plan.failed, *nodes
        return Watched(code, why, *counts, seconds, added, refused, version)


@dataclass
class _Judge:
    """Reads what the program's processes write down, in a thread."""

    folder: Path
    running: Watchable
    request: Request
    tell: Callable[[JudgedGraph], None]
    reader: Callable[..., WatchedGraph] = WatchedGraph
    graphs: int = 0
    failure: BaseException | None = None
    _ended: bool = False

    def __post_init__(self) -> None:
        keep = Path(self.request.keep) if self.request.keep is not None else None
        self._held, self._names = ProgramWeights(self.folder, keep), GraphNames()
        self._begun: dict[tuple[int, int], WatchedGraph] = {}
        self._thread = Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self, progress: Progress) -> None:
        """Judge what is left. Raises what went wrong meanwhile."""
        self._ended = True
        while self._thread.is_alive():
            progress("judging", self.running.plan.judged >> 20, max(1, self.running.plan.written >> 20))
            self._thread.join(0.2)
        self.check()

    def check(self) -> None:
        """Raise what went wrong, if something did."""
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            give_way()  # the program's speed is what its user waits for
            with threadpool_limits(1, "blas"):
                while True:
                    self._wait()
                    is_last = self._ended
                    found = files(self.folder, GRAPH)
                    for name, _ in found:
                        self._take(self.folder / name)
                    if is_last and not found:
                        return
        except BaseException as error:  # told to whoever waits for the end; the program waits for room, perhaps
            self.failure = error
            self.running.stop()

    def _wait(self) -> None:
        """Leave the processor to the program while there is room for half of what may wait."""
        while not self._ended and 2 * (self.running.plan.written - self.running.plan.judged) < self.running.plan.most:
            time.sleep(OFTEN)

    def _take(self, path: Path) -> None:
        """Judge one more part of a graph."""
        data = mapped(path)
        head = head_of(data)
        key, ggml = (head.process, head.number), self.running.ggmls[head.process, head.ggml]
        graph = self._begun.get(key)
        if graph is None:
            q8 = EightBits.from_answer(ggml.rounding)
            graph = self._begun[key] = self.reader(
                ggml.structure, self._held, self.request, q8, self.graphs + len(self._begun)
            )
        graph.take(data)
        self.running.judged(self.running.plan.judged + len(data))
        if graph.is_whole:
            del self._begun[key]
            self.graphs += 1
            if graph.checks:
                name = self._names.name(graph.read, [*graph.read.values()], graph.nodes, graph.fills)
                self.tell(
                    JudgedGraph(
                        name, head, graph.checks, ggml, graph.on_device, (*graph.fed,), "inp_embd" in graph.given
                    )
                )
