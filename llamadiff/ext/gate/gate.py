"""The gate on logits: how far they may be apart over all positions, by what rounding does to them or by given limits.

Verdicts are about operations. A gate is about what comes of them: it holds the mean and the 99th percentile of
KL(baseline || candidate) to limits. Where none is given, the limit is what rounding explains. Each side's rounding is
measured: the engine computes all tokens once without rounding, once with llama.cpp's arithmetic and once with the
candidate's. Two roundings that know nothing of one another add up in squares, and KL is a square: so the limit is the
sum of both, times what chance does to the ratio of two sums of so many squares, one time in a thousand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from llamadiff.engines.model_file import Runnable
from llamadiff.engines.run_spec import Gate
from llamadiff.ext.gate.positions import divergences, over_positions, percentile_99
from llamadiff.judge.finding import Finding
from llamadiff.judge.lanes import Source
from llamadiff.judge.preflight.checks import Check
from llamadiff.judge.study import Bench, Study
from llamadiff.judge.verdict import WRONG, Reason, Ruling, is_right, of_bounds, of_unjudged
from llamadiff.numerics import tolerances
from llamadiff.numerics.policies import F32, NATIVE, POLICIES
from llamadiff.numerics.rounding_tap import Carrier
from llamadiff.result.comparison import Comparison
from llamadiff.result.logits import Positions, logit_rows
from llamadiff.trace.metadata import Info
from llamadiff.trace.taps import LOGITS

CHECK = "logits"
SELDOM = 3.09  # standard deviations that a normal variable exceeds one time in a thousand
TAIL = 100  # positions of which one lies above the 99th percentile


@dataclass(frozen=True)
class Bound:
    """One statistic: its value, its limit (None: nothing is known to hold it to), and whether a user gave that."""

    name: str
    value: float
    limit: float | None
    given: bool

    @property
    def reason(self) -> Reason:
        """What the verdict says of it."""
        return Reason(f"KL over all positions, {self.name}", self.value, self.limit, self._whose)

    @property
    def _whose(self) -> str:
        return "the limit" if self.given else "what rounding explains"

    def __str__(self) -> str:
        if self.limit is None:
            return f"{self.name} {self.value:.1e}"
        if self.reason.is_kept:
            return f"{self.name} {self.value:.1e} (no more than {self._whose}, {self.limit:.1e})"
        return f"{self.name} {self.value:.1e}, more than {self._whose}, {self.limit:.1e}"


def hold_to_gate(result: Comparison, bench: Bench, study: Study, gate: Gate) -> Comparison:
    """The result, held to the limits of a gate, where both sides have the logits of all positions."""
    baseline, candidate, engine = bench.baseline, study.assumed.trace, study.passes.logits
    if LOGITS not in baseline or (candidate is not None and (LOGITS not in candidate or LOGITS in candidate.known)):
        return not_held(result, gate)
    own = logit_rows(engine if candidate is None else candidate[LOGITS])
    positions = over_positions(logit_rows(baseline[LOGITS])[: len(own)], own)
    if positions is None:
        return not_held(result, gate)
    policy = F32 if candidate is None else arithmetic_of(study.passes.findings, study.under_test)
    known, own_side = study.passes.judge.sources["baseline"], study.passes.judge.sources[study.under_test]
    rounding = rounding_of(bench.model, baseline.info.head(len(own)), known, own_side, policy)
    return held_to(result, positions, bounds_of(positions, gate, rounding))


def held_to(result: Comparison, positions: Positions, bounds: Sequence[Bound]) -> Comparison:
    """A comparison with its gate: beyond a given limit it is WRONG, beyond what rounding explains UNCHECKED."""
    broken = [bound for bound in bounds if not bound.reason.is_kept]
    ruling = of_bounds((bound.reason, bound.given) for bound in bounds)
    check = Check(CHECK, ruling.verdict, f"over {positions.count} positions the KL has {_listed(broken or bounds)}")
    result = replace(result, positions=positions, preflight=(*result.preflight, check))
    if not broken or result.verdict == WRONG:
        return result
    return result.overrule(ruling, result.said.with_headline(f"the logits do not pass the gate: {check.found}"))


def not_held(result: Comparison, gate: Gate) -> Comparison:
    """A comparison whose logits are not there: UNCHECKED, where somebody gave a limit for them."""
    if gate.mean is None and gate.p99 is None:
        return result
    found = "one side does not have the logits of all positions (a sketch has none)"
    check = Check(CHECK, of_unjudged(), found)
    result = replace(result, preflight=(*result.preflight, check))
    if result.verdict == WRONG:
        return result
    ruling = Ruling(check.verdict, (Reason("positions with logits", 0, None, found),))
    return result.overrule(ruling, result.said.with_headline(f"the logits cannot be held to their limits: {found}"))


def _listed(bounds: Sequence[Bound]) -> str:
    return ", ".join(map(str, bounds))


def bounds_of(positions: Positions, gate: Gate, rounding: Rounded | None) -> tuple[Bound, Bound]:
    """The mean and the 99th percentile, each with its limit."""
    mean = rounding.mean if rounding is not None else None
    tail = rounding.tail if rounding is not None else None
    return (
        Bound("mean", positions.kl_mean, mean if gate.mean is None else gate.mean, gate.mean is not None),
        Bound("99th percentile", positions.kl_p99, tail if gate.p99 is None else gate.p99, gate.p99 is not None),
    )


@dataclass(frozen=True)
class Rounded:
    """What rounding explains of the mean and of the 99th percentile; None where so few positions say nothing."""

    mean: float | None
    tail: float | None


def rounding_of(model: Runnable, info: Info, baseline: Source, own: Source, policy: str | None) -> Rounded | None:
    """What llama.cpp's rounding and that of ``policy``, which ``own`` has, do to the logits of a run.

    None where that cannot be measured: where the candidate's arithmetic is not known, or the engine is llama.cpp's
    graph, which goes through recorded tokens alone.
    """
    if policy is None or model.by_graph:
        return None
    ways: list[tuple[str, Mapping[str, str]]] = [(F32, {}), (NATIVE, baseline.stored), (policy, own.stored)]
    made = model.engine.forward(info.tokens, info.positions, tap=Carrier(ways, edges=info.edges))
    exact, *rounded = (logit_rows(np.asarray(one)) for one in made)
    least = tolerances.F32_DRIFT * float(np.mean(np.square(exact, dtype=np.float64))) / 2  # of float32 itself
    parts = [divergences(logits, exact) + least for logits in rounded]
    n = len(exact)
    return Rounded(
        _times(chance(n), sum(float(part.mean()) for part in parts)),
        _times(chance(n // TAIL), sum(percentile_99(part) for part in parts)),
    )


def _times(factor: float, size: float) -> float | None:
    return factor * size if math.isfinite(factor * size) else None


def chance(n: int) -> float:
    """The ratio of two sums of ``n`` squares each that chance exceeds one time in a thousand; infinite for a few.

    The quantile of the F distribution with n and n degrees of freedom, by Paulson's approximation (1942): a little too
    large where n is small.
    """
    spread = 2 / (9 * n) if n else 1.0
    centre, wide = (1 - spread) ** 2, SELDOM**2 * spread
    if n < 1 or centre <= wide:
        return math.inf
    root = (centre + math.sqrt(centre**2 - (centre - wide) ** 2)) / (centre - wide)
    return root**3


def arithmetic_of(findings: Sequence[Finding], side: str) -> str | None:
    """The one policy that fits every tap of a side that is right; None where there is none, or no tap is right."""
    fitting = list(_fitting(findings, side))
    common = frozenset.intersection(*fitting) if fitting else frozenset()
    return next((policy for policy in POLICIES if policy in common), None)


def _fitting(findings: Sequence[Finding], side: str) -> Iterator[frozenset[str]]:
    """The policies that fit each tap that is right, in all phases; where it is so up to noise there may be none."""
    for finding in findings:
        local, phases = finding.local.get(side), finding.fitting.get(side, ())
        if local is not None and is_right(local.verdict) and phases:
            yield frozenset.intersection(*phases)
