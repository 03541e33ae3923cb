"""Injected bugs explained by llama.cpp's graph alone, where the reference engine judges; and what is not named so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from injected import INJECTIONS
from injected.base import TOKENS, Injection
from llamaref import Engine

from llamadiff.candidates.reference import record
from llamadiff.comparison import judging
from llamadiff.comparison.result import Comparison
from llamadiff.engines.graph_model import graph_of_run
from llamadiff.engines.reference_model import Model
from llamadiff.engines.run_spec import How
from llamadiff.trace.reader import Trace

FLOOR = 1e-9  # what float32 leaves of an error that is explained
Case = tuple[Injection, str, str]
CASES: tuple[Case, ...] = tuple(
    (injection, model, kind) for injection in INJECTIONS for model in injection.models for kind in injection.kinds
)


def name_of(case: Case) -> str:
    injection, model, kind = case
    return f"{injection.name}-{model}-{kind}"


@contextmanager
def by_the_graph() -> Iterator[None]:
    """The graph is asked first, and nothing else."""
    causes = judging._causes

    def graphs_causes(model: Any, study: Any, seconds: float, how: How, graph: Any = None) -> Any:
        return causes(graph() if graph is not None else model, study, seconds, how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judging, "_causes", graphs_causes)
        yield


class Explained:
    """Comparisons of faulty runs of small models with right ones; what they share is made once."""

    def __init__(self, small_model: Callable[[str, str], Path], by_taps: bool = False) -> None:
        self.small_model, self.by_taps = small_model, by_taps
        self.right = cache(self._right)
        self.graph = cache(self._graph)

    def _right(self, model: str, kind: str) -> Trace:
        return record(Engine(self.small_model(model, kind)), TOKENS, "engine")

    def _graph(self, model: str, kind: str) -> Any:
        return graph_of_run(Model(self.small_model(model, kind)), self.right(model, kind).info)

    def compared(self, case: Case) -> Comparison:
        """The comparison of a faulty run with the right one."""
        injection, model, kind = case
        path = self.small_model(model, kind)
        faulty = record(injection.build(path), TOKENS, "my engine")
        return self.judged(model, kind, faulty, injection.decode)

    def judged(self, model: str, kind: str, faulty: Trace, decode: int = 0, explain: float = 0.0) -> Comparison:
        """A trace against the right one, the last tokens of both as decode steps."""
        sides = (_split(trace, decode) for trace in (self.right(model, kind), faulty))
        graph = None if self.by_taps else lambda: self.graph(model, kind)
        with by_the_graph():
            return judging.judge(Model(self.small_model(model, kind)), *sides, How(explain=explain), graph=graph)


def _split(trace: Trace, decode: int) -> Trace:
    info = replace(trace.info, n_prefill=len(TOKENS) - decode)
    return Trace(info, {name: trace[name] for name in trace}, trace.dtypes)


def trouble(injection: Injection, result: Comparison) -> str:
    """What is not as it was injected, in words; empty if all is."""
    if injection.choice:
        return "" if result.verdict == "match" else result.verdict
    if injection.harmless:
        noise = [row for row in result.rows if row.verdict == "noise"]
        said = {row.explained or row.local.arithmetic for row in noise if row.local is not None}
        return "" if result.verdict == "noise" and said == {injection.says} else f"{result.verdict}: {said}"
    return _of_a_bug(injection, result)


def _of_a_bug(injection: Injection, result: Comparison) -> str:
    if result.first_divergence is None or not result.diagnosis:
        return "no diagnosis"
    found = result.diagnosis[0]
    causes = {cause.name for cause in found.causes}
    if found.tap != result.first_divergence.tap or injection.cause not in causes:
        nearest = [f"{cause.name} {cause.nmse:.1e}" for cause in found.nearest]
        return f"{found.tap}: {causes or 'unknown'}, nearest {nearest}"
    if found.nmse > FLOOR:
        return f"{found.tap}: an NMSE of {found.nmse:.1e} is left"
    unknown = [other.tap for other in result.diagnosis if not other.causes]
    return f"unknown at {unknown}" if unknown else ""
