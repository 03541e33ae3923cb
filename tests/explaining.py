"""Injected bugs judged by the reference engine and explained by llama.cpp's graph; and what is not named so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty import BUGS
from llamaref import Engine
from proof.injected import INJECTIONS
from proof.injected.base import TOKENS, Injection
from proof.injected.runs import record_faulty
from several import CLASSES, IN_SPANS, MATHS, ON_ONE_OP, PAIRS, faulty

from llamadiff.candidates.reference import record
from llamadiff.engines.reference_model import Model
from llamadiff.engines.run_spec import How
from llamadiff.result.comparison import Comparison
from llamadiff.trace.reader import Trace
from llamadiff.verbs import judging

FLOOR = 1e-9  # what float32 leaves of an error that is explained
Case = tuple[Injection, str, str]
SPANS = {"layers": ("embd", "l_out", "result_output"), "logits": ("result_output",)}
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


@dataclass(frozen=True)
class Trial:
    """A faulty run whose causes are known: in which model, what is kept of it, in how many bits, and what it is of."""

    name: str
    causes: frozenset[str]
    model: str
    kind: str
    run: Callable[[Path], Trace]
    kept: tuple[str, ...] = ()
    bits: str = "F32"
    decode: int = 0

    def trouble(self, explained: Explained) -> str:
        """What is not named as it was injected, in words; empty if all is."""
        trace = self.run(explained.small_model(self.model, self.kind))
        names = [name for name in trace if not self.kept or name.startswith(self.kept)]
        arrays = {name: np.asarray(trace[name], np.float16 if self.bits == "F16" else None) for name in names}
        given = Trace(trace.info, arrays, dict.fromkeys(names, self.bits))
        result = explained.judged(self.model, self.kind, given, self.decode, 600.0 * (self.kept == SPANS["logits"]))
        named = {name for d in result.diagnosis for cause in d.causes for name in cause.name.split(" + ")}
        nearest = [f"{cause.name} {cause.nmse:.1e}" for d in result.diagnosis[:1] for cause in d.nearest]
        return "" if named >= self.causes else f"{named or 'unknown'}, nearest {nearest}"


def _copy(build: Callable[[Path], Engine], path: Path) -> Trace:
    """The run of a copy of the reference engine."""
    return record(build(path), TOKENS, "my engine")


def spans() -> Iterator[Trial]:
    """Bugs in the midst of what was not recorded: a layer, or the whole model."""
    for bug in BUGS:
        for what, kept in SPANS.items():
            if bug.name != "epsilon x10":
                causes, run = frozenset({IN_SPANS[bug.name]}), partial(_copy, bug.build)
                yield Trial(f"{bug.name}, {what} alone", causes, bug.arch, "F16", run, kept)


def pairs() -> Iterator[Trial]:
    """Two bugs at once, in different ops and on one."""
    for one, other in PAIRS:
        build = partial(faulty, classes=(CLASSES[other],), maths=MATHS[one])
        yield Trial(f"{one} + {other}", frozenset({one, other}), "llama", "Q8_0", partial(_copy, build))
    for name, maths in ON_ONE_OP.items():
        build = partial(faulty, classes=(), maths=maths)
        yield Trial(f"{name} on one op", frozenset(name.split(" + ")), "llama", "F16", partial(_copy, build))


def dumps() -> Iterator[Trial]:
    """Dumps in 16 bits: each injected mistake in its first model."""
    for injection in INJECTIONS:
        if not (injection.harmless or injection.choice):
            yield Trial(
                f"{injection.name}, in float16", frozenset({injection.cause}), injection.models[0], injection.kinds[0],
                partial(record_faulty, injection), (), "F16", injection.decode,
            )  # fmt: skip


TRIALS = {"spans": spans, "pairs": pairs, "dumps": dumps}
