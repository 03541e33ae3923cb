"""Verdicts in view of other taps: what these show is the engine's, or wrong in the record alone, or wrong before.

A rounding that one span alone would have explains nothing. A span may err as much as some arithmetic would make it,
though no row of it shows that one. Then the engine's other spans are asked: layers of one model are computed alike. If
most of them have that arithmetic too, it is a rounding. If they are exact, this one is wrong; if there are none, nobody
knows.

An op's result is judged on the inputs that were recorded. Where one of these was written wrongly, whatever reads it
seems wrong as well. Without that tap the same ops are right: then it is the record that is wrong, not the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from llamadiff.engines.model_file import Runnable
from llamadiff.engines.run_spec import How
from llamadiff.judge.allowance import unseen
from llamadiff.judge.finding import Finding, Local
from llamadiff.judge.run import Passes, run_passes
from llamadiff.numerics import tolerances
from llamadiff.numerics.policies import NATIVE
from llamadiff.trace.reader import Trace

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


def misrecorded(
    model: Runnable, baseline: Trace, candidate: Trace, passes: Passes, how: How
) -> tuple[tuple[str, ...], Passes]:
    """The taps of a candidate that were recorded wrongly, and what passes find as if these had not been recorded."""
    readers = _readers(model, passes)
    suspects, known = _suspects(passes, readers), passes.judge.sources["candidate"]
    while suspects:
        rest = candidate.lacking(suspects)
        found = run_passes(model, baseline, rest, how, None, known.reading, known.draws)
        sure = tuple(name for name in suspects if _is_right_without(name, found, readers[name]))
        if sure == suspects:
            return suspects, _together(passes, found, suspects)
        suspects = sure
    return (), passes


def _readers(model: Runnable, passes: Passes) -> dict[str, list[str]]:
    """Which judged taps are computed from which."""
    found: dict[str, list[str]] = {}
    for finding in passes.findings:
        for name in model.inputs(finding.tap) if "candidate" in finding.local else ():
            found.setdefault(name, []).append(finding.tap.name)
    return found


def _suspects(passes: Passes, readers: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The WRONG taps that have a WRONG reader."""
    wrong = passes.wrong("candidate")
    return tuple(name for name in wrong if any(reader in wrong for reader in readers.get(name, ())))


def _is_right_without(name: str, found: Passes, readers: Sequence[str]) -> bool:
    """Whether the taps that answer for one that is left out are right; for a cache, which may be, its readers."""
    judged = {f.tap.name: f.local["candidate"] for f in found.findings if "candidate" in f.local}
    answers = [tap for tap, local in judged.items() if name in local.span] or readers
    verdicts = [judged[tap].verdict for tap in answers if tap in judged]
    return bool(verdicts) and all(verdict in (tolerances.MATCH, tolerances.NOISE) for verdict in verdicts)


def _together(passes: Passes, found: Passes, left_out: tuple[str, ...]) -> Passes:
    """What was found without some taps, and what had been found of these."""
    first = {finding.tap.name: finding for finding in passes.findings}
    findings = [first[f.tap.name] if f.tap.name in left_out else f for f in found.findings]
    return replace(found, findings=findings)


def without_followers(passes: Passes) -> Passes:
    """The passes with partial taps unjudged that are computed from a wrong one: values that are not all there cannot
    stand in for what the engine computes, so that an error goes on through them.
    """
    trace, wrong, findings = passes.judge.sources["candidate"].trace, set[str](), []
    for finding in passes.findings:
        local = finding.local.get("candidate")
        follows = local is not None and not wrong.isdisjoint(local.span)
        if local is not None and local.verdict == tolerances.WRONG and follows:
            local = replace(local, verdict=tolerances.UNCHECKED, facts=())
            findings.append(replace(finding, local={**finding.local, "candidate": local}))
            continue
        if local is not None and local.verdict == tolerances.WRONG and finding.tap.name in trace.known:
            wrong.add(finding.tap.name)
        findings.append(finding)
    return replace(passes, findings=findings)
