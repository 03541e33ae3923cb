"""A kernel on trial: a command, or a Python function in a process of its own; what it writes for each op's file."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import numpy as np

from llamadiff.candidates.arrays import npy
from llamadiff.candidates.command import MAX_OUTPUT, PREFIX, tail_of, words_of
from llamadiff.ext.graph.op import Array, Op
from llamadiff.system import python_child
from llamadiff.system.errors import UserError
from llamadiff.system.python_child import how_it_ended, is_fault
from llamadiff.system.supervised import Supervised, supervise

PYTHON = "python:"
OP, OUT = "op.safetensors", "out"
EXPECTED = '"cmd: ./kernel {op} {out}", or python:FILE.py:FUNCTION'
_STORED = {"i32": "<i4", "i64": "<i8", "f16": "<f2"}  # other types are written as float32
_MORE = 4096  # bytes that a result's file may have beside its values


@dataclass(frozen=True)
class Failed:
    """Why there is no result, and what to do about it (``meant``); ``refused``: the kernel said so by its exit code."""

    says: str
    meant: str = ""
    refused: bool = False


@dataclass(frozen=True)
class Kernel:
    """A kernel by its command: words with ``{op}`` and ``{out}``; or a Python function, which is given many at once."""

    spec: str
    words: tuple[str, ...]
    file: Path | None = None
    function: str = ""

    @classmethod
    def of(cls, spec: str) -> Kernel:
        """From ``--candidate``. Raises UserError for one that cannot be run."""
        if spec.startswith(PREFIX):
            words = tuple(words_of(spec))
            for place in ("{op}", "{out}"):
                if not any(place in word for word in words):
                    raise UserError(f"--candidate {spec}: has no {place}; expected {EXPECTED}")
            return cls(spec, words)
        if spec.startswith(PYTHON):
            name, _, function = spec.removeprefix(PYTHON).rpartition(":")
            if not name or not function.isidentifier():
                raise UserError(f"--candidate {spec}: names no function; expected python:FILE.py:FUNCTION")
            if not Path(name).is_file():
                raise UserError(f"--candidate {spec}: {name}: no such file; expected python:FILE.py:FUNCTION")
            return cls(spec, (), Path(name), function)
        raise UserError(f"--candidate {spec}: not a kernel; expected {EXPECTED}")

    @property
    def label(self) -> str:
        """What it is called in a sentence: the function, or the program."""
        return self.function or Path(self.words[0]).name

    @property
    def files(self) -> list[Path]:
        """The files that it names."""
        return [self.file] if self.file is not None else [Path(word) for word in self.words if Path(word).is_file()]

    def run(self, folders: Sequence[Path], timeout: float) -> Iterator[Failed | None]:
        """Run it on the op in each folder, in order; why it failed there, or None."""
        if self.file is None:
            for folder in folders:
                values = {"{op}": str(folder / OP), "{out}": str(folder / OUT)}
                yield _run([_filled(word, values) for word in self.words], [folder], timeout)[0]
            return
        left = list(folders)
        while left:  # a process that ends early leaves those behind it to another one
            words = python_child.command(
                "llamadiff.ext.replay.python_kernel", str(self.file), self.function, *map(str, left)
            )
            found = _run(words, left, timeout)
            yield from found
            left = left[len(found) :]


def _filled(word: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word


def _run(words: list[str], folders: Sequence[Path], timeout: float) -> list[Failed | None]:
    """Run one process for these folders: what became of each that it came to, each in its time."""
    log = folders[0] / "log"
    with (
        log.open("wb") as output,
        supervise(words, {"stdin": DEVNULL, "stdout": output, "stderr": output}) as command,
    ):
        stopped = _watched(command, log, folders, timeout)
        answer = command.answer()
    if "error" in answer:
        raise UserError(f"{words[0]}: cannot be run ({answer['error']}); give {EXPECTED}")
    code = answer.get("code")
    if stopped is None and code == 0:
        return [None] * len(folders)
    failed = stopped or Failed(
        f"{how_it_ended(command.supervisor.returncode if code is None else code)}{tail_of(log)}",
        "run it on that op by itself to see why",
        refused=code is None or code > 0 or not is_fault(code),
    )
    return [*[None] * min(_done(folders), len(folders) - 1), failed]


def _done(folders: Sequence[Path]) -> int:
    """How many folders have a result, from the first on."""
    return next((place for place, folder in enumerate(folders) if not (folder / OUT).exists()), len(folders))


def _watched(command: Supervised, log: Path, folders: Sequence[Path], timeout: float) -> Failed | None:
    """Wait for the end; says why it was not waited for longer."""
    done, until = 0, time.monotonic() + timeout
    while command.runs:
        if len(folders) > 1 and (now := _done(folders)) > done:
            done, until = now, time.monotonic() + timeout
        if time.monotonic() >= until:
            return Failed(f"was still running after {timeout:g} s", "--timeout SECONDS gives it more")
        if log.stat().st_size > MAX_OUTPUT:
            return Failed(f"printed more than {MAX_OUTPUT >> 20} MiB", "let it print less")
        command.wait(0.05)
    return None


def result_of(folder: Path, n: Op) -> Array | Failed:
    """What a kernel wrote for an op, in the op's shape: a .npy array, or the values alone."""
    path, dtype, count = folder / OUT, np.dtype(_STORED.get(n.kind, "<f4")), math.prod(n.shape)
    meant = f"write {count} values of {dtype.name} in C order, shape {list(n.shape)}, to {{out}}"
    if not path.is_file():
        return Failed("wrote nothing", meant)
    size = path.stat().st_size
    with path.open("rb") as file:
        is_npy = file.read(6) == b"\x93NUMPY"
    if is_npy and size <= count * 8 + _MORE:
        return _npy(path, n, dtype, meant)
    if is_npy or size != count * dtype.itemsize:
        each = f" ({size // count} for each value)" if count and size % count == 0 else ""
        return Failed(f"wrote {size} bytes{each}, where {count * dtype.itemsize} are right", meant)
    return np.fromfile(path, dtype).astype(dtype.newbyteorder("=")).reshape(n.shape)


def _npy(path: Path, n: Op, dtype: np.dtype[Any], meant: str) -> Array | Failed:
    try:
        npy(path, OUT, None)  # the header goes with the file
        found = np.load(path, allow_pickle=False)
    except (UserError, ValueError, OSError) as error:
        return Failed(f"wrote no array ({error})", meant)
    if not _is_shape(found.shape, n.shape):
        return Failed(f"wrote the shape {list(found.shape)}", meant)
    if found.dtype.name not in {dtype.name} | ({"float32"} if n.kind == "f16" else set()):
        return Failed(f"wrote {found.dtype.name}", meant)
    return np.asarray(found).astype(found.dtype.newbyteorder("=")).reshape(n.shape)


def _is_shape(found: tuple[int, ...], right: tuple[int, ...]) -> bool:
    """Whether two shapes are one but for axes of 1 in front."""
    return found in (right, *(right[cut:] for cut in range(1, 4) if set(right[:cut]) == {1}))
