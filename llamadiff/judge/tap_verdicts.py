"""Findings with their verdicts: what an engine has shown is gathered over all of its taps, and each is judged by it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from llamadiff.judge.evidence import Evidence, assumed_of
from llamadiff.judge.finding import Finding, Local
from llamadiff.judge.lanes import Source
from llamadiff.judge.measurement import TapMeasurement
from llamadiff.judge.settings import computes_in
from llamadiff.judge.verdict import WRONG, Ruling, after_wrong_partial, of_tap


def judge_taps(findings: Sequence[Finding], sources: Mapping[str, Source]) -> list[Finding]:
    """The findings, each source's taps judged by what all of them show."""
    shown = {}
    for name, source in sources.items():
        assumed = assumed_of(bool(source.reading), name == "baseline", computes_in(source.trace))
        shown[name] = Evidence.of(_measured_of(findings, name), assumed)
    partial, wrong = sources["candidate"].trace.known if "candidate" in sources else {}, set[str]()
    out = []
    for finding in findings:
        local = {name: local_of(m, of_tap(m, shown[name])) for name, m in finding.measured.items()}
        own = local.get("candidate")
        if own is not None and own.verdict == WRONG:
            before = next((name for name in own.span if name in wrong), None)
            if before is not None:
                ruling = after_wrong_partial(own.verdict, before)
                local["candidate"] = replace(
                    own, verdict=ruling.verdict, facts=(), reasons=(*own.reasons, *ruling.reasons)
                )
            elif finding.tap.name in partial:
                wrong.add(finding.tap.name)
        out.append(replace(finding, local=local))
    return out


def _measured_of(findings: Sequence[Finding], name: str) -> Iterator[TapMeasurement]:
    return (finding.measured[name] for finding in findings if name in finding.measured)


def local_of(m: TapMeasurement, ruling: Ruling) -> Local:
    """A tap's own error with its verdict."""
    allowance = ruling.allowance
    assert allowance is not None
    is_wrong = ruling.verdict == WRONG
    slack = m.printed.slack if m.printed is not None else 0.0
    return Local(
        nmse=m.nmse, arithmetic=None if is_wrong or ruling.unclear else m.label, limit=m.limit,
        noise_limit=allowance.whole, verdict=ruling.verdict, reasons=ruling.reasons, unclear=ruling.unclear,
        exact=ruling.exact, facts=m.facts if is_wrong else (), least=m.least, span=m.span, sketched=m.sketched,
        hides=max(allowance.whole, slack), hides_row=allowance.row, hides_value=allowance.value,
        token=m.token, index=m.index, expected=m.expected, recorded=m.recorded, per_token=m.per_token,
        not_finite=m.not_finite, opened=m.opened, open_tokens=m.open_tokens,
    )  # fmt: skip
