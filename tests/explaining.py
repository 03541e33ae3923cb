"""Injected bugs judged by the reference engine and explained by llama.cpp's graph; and what is not named so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from llamaref import Engine
from proof.injected import INJECTIONS
from proof.injected.base import TOKENS, Injection
from proof.injected.runs import record_faulty

from llamadiff.candidates.reference import record
from llamadiff.engines.reference_model import Model
from llamadiff.engines.run_spec import How
from llamadiff.result.comparison import Comparison
from llamadiff.trace.reader import Trace
from llamadiff.verbs import judging

FLOOR = 1e-9  # what float32 leaves of an error that is explained
Case = tuple[Injection, str, str]
CASES: tuple[Case, ...] = tuple(
    (injection, model, kind) for injection in INJECTIONS for model in injection.models for kind in injection.kinds
)


def name_of(case: Case) -> str:
    injection, model, kind = case
    return f"{injection.name}-{model}-{kind}"


INJECTED = [pytest.param(*case, id=name_of(case)) for case in CASES]


class Explained:
    """Comparisons of faulty runs of small models with right ones; what they share is made once."""

    def __init__(self, small_model: Callable[[str, str], Path]) -> None:
        self.small_model = small_model
        self.right = cache(self._right)
        self.graph = cache(self._graph)

    def _right(self, model: str, kind: str) -> Trace:
        return record(Engine(self.small_model(model, kind)), TOKENS, "engine")

    def _graph(self, model: str, kind: str) -> Any:
        from llamadiff.ext.graph.model import graph_of_run  # a slice: others here need it not

        return graph_of_run(Model(self.small_model(model, kind)), self.right(model, kind))

    def compared(self, case: Case) -> Comparison:
        """The comparison of a faulty run with the right one."""
        injection, model, kind = case
        path = self.small_model(model, kind)
        faulty = record_faulty(injection, path, TOKENS, len(TOKENS) - injection.decode)
        return self.judged(model, kind, faulty, injection.decode)

    def judged(self, model: str, kind: str, faulty: Trace, decode: int = 0, explain: float = 0.0) -> Comparison:
        """A trace against the right one, the last tokens of both as decode steps."""
        sides = (_split(trace, decode) for trace in (self.right(model, kind), faulty))
        graph = partial(self.graph, model, kind)
        return judging.judge(Model(self.small_model(model, kind)), *sides, How(explain=explain), graph=graph)


def _split(trace: Trace, decode: int) -> Trace:
    info = replace(trace.info, n_prefill=len(TOKENS) - decode)
    return Trace(info, {name: trace[name] for name in trace}, trace.dtypes)
