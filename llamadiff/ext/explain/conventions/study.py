"""Looks at a study: arithmetics that only ends of spans show, choices of an engine that cancel within the model, and
roundings that no policy has.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from llamadiff.engines.model_file import Runnable
from llamadiff.ext.explain.budget import Budget
from llamadiff.ext.explain.conventions.choices import suspected, without
from llamadiff.ext.explain.conventions.ends import way_of_ends
from llamadiff.ext.explain.conventions.reading import read
from llamadiff.ext.explain.diagnose import Scene, scene_of
from llamadiff.judge.run import Passes
from llamadiff.judge.settings import settings_of
from llamadiff.judge.study import Bench, Study
from llamadiff.numerics.arithmetic import COMPUTES
from llamadiff.numerics.policies import F32
from llamadiff.numerics.rounding_tap import Carrier
from llamadiff.trace.reader import Trace

Array = NDArray[Any]

WORK = 1e10  # multiply-adds to ask whether a rounding is a known bug
WORSE = 10.0  # how many times the error that a tap had is too much where a choice is undone


def ends(bench: Bench, study: Study) -> Study | None:
    """What activations are rounded to, and the type of K and V, where neither is stated nor was recorded by itself."""
    assumed, source = study.assumed, study.passes.judge.sources["candidate"]
    assert assumed.trace is not None
    if assumed.cache or assumed.compute or source.precision != F32:
        return None
    is_stated = bool({"type_k", "type_v"} & settings_of(assumed.trace).keys())
    way = way_of_ends(bench.model, source, study.passes.findings, is_stated)
    if way is None:
        return None
    policy, kept = way
    return bench.run(replace(assumed, cache=kept, compute=policy if policy in COMPUTES else ""))


def choices(bench: Bench, study: Study) -> Study | None:
    """The legal choices that explain what looks wrong.

    A choice that is none makes some taps right, and others worse than they were.
    """
    if bench.model.by_graph:
        return None
    assumed, wrong = study.assumed, study.passes.wrong("candidate")
    words = {tap.kind.word for tap in wrong.values()}
    assert assumed.trace is not None
    right = bench.baseline if bench.baseline.sketch is None else _first_layer(bench)
    found = suspected(bench.model, right, assumed.trace, words)
    for some in (found, *([choice] for choice in found if len(found) > 1)):
        if some:
            plain = without(some, bench.model, assumed.trace)
            again = bench.run(replace(assumed, trace=plain, choices=(*assumed.choices, *some)))
            if again.passes.wrong("candidate").keys() < wrong.keys() and not is_worse(again.passes, study.passes):
                return again
    return None


class _Recorder(Carrier):
    """Keeps what the engine computes in float32."""

    def __init__(self) -> None:
        super().__init__([(F32, {})])
        self.arrays: dict[str, Array] = {}

    def __call__(self, name: str, x: Array) -> Array:
        self.arrays[name] = x[0].copy()
        return x


def _first_layer(bench: Bench) -> Trace:
    """What the engine computes up to the end of the first layer: for a baseline that keeps no tensors."""
    info, recorder = bench.baseline.info, _Recorder()
    step = bench.model.engine.step(info.tokens, info.positions, tap=recorder)
    begin, layer = bench.model.parts(info.tokens)[:2]
    layer.run(begin.run(None, step), step)
    return Trace(info, recorder.arrays, dict.fromkeys(recorder.arrays, "F32"))


def is_worse(again: Passes, before: Passes) -> bool:
    """Whether a tap that is wrong is much further off than it was."""
    errors = {f.tap.name: f.local["candidate"].nmse for f in before.findings if "candidate" in f.local}
    wrong = again.wrong("candidate")
    return any(
        finding.local["candidate"].nmse > WORSE * errors[finding.tap.name]
        for finding in again.findings
        if finding.tap.name in wrong
    )


def _scene(bench: Bench, of: Runnable | None, study: Study) -> Scene | None:
    """What known bugs are looked for with in a model or a graph."""
    return None if of is None else scene_of(of, study.passes, "candidate", Budget(WORK), bench.how.progress)


def roundings(bench: Bench, study: Study) -> Study | None:
    """The roundings that most taps of a kind show."""
    if study.assumed.roundings or bench.model.by_graph:
        return None
    with threadpool_limits(1, "blas"):
        scene = _scene(bench, bench.model, study)
        assert scene is not None
        own, found = read(scene, study.passes.findings, lambda: _scene(bench, bench.graph(), study))
    return bench.run(replace(study.assumed, own=own, roundings=found)) if found else None
