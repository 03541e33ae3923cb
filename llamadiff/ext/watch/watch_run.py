"""What a watched program and whoever judges it share (watch.c, watching.py): a folder with a ``plan``, which both map.

The plan says what is to be watched and counts what was; files ``ask-`` and ``told-`` are about the layout of a ggml's
tensors, ``weight-`` and ``graph-`` are what was written down. Each is complete under its name, and whoever has read it
removes it.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path

from llamadiff.ext.builds.shims import Shim, kept
from llamadiff.ext.watch.watched_ggml import Ggml
from llamadiff.system import libraries
from llamadiff.system.errors import UserError

VERSION = 1  # of Plan, and of what watch.c writes
OFTEN = 0.01  # seconds between two looks into the folder
GRAPH = re.compile(r"graph-(\d+)-(\d+)-(\d+)")
WEIGHT = re.compile(r"weight-(\d+)-(\d+)")
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


COUNTS = ("seen", "put_off", "failed", "nodes_large", "nodes_cut", "added")  # of a plan, what is told in the end


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

    def put_into(self, plan: Plan) -> None:
        """As watch.c reads them."""
        plan.first, plan.every = self.first, self.every
        plan.from_, plan.to = self.graphs or (0, 0)
        plan.most, plan.weights, plan.large = self.waiting, self.weights, self.large
        plan.nodes = os.fsencode(self.nodes)[:255]


@contextmanager
def planned(folder: Path, bounds: Bounds) -> Iterator[Plan]:
    """What both processes see."""
    path = folder / "plan"
    path.write_bytes(bytes(ctypes.sizeof(Plan)))
    with path.open("r+b") as file:
        memory = mmap(file.fileno(), ctypes.sizeof(Plan))
    plan = Plan.from_buffer(memory)
    bounds.put_into(plan)
    plan.judge, plan.version = os.getpid(), VERSION
    yield plan


def variables(folder: Path) -> dict[str, str]:
    """What a program that is watched has in its environment. Raises UserError as ``shim`` does."""
    library, name = shim(folder), libraries.HERE.before
    before = os.environ.get(name)
    return {
        name: f"{library}:{before}" if before else str(library), "LLAMADIFF_WATCH": str(folder),
        **dict(libraries.HERE.beside),
    }  # fmt: skip


def shim(folder: Path) -> Path:
    """watch.c, compiled, in a folder. Raises UserError where it cannot be, or a system has no such libraries."""
    if not libraries.HERE.before:
        raise UserError("watch: this system puts no library before a program's own; use llamadiff backend")
    made = Shim(
        "watch.c", ("-shared", "-fPIC", "-O2", "-w"), ("-ldl", "-lpthread"), "watch", "for what looks into the program",
        lambda said: f"watch.c does not compile here: {said}; please report it", "llamadiff.ext.watch",
    )  # fmt: skip
    library = folder / f"watch{libraries.HERE.suffix}"
    library.write_bytes(kept(made, (), ("watch", *made.before), Path.read_bytes))
    return library


class Answers:
    """What programs are told that ask where the tensors of their ggml have their fields; ``ask``: how a ggml is asked.

    ``ggmls``: those of each process, by the numbers that it gave them.
    """

    def __init__(self, folder: Path, ask: Callable[[str, str], Ggml]) -> None:
        self.folder, self.ask = folder, ask
        self.ggmls = dict[tuple[int, int], Ggml]()
        self._known: dict[str, Ggml] = {}

    def give(self) -> list[tuple[int, int]]:
        """Answer whoever asks -> the numbers of what is known now."""
        new = []
        for name, match in files(self.folder, _ASK):
            base, cpu, lacking, *_ = (self.folder / name).read_text("utf-8", "surrogateescape").split("\n")
            lacks = Ggml(base, refused=f"this ggml has no {lacking}; use another version") if lacking else None
            ggml = self._known.get(base) or lacks or self.ask(base, cpu)
            key = int(match[1]), int(match[2])
            self._known[base] = self.ggmls[key] = ggml
            (self.folder / name).unlink()
            told = self.folder / name.replace("ask", "told")
            part = told.with_suffix(".part")
            part.write_bytes(struct.pack(f"={len(ggml.numbers)}Q", *ggml.numbers))
            part.replace(told)
            new.append(key)
        return new


def files(folder: Path, form: re.Pattern[str]) -> list[tuple[str, re.Match[str]]]:
    """The files in a folder whose names are of a form, in the order of the numbers in these."""
    found = [(entry.name, match) for entry in os.scandir(folder) if (match := form.fullmatch(entry.name)) is not None]
    return sorted(found, key=lambda file: tuple(map(int, file[1].groups())))
