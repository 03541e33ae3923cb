"""Comparison -> the report's JSON object (schema llamadiff.report/1, held to report.schema.json by a test)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from statistics import median
from typing import Any

from llamadiff import __version__
from llamadiff.comparison import diagnosis_text
from llamadiff.comparison.blame import headline
from llamadiff.comparison.logits import Logits, TopToken
from llamadiff.comparison.provenance import provenance
from llamadiff.comparison.repairs import repairs_of
from llamadiff.comparison.result import Comparison
from llamadiff.comparison.rows import Row
from llamadiff.diagnose.diagnosis import UNKNOWN, Cause, Diagnosis
from llamadiff.judge.finding import Local
from llamadiff.numerics import tolerances
from llamadiff.report.formats import About

SCHEMA = "llamadiff.report/1"
NOBODY = About()
_LISTS = ("per_token", "open_tokens")


def to_json(comparison: Comparison, about: About = NOBODY) -> str:
    """The report as JSON text, a line for each entry and for each tap; a number that is not finite is null.

    Lists per token are summed up: how many tokens, the median and the largest error, and where that is.
    """
    return _entries(to_object(comparison, about))


def to_full_json(comparison: Comparison, about: About = NOBODY) -> str:
    """The same with the lists."""
    return _entries(to_object(comparison, about, full=True))


def checks_to_json(results: Iterable[tuple[Path, Comparison]], about: About = NOBODY) -> str:
    """One object for all traces that were checked: the reports by file name."""
    return _object({str(path): to_object(result, about) for path, result in results} | _refused(about))


def checks_to_full_json(results: Iterable[tuple[Path, Comparison]], about: About = NOBODY) -> str:
    """The same with the lists per token."""
    return _object({str(path): to_object(result, about, full=True) for path, result in results} | _refused(about))


def _refused(about: About) -> dict[str, Any]:
    """What there is to say of traces that could not be checked."""
    verdict = tolerances.UNCHECKED
    return {
        str(path): {"schema": SCHEMA, "verdict": verdict, "refused": True, "summary": reason}
        for path, reason in about.refused
    }


def _object(reports: Mapping[str, Any]) -> str:
    return json.dumps(reports, indent=1, ensure_ascii=False) + "\n"


def in_json(entries: Mapping[str, Any]) -> str:
    """Any report's entries, with what ``finite`` makes of them."""
    return json.dumps(finite(entries), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _entries(report: Mapping[str, Any]) -> str:
    return "{\n" + ",\n".join(f"{_text(key)}: {_lines(value)}" for key, value in report.items()) + "\n}\n"


def _lines(value: Any) -> str:
    if not isinstance(value, list) or not any(isinstance(item, dict) for item in value):
        return _text(value)
    return "[\n" + ",\n".join(f" {_text(item)}" for item in value) + "\n]"


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def to_object(comparison: Comparison, about: About = NOBODY, full: bool = False) -> dict[str, Any]:
    """The report as plain lists and dictionaries; ``full``: with every token's error."""
    c = comparison
    report = {
        "schema": SCHEMA,
        "llamadiff": {"version": __version__, "command": about.command},
        "verdict": c.verdict,
        "summary": c.summary,
        "headline": c.headline,
        "proof": c.proof,
        "first_divergence": _divergence(c.first_divergence),
        "wrong": [row.tap for row in c.wrong],
        "diagnosis": [_diagnosis(d, c) for d in c.diagnosis],
        "repairs": repairs_of(c, about.command),
        "model": c.model,
        "tokens": [{"id": token, "text": text} for token, text in c.tokens],
        "n_prefill": c.n_prefill,
        "batches": c.batches,
        "parting": c.parting,
        "prompt": c.prompt,
        "baseline": c.baseline,
        "candidate": c.candidate,
        "taps": [_row(row, full) for row in c.rows],
        "missing": c.missing,
        "extra": c.extra,
        "found_map": c.found_map,
        "coverage": c.coverage,
        "logits": _logits(c.logits),
        "positions": c.positions,
        "provenance": provenance(c),
        "only_baseline_read": c.only_baseline_read,
        "only_engine_read": c.only_engine_read,
        "preflight": c.preflight,
        "arithmetics": c.arithmetics,
        "profile": c.profile,
        "decoding": c.decoding,
        "free_tokens": c.free_tokens,
        "by_sketch": c.by_sketch,
        "engine": c.engine,
        "manner": c.manner,
        "next_steps": c.next_steps,
        "loss": c.loss,
        "normal": c.normal,
        "timing": c.timing,
    }
    cleaned: dict[str, Any] = finite(report)
    return cleaned


def _divergence(row: Row | None) -> dict[str, Any] | None:
    if row is None or row.local is None:
        return None
    local = row.local
    return {
        "tap": row.tap, "layer": row.layer, "op": row.op, "token": local.token, "index": local.index,
        "baseline": row.at.get("baseline"), "candidate": row.at.get("candidate", row.at.get("engine")),
        "expected": local.expected, "recorded": local.recorded,
    }  # fmt: skip


def _diagnosis(d: Diagnosis, c: Comparison) -> dict[str, Any]:
    """One cause and its proof; where none is known, what comes nearest."""
    return {
        "tap": d.tap, "cause": d.causes[0].name if d.known else UNKNOWN, "explanation": headline(d, c.rows),
        "nmse": d.nmse if d.known else None, "known": d.known, "harmless": d.harmless,
        "evidence": {"replayed_nmse": d.taps if d.known else {}, "right_nmse": d.right},
        "taps": list(d.taps), "layers": d.layers, "fix": diagnosis_text.fix(d) if d.known else None,
        "source": d.causes[0].source if d.known else None, "value": d.causes[0].value if d.known else None,
        "alternatives": [_cause(cause) for cause in d.causes[1:]], "nearest": [_cause(cause) for cause in d.nearest],
        "read": {tap: [fact.says for fact in facts] for tap, facts in d.read.items() if facts},
    }  # fmt: skip


def _cause(cause: Cause) -> dict[str, Any]:
    return {"cause": cause.name, "explanation": cause.says, "nmse": cause.nmse, "value": cause.value}


def _row(row: Row, full: bool) -> dict[str, Any]:
    drift, local = row.drift, row.local
    return {
        "tap": row.tap, "layer": row.layer, "op": row.op, "weight": row.weight, "weight_type": row.weight_type,
        "shape": row.shape, "verdict": row.verdict, "span": row.span,
        "drift": None if drift is None else {
            "nmse": drift.nmse, "cosine": drift.cosine, "max_abs": drift.max_abs,
            "ratio_to_noise": row.ratio_to_noise, "expected": row.expected_drift, **_per_token(drift.per_token, full),
        },
        "explained": row.explained, "misrecorded": row.misrecorded,
        "distance_to_engine": row.distance, "local": _local(local, full),
        "baseline_local": _local(row.baseline_local, full),
        "baseline": row.baseline, "candidate": row.candidate,
        "mean_drift": drift.mean_drift if drift else None,
        "worst": drift.worst if drift else None,
    }  # fmt: skip


def _local(local: Local | None, full: bool) -> dict[str, Any] | None:
    """A tap's own error; what it looks like in words."""
    if local is None:
        return None
    values = {field.name: getattr(local, field.name) for field in fields(local) if field.name not in _LISTS}
    lists = {"open_tokens": local.open_tokens} if full else {}
    return {**values, **lists, **_per_token(local.per_token, full), "facts": [fact.says for fact in local.facts]}


def _per_token(errors: Sequence[float], full: bool) -> dict[str, Any]:
    """The errors of the tokens, summed up or each."""
    if full:
        return {"per_token": errors, **_per_token(errors, False)}
    known = [(error, token) for token, error in enumerate(errors) if not math.isnan(error)]
    largest, token = max(known, default=(None, None))
    middle = median(error for error, _ in known) if known else None
    return {"over_tokens": {"count": len(errors), "median": middle, "largest": largest, "token": token}}


def _logits(logits: Logits | None) -> dict[str, Any] | None:
    if logits is None:
        return None

    def top(tokens: tuple[TopToken, ...]) -> list[dict[str, Any]]:
        return [asdict(token) for token in tokens]

    return {
        "kl": logits.kl, "top1_agree": logits.top1_agree, "margin": logits.margin, "agreeing": logits.agreeing,
        "rows": logits.rows, "after": logits.after,
        "not_finite": logits.not_finite, "top": top(logits.top), "candidate_top": top(logits.candidate_top),
        "expected": top(logits.expected),
    }  # fmt: skip


def finite(value: Any) -> Any:
    """Plain JSON values throughout: dataclasses opened, tuples as lists, non-finite numbers as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    return value
