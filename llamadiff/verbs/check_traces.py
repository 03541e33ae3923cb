"""The CI command: every recorded trace against the engine, or a candidate against each, side by side."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamadiff.engines.run_spec import How
from llamadiff.llamacpp.shipped import shipped_model
from llamadiff.result.comparison import Comparison
from llamadiff.system.errors import UserError
from llamadiff.trace.reader import Trace
from llamadiff.verbs.verbs import check
from llamadiff.verbs.workers import cores, side_by_side

TRACE, ARRAYS = ".safetensors", (".npz", ".npy", ".bin", ".pt", ".pth")


@dataclass(frozen=True)
class Question:
    """One recorded trace to be checked: with which model, which candidate (None: llama.cpp itself), and how."""

    path: Path
    model: Path | None
    candidate: str | None
    how: How
    threads: int = 0


@dataclass(frozen=True)
class Checked:
    """What came of one trace: a comparison, or why there is none."""

    path: Path
    result: Comparison | None
    refused: str = ""


def check_each(
    paths: Sequence[Path], model: Path | None, how: How, candidate: str | None = None, jobs: int = 0
) -> Iterator[Checked]:
    """Check traces, ``jobs`` at a time (0: as many as there are cores), each as soon as it is done, in their order."""
    processes = min(jobs or cores(), len(paths))
    threads = 0 if processes <= 1 else max(1, cores() // processes)
    yield from side_by_side(_check_trace, [Question(path, model, candidate, how, threads) for path in paths], processes)


def _check_trace(asked: Question) -> Checked:
    try:
        trace = Trace.open(asked.path)
        model = asked.model or model_of(asked.path, trace)
        return Checked(asked.path, check(trace, model, asked.how, asked.candidate, asked.threads))
    except UserError as error:
        return Checked(asked.path, None, str(error) if str(asked.path) in str(error) else f"{asked.path}: {error}")


def traces_in(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """These traces and all below these directories; and the arrays there, which are none.

    Each once. Raises UserError for a directory that has no trace.
    """
    traces, arrays = dict[str, Path](), list[Path]()
    for path in paths:
        below = sorted(each for each in path.rglob("*") if "/." not in f"/{each.relative_to(path).as_posix()}")
        own = [each for each in below if each.suffix == TRACE and each.is_file()] if path.is_dir() else [path]
        if not own:
            how = f'llamadiff capture MODEL "PROMPT" -o {path / "NAME"}{TRACE} records one'
            raise UserError(f"{path}: no {TRACE} trace in this directory, or below it; {how}")
        traces |= {os.path.realpath(each): each for each in own}
        arrays += [each for each in below if each.suffix in ARRAYS]
    return [*traces.values()], arrays


def model_of(path: Path, trace: Trace) -> Path:
    """The model file that a trace names: beside the trace, or shipped with the package."""
    name = Path(str(trace.info.model.get("file") or "")).name  # a name alone: a trace must not lead elsewhere
    for folder in (path.parent, shipped_model().parent):
        if name and (folder / name).is_file():
            return folder / name
    raise UserError(
        f"{path}: its model {name or '(unnamed)'} is not beside it; give it with --model FILE (in pytest, model=FILE)"
    )
