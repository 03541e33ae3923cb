"""The rows of a Comparison, one for each tap: what was found, what explains it, and which WRONG one leads."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llamadiff.judge.fact import ROUNDINGS, Fact
from llamadiff.judge.finding import Finding, Local
from llamadiff.judge.verdict import Ruling, of_harmless_way, of_known_cause, of_reading, of_unjudged
from llamadiff.numerics import metrics, tolerances
from llamadiff.result.diagnosis import Diagnosis

_NUMBERED = re.compile(r"(node|leaf)_\d+")  # llama.cpp's names for what has none
SLIGHT = 1e-6  # NMSE of a WRONG tap that is said after others


@dataclass(frozen=True, kw_only=True)
class Row:
    """One tap of the side under test.

    ``local`` is that side's own error; ``baseline_local`` llama.cpp's, where the candidate is another trace.
    ``distance`` is each trace's NMSE against the engine's own free run: who is nearer to exact arithmetic.
    ``explained``: the way of computing that makes it noise, where one was found. ``misrecorded``: computed rightly, and
    written wrongly.
    ``at`` holds each side's value (baseline, candidate, engine's free run) where the local error is largest.
    ``expected_drift`` is what the baseline's arithmetic alone does to an exact engine, and ``ratio_to_noise``
    the drift over it. ``span`` names taps that this one answers for: unrecorded, or misrecorded. ``closeup`` is what a
    page shows of it.
    """

    tap: str
    layer: int | None
    op: str
    shape: tuple[int, ...]
    verdict: str
    weight: str | None = None
    weight_type: str | None = None
    local: Local | None = None
    baseline_local: Local | None = None
    drift: metrics.Difference | None = None
    expected_drift: float | None = None
    ratio_to_noise: float | None = None
    baseline: metrics.Stats | None = None
    candidate: metrics.Stats | None = None
    distance: Mapping[str, float] = field(default_factory=dict)
    at: Mapping[str, float] = field(default_factory=dict)
    explained: str | None = None
    misrecorded: bool = False
    closeup: object = None

    @property
    def rms_ratio(self) -> float | None:
        """The candidate's size over the baseline's."""
        sides = self.baseline, self.candidate
        return sides[1].rms / sides[0].rms if sides[0] and sides[1] and sides[0].rms > 0 else None

    @property
    def span(self) -> tuple[str, ...]:
        return self.local.span if self.local else ()


def blank(tap: str, layer: int | None, op: str, shape: tuple[int, ...]) -> Row:
    """The row of a tap, or a node, of which nothing is known yet; what is found of it replaces its fields."""
    return Row(tap=tap, layer=layer, op=op, shape=shape, verdict=of_unjudged())


def stem(tap: str) -> str:
    """A tap's name without its layer."""
    return tap.rsplit("-", 1)[0]


def kind_of(row: Row) -> str:
    """What a row is called in every layer: its name without the layer; of a node without a name, its op."""
    name = re.sub(rf"(-|_l){row.layer}\b", "", row.tap, count=1) if row.layer is not None else row.tap
    return row.op.lower() if _NUMBERED.match(name) else name


def leading_row(wrong: Sequence[Row], diagnosis: Sequence[Diagnosis]) -> Row | None:
    """Of WRONG taps the first whose op is more than slightly wrong; then a wrong record; then the first."""
    grave = [row for row in wrong if not is_slight(row, diagnosis)]
    computed = [row for row in grave if not row.misrecorded]
    return next(iter([*computed, *grave, *wrong]), None)


def is_slight(row: Row, diagnosis: Sequence[Diagnosis]) -> bool:
    """Whether a WRONG tap is hardly off, for no known reason, and nothing was read back: most likely arithmetic."""
    known = any(row.tap in d.taps for d in diagnosis if d.known and not d.harmless)
    told = any(d.read.get(row.tap, any(d.read.values())) for d in diagnosis if row.tap in d.taps)
    sure = known or told or row.misrecorded or row.local is None or row.local.not_finite > 0
    return not sure and row.local is not None and row.local.nmse <= SLIGHT


def flat(row: Row) -> dict[str, Any]:
    """A row as one line of a table."""
    drift, local = row.drift, row.local
    out: dict[str, Any] = {
        "tap": row.tap, "layer": row.layer, "op": row.op, "weight": row.weight, "weight_type": row.weight_type,
        "verdict": row.verdict,
        "local_nmse": local.nmse if local else None, "arithmetic": local.arithmetic if local else None,
        "limit": local.limit if local else None, "span": " ".join(row.span) or None,
        "drift_nmse": drift.nmse if drift else None, "ratio_to_noise": row.ratio_to_noise,
        "cosine": drift.cosine if drift else None, "max_abs": drift.max_abs if drift else None,
        "mean_drift": drift.mean_drift if drift else None,
    }  # fmt: skip
    for side, stats in (("baseline", row.baseline), ("candidate", row.candidate)):
        for name in ("rms", "mean", "min", "max", "nan", "inf"):
            out[f"{side}_{name}"] = getattr(stats, name) if stats else None
    return out


def rows_of(
    findings: Sequence[Finding],
    names: Mapping[str, str],
    types: Mapping[str, str],
    under_test: str,
    misrecorded: Collection[str] = (),
) -> tuple[Row, ...]:
    """The rows of a study: one for each tap that the side under test recorded."""
    rows = []
    for finding in findings:
        local = finding.local.get(under_test)
        if local is None:
            continue
        name = finding.tap.name
        rows.append(replace(
            unjudged_row(finding), weight=names.get(name), weight_type=types.get(name), verdict=local.verdict,
            local=local, baseline_local=finding.local.get("baseline") if under_test != "baseline" else None,
            candidate=finding.stats.get("candidate" if under_test == "candidate" else "engine"),
            distance=finding.distance, at=finding.at[under_test], misrecorded=name in misrecorded,
            closeup=finding.closeups.get(under_test),
        ))  # fmt: skip
    return tuple(rows)


def unjudged_row(finding: Finding) -> Row:
    """The row of a tap whose drift alone is known."""
    drift, tap, expected = finding.drift, finding.tap, _expected_drift(finding)
    return replace(
        blank(tap.name, tap.layer, tap.kind.op, finding.shape), drift=drift, expected_drift=expected,
        ratio_to_noise=drift.nmse / expected if drift else None, baseline=finding.stats.get("baseline"),
        candidate=finding.stats.get("engine"),
    )  # fmt: skip


def _expected_drift(finding: Finding) -> float:
    """What the baseline's arithmetic alone does to a tap."""
    return (finding.noise or 0.0) + tolerances.F32_DRIFT * ((finding.tap.layer or 0) + 1)


def with_explanations(rows: Sequence[Row], diagnosis: Sequence[Diagnosis]) -> tuple[Row, ...]:
    """The rows, those noise that a harmless way of computing explains, and those wrong that a bug or a reading does.

    Where no bug is known, what was read back of an op comes first among the facts.
    """
    read = {tap: facts for d in diagnosis for tap, facts in d.read.items() if facts}
    rows = [_read_back(row, read.get(row.tap, ())) for row in rows]
    return tuple(_explain_row(row, diagnosis, read.get(row.tap, ())) for row in rows)


def _read_back(row: Row, facts: Sequence[Fact]) -> Row:
    """A row with facts that were read back."""
    if row.local is None or not facts:
        return row
    said = {fact.says for fact in facts}
    more = [fact for fact in row.local.facts if fact.says not in said]
    return replace(row, local=replace(row.local, facts=(*facts, *more)))


def _explain_row(row: Row, diagnosis: Sequence[Diagnosis], read: Sequence[Fact]) -> Row:
    """The row under what explains it: a way of computing that is no mistake, a bug, or what was read back."""
    known = [d for d in diagnosis if d.known and row.tap in d.taps]
    harmless, bug = (next((d for d in known if d.harmless == which), None) for which in (True, False))
    if harmless is not None:
        return _harmless(row, harmless.causes[0].says, harmless.taps[row.tap])
    if bug is not None:
        return _overrule_row(row, of_known_cause(bug.causes[0].says, bug.taps[row.tap]))
    mistake = next((fact for fact in read if fact.kind not in ROUNDINGS), None)
    return _overrule_row(row, of_reading(mistake.says)) if mistake is not None else row


def _harmless(row: Row, way: str, left: float) -> Row:
    """The row as noise, unless there is more to say against it than an error that rounding may leave."""
    opened, not_finite = (row.local.opened, row.local.not_finite) if row.local else (0, 0)
    if not_finite:
        return row
    return replace(_overrule_row(row, of_harmless_way(way, left, opened)), explained=way)


def _overrule_row(row: Row, ruling: Ruling) -> Row:
    """The row under another verdict, which has its reasons besides."""
    if row.local is None:
        return replace(row, verdict=ruling.verdict)
    reasons = (*row.local.reasons, *ruling.reasons)
    local = replace(row.local, verdict=ruling.verdict, unclear=ruling.unclear, reasons=reasons)
    return replace(row, verdict=ruling.verdict, local=local)
