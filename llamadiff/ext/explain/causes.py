"""The causes of what is wrong: known bugs of llama.cpp's graph, or else what ops did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from threadpoolctl import threadpool_limits

from llamadiff.engines.model_file import Runnable
from llamadiff.ext.explain.budget import Budget
from llamadiff.ext.explain.diagnose import diagnose, is_wrong, scene_of
from llamadiff.judge.finding import Finding
from llamadiff.judge.study import Bench, Study
from llamadiff.result.diagnosis import Diagnosis

LEAST = 5e10  # multiply-adds for the diagnosis of a small model
TIMES = 2.0  # as many as the pass over a larger one takes
THOROUGH = 1e11  # where known bugs are replayed through any span


def causes_of(bench: Bench, study: Study) -> tuple[Diagnosis, ...]:
    """Why taps are wrong, wrong records aside, in graph order."""
    how, budget = bench.how, _budget(bench)
    computed = [finding for finding in study.passes.findings if finding.tap.name not in study.assumed.records]

    def found(of: Runnable, findings: Sequence[Finding]) -> tuple[Diagnosis, ...]:
        passes = replace(study.passes, findings=computed)
        scene = scene_of(of, passes, study.under_test, budget, how.progress, how.is_thorough, bench.model)
        return diagnose(scene, findings)

    with threadpool_limits(1, "blas"):
        wrong = any(is_wrong(finding, study.under_test) for finding in computed)
        return found((bench.graph() if wrong else None) or bench.model, computed)


def _budget(bench: Bench) -> Budget:
    """What may be computed to find causes: what a user gave, or else about as much as it took to find what is wrong."""
    if bench.how.explain:
        return Budget.of_seconds(bench.how.explain)
    if bench.how.thorough:
        return Budget(THOROUGH)
    return Budget(max(LEAST, TIMES * bench.model.values * len(bench.baseline.info.tokens)))
