"""Runs of this engine, right or with a mistake, judged and explained through llama.cpp's graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from models.small import write_model
from threadpoolctl import threadpool_limits

from llamadiff.engines.capture_request import text_request
from llamadiff.engines.model_file import ModelFile
from llamadiff.engines.run_spec import How, Run
from llamadiff.ext.graph.model import GraphModel, by_its_graph
from llamadiff.result.comparison import Comparison
from llamadiff.result.diagnosis import Diagnosis
from llamadiff.trace.metadata import Info
from llamadiff.trace.reader import Trace
from llamadiff.verbs.judging import judge
from proof.injected import IN_OTHERS
from proof.injected.base import TOKENS, Injection
from proof.strangers.arithmetic import BY_NAME
from proof.strangers.engine import NONE, Array, Engine
from proof.strangers.model import File, read
from proof.strangers.recording import without_cache
from proof.unseen.architectures import MODELS

SHOWS = 1e-9  # the NMSE that nobody takes for rounding


@dataclass(frozen=True)
class Case:
    """A mistake in an architecture; ``shows``: from the first tap that it changes to the first that it changes much."""

    arch: str
    bug: Injection
    shows: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What was said of a case."""

    case: Case
    comparison: Comparison

    def is_at_the_tap(self) -> bool:
        """Whether the first divergence is where the mistake was made."""
        found = self.comparison.first_divergence
        return found is not None and found.tap in self.case.shows

    def is_named(self) -> bool:
        """Whether the first explanation has the mistake's name, if among others that the values cannot tell apart."""
        found = self.comparison.diagnosis
        return bool(found) and bool(_names(found[0]) & self.case.bug.others)

    def is_false(self) -> bool:
        """Whether an explanation, of any tap, is other than what was put in."""
        return any(d.causes and not _names(d) & self.case.bug.others for d in self.comparison.diagnosis)

    @property
    def trouble(self) -> str:
        """What is not as it was injected, and what was said; empty if all is."""
        if self.is_at_the_tap() and self.is_named() and not self.is_false():
            return ""
        first = self.comparison.first_divergence
        told = [f"{d.tap}: {'|'.join(sorted(_names(d))) or 'unknown'}" for d in self.comparison.diagnosis]
        where = "" if self.is_at_the_tap() else f"found at {first.tap if first else None}; "
        return f"{where}{', '.join(told) or 'no diagnosis'}"


def _names(found: Diagnosis) -> set[str]:
    return {cause.name for cause in found.causes}


class Models:
    """Small models of every architecture in a folder, with llama.cpp's runs of them; each made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opened, self.file, self.right = cache(self._opened), cache(self._file), cache(self._right)

    def path(self, arch: str) -> Path:
        path = self.folder / f"{arch}.F16.gguf"
        return path if path.exists() else write_model(path, kind="F16", **MODELS[arch])

    def _file(self, arch: str) -> File:
        return read(self.path(arch))

    def _opened(self, arch: str) -> tuple[GraphModel, Trace]:
        """The graph, and what llama.cpp computes."""
        path = self.path(arch)
        request = text_request(ModelFile(path), Run(tokens=TOKENS), self.folder / f"{arch}.safetensors")
        return by_its_graph(path, request)

    def taps(self, arch: str, bug: Injection | None = None, decode: int = 0) -> dict[str, Array]:
        """What an engine records, under the names that the graph knows."""
        with threadpool_limits(1, "blas"), np.errstate(all="ignore"):
            made = Engine(self.file(arch), BY_NAME["float32"], bug or NONE, inner=True)
            rows = without_cache(made.run(TOKENS, len(TOKENS) - decode))
        model, baseline = self.opened(arch)
        return {tap.name: rows[tap.name].reshape(baseline[tap.name].shape) for tap in model.taps if tap.name in rows}

    def _right(self, arch: str, decode: int) -> dict[str, Array]:
        return self.taps(arch, None, decode)

    def case(self, arch: str, bug: Injection) -> Case | None:
        """Where a mistake shows first; None where it changes nothing."""
        right, wrong = self.right(arch, bug.decode), self.taps(arch, bug, bug.decode)
        changed = [name for name, x in right.items() if name in wrong and _error(x, wrong[name])]
        clearly = [name for name in changed if _error(right[name], wrong[name]) > SHOWS]
        return Case(arch, bug, tuple(changed[: changed.index(clearly[0]) + 1])) if clearly else None

    def cases(self, arch: str) -> Iterator[Case]:
        """Every mistake that shows in an architecture."""
        found = (self.case(arch, bug) for bug in IN_OTHERS.values() if arch not in bug.unlike)
        yield from (case for case in found if case is not None)

    def judged(self, arch: str, bug: Injection | None = None, decode: int = 0) -> Comparison:
        """A run against llama.cpp's, the last tokens of both as decode steps."""
        model, baseline = self.opened(arch)
        sides = [_split(baseline, decode), _trace(self.taps(arch, bug, decode), decode)]
        return judge(model, *sides, How())

    def outcome(self, case: Case) -> Outcome:
        return Outcome(case, self.judged(case.arch, case.bug, case.bug.decode))


def _error(right: Array, wrong: Array) -> float:
    """NMSE; without end where other values are finite."""
    right, wrong = np.asarray(right, np.float64), np.asarray(wrong, np.float64).reshape(right.shape)
    there = np.isfinite(right)
    if (there != np.isfinite(wrong)).any():
        return np.inf
    right, wrong = right[there], wrong[there]
    return float(((right - wrong) ** 2).sum() / max((right**2).sum(), 1e-300))


def _trace(taps: dict[str, Array], decode: int) -> Trace:
    n = len(TOKENS)
    info = Info(tokens=TOKENS, positions=tuple(range(n)), n_prefill=n - decode, producer={"name": "mine"})
    kinds = {name: "I32" if x.dtype.kind == "i" else "F32" for name, x in taps.items()}
    values = {name: np.asarray(x, np.int32 if kinds[name] == "I32" else np.float32) for name, x in taps.items()}
    return Trace(info, values, kinds)


def _split(trace: Trace, decode: int) -> Trace:
    info = replace(trace.info, n_prefill=len(TOKENS) - decode)
    return Trace(info, {name: trace[name] for name in trace}, trace.dtypes)
