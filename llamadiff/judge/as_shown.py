"""What an engine has shown is its limit: a rounding that one span alone would have explains nothing.

A span may err as much as some arithmetic would make it, though no row of it shows that one. Then the engine's other
spans are asked: layers of one model are computed alike. If most of them have that arithmetic too, it is a rounding. If
they are exact, this one is wrong; if there are none, nobody knows.
"""

from __future__ import annotations

from dataclasses import replace

from llamadiff.judge.allowance import unseen
from llamadiff.judge.finding import Finding, Local
from llamadiff.judge.run import Passes
from llamadiff.numerics import tolerances
from llamadiff.numerics.policies import NATIVE

CLEARLY = 0.1  # of an error, that a span which is exact may have
MOSTLY = 0.6  # of the spans that are alike must have it


def as_shown(passes: Passes) -> Passes:
    """The passes, with the spans of the candidate judged by what its other spans show."""
    findings = [_settled(finding, passes) for finding in passes.findings]
    return replace(passes, findings=findings)


def _settled(finding: Finding, passes: Passes) -> Finding:
    local = finding.local.get("candidate")
    if local is None or not local.span or not (local.unclear or local.guess):
        return finding
    if local.guess == NATIVE:  # the baseline has shown that one
        return finding
    spans = [other for other in passes.findings if other is not finding and _is_span(other)]
    same = [each.local["candidate"] for each in spans if _ops(each, passes) == _ops(finding, passes)]
    others = same or [each.local["candidate"] for each in spans]
    alike = [other for other in others if other.verdict == tolerances.NOISE and other.guess in (local.guess, None)]
    if not local.unclear and len(alike) > MOSTLY * len(others):
        return finding
    exact = [other for other in same if _is_exact(other) and other.nmse < CLEARLY * local.nmse]
    is_wrong = len(exact) > MOSTLY * len(same)
    hiding = unseen(local.limit)
    settled = replace(
        local, verdict=tolerances.WRONG if is_wrong else tolerances.UNCHECKED, unclear=not is_wrong, arithmetic=None,
        exact=is_wrong, noise_limit=local.limit, hides=hiding.whole, hides_row=hiding.row, hides_value=hiding.value,
    )  # fmt: skip
    return replace(finding, local={**finding.local, "candidate": settled})


def _is_exact(local: Local) -> bool:
    return local.verdict == tolerances.MATCH and local.arithmetic == "F32"


def _is_span(finding: Finding) -> bool:
    return "candidate" in finding.local and bool(finding.local["candidate"].span)


def _ops(finding: Finding, passes: Passes) -> set[tuple[str, str | None]]:
    """The ops of a layer that a span consists of, with the types of their weights."""
    names = [*finding.local["candidate"].span, finding.tap.name]
    return {(name.rpartition("-")[0], passes.judge.weight_types.get(name)) for name in names if "-" in name}
