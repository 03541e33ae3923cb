"""Looks at a study: the type of a cache that is not stated, choices of an engine that cancel within the model, and
roundings that no policy has.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from threadpoolctl import threadpool_limits

from llamadiff.engines.model_file import Runnable
from llamadiff.ext.explain.budget import Budget
from llamadiff.ext.explain.conventions.choices import suspected, without
from llamadiff.ext.explain.conventions.reading import read
from llamadiff.ext.explain.diagnose import Scene, scene_of
from llamadiff.judge.run import Passes
from llamadiff.judge.settings import settings_of
from llamadiff.judge.study import Bench, Study
from llamadiff.judge.verdict import is_right
from llamadiff.numerics.policies import CACHES

WORK = 1e10  # multiply-adds to ask whether a rounding is a known bug
CACHE_TYPES = "F16", "BF16", "Q8_0", "Q4_0"  # of a cache that is not stated, the likeliest first
CLEARLY, EXACT = 0.01, 1e-9  # what a cache's own type leaves of a row: of its error, and NMSE
WORSE = 10.0  # how many times the error that a tap had is too much where a choice is undone


def caches(bench: Bench, study: Study) -> Study | None:
    """The type of K and V that was not stated, where attention was not recorded: that which most rows of some tap after
    it have, and no other.
    """
    assumed, before = study.assumed, _rows_after_attention(study)
    assert assumed.trace is not None
    stated = settings_of(assumed.trace)
    if assumed.cache or not any(is_open for _, is_open in before.values()) or {"type_k", "type_v"} & stated.keys():
        return None
    for kind in CACHE_TYPES:
        again = bench.run(replace(assumed, cache=kind))
        left = {name: nmse for name, (nmse, _) in _rows_after_attention(again).items()}
        if any(is_open and left[name] < min(EXACT, CLEARLY * nmse) for name, (nmse, is_open) in before.items()):
            return again
    return None


def _rows_after_attention(study: Study) -> dict[str, tuple[float, bool]]:
    """Of each tap that answers for scores and sums that were not recorded, the median row's NMSE, and whether it is not
    right.
    """
    own = [(f, f.local["candidate"]) for f in study.passes.findings if "candidate" in f.local]
    return {
        f.tap.name: (float(np.median(local.per_token)), not is_right(local.verdict))
        for f, local in own
        if local.span and f.measured["candidate"].evidence.kinds & {*CACHES}
    }


def choices(bench: Bench, study: Study) -> Study | None:
    """The legal choices that explain what looks wrong.

    A choice that is none makes some taps right, and others worse than they were.
    """
    if bench.model.by_graph:
        return None
    assumed, wrong = study.assumed, study.passes.wrong("candidate")
    words = {tap.kind.word for tap in wrong.values()}
    assert assumed.trace is not None
    found = suspected(bench.model, bench.baseline, assumed.trace, words)
    for some in (found, *([choice] for choice in found if len(found) > 1)):
        if some:
            plain = without(some, bench.model, assumed.trace)
            again = bench.run(replace(assumed, trace=plain, choices=(*assumed.choices, *some)))
            if again.passes.wrong("candidate").keys() < wrong.keys() and not is_worse(again.passes, study.passes):
                return again
    return None


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
