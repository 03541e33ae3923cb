"""Comparison -> the report's JSON object (schema llamadiff.report/1, held to report.schema.json by a test), or CSV."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from statistics import median
from typing import Any

from llamadiff import __version__
from llamadiff.judge.verdict import of_unjudged
from llamadiff.report.formats import About
from llamadiff.result.comparison import Comparison
from llamadiff.result.diagnosis import UNKNOWN, Cause, Diagnosis
from llamadiff.result.rows import Row
from llamadiff.words import diagnosis_text
from llamadiff.words.blame import headline
from llamadiff.words.provenance import provenance
from llamadiff.words.repairs import repairs_of

SCHEMA = "llamadiff.report/1"
NOBODY = About()
_LISTS = ("per_token", "open_tokens")
# In their order; what is not made here is a field of a Comparison as it is.
ENTRIES = (
    "schema", "llamadiff", "verdict", "reasons", "summary", "headline", "proof", "first_divergence", "wrong",
    "diagnosis", "repairs", "model", "tokens", "n_prefill", "batches", "parting", "prompt", "baseline", "candidate",
    "taps", "missing", "extra", "found_map", "coverage", "logits", "positions", "provenance", "only_baseline_read",
    "only_engine_read", "preflight", "arithmetics", "profile", "decoding", "free_tokens", "by_sketch", "engine",
    "manner", "next_steps", "loss", "devices", "normal", "timing",
)  # fmt: skip
_OF_LOGITS = (
    "kl", "top1_agree", "margin", "agreeing", "rows", "after", "not_finite", "top", "candidate_top", "expected",
)  # fmt: skip


def to_json(comparison: Comparison, about: About = NOBODY) -> str:
    """The report as JSON text, a line for each entry and for each tap; a number that is not finite is null.

    Lists per token are summed up: how many tokens, the median and the largest error, and where that is.
    """
    return _entries(to_object(comparison, about))


def to_full_json(comparison: Comparison, about: About = NOBODY) -> str:
    """The same with the lists."""
    return _entries(to_object(comparison, about, full=True))


def checks_to_json(results: Iterable[tuple[Path, Comparison]], about: About = NOBODY, full: bool = False) -> str:
    """One object for all traces that were checked: the reports by file name."""
    return in_json({str(path): to_object(result, about, full) for path, result in results} | _refused_traces(about))


def checks_to_full_json(results: Iterable[tuple[Path, Comparison]], about: About = NOBODY) -> str:
    """The same with the lists per token."""
    return checks_to_json(results, about, full=True)


def _refused_traces(about: About) -> dict[str, Any]:
    """What there is to say of traces that could not be checked."""
    verdict = of_unjudged()
    return {
        str(path): {"schema": SCHEMA, "verdict": verdict, "refused": True, "summary": reason}
        for path, reason in about.refused
    }


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
    made = {
        "schema": SCHEMA, "llamadiff": {"version": __version__, "command": about.command},
        "first_divergence": _divergence(c.first_divergence), "wrong": [row.tap for row in c.wrong],
        "diagnosis": [_diagnosis(d, c) for d in c.diagnosis], "repairs": repairs_of(c, about.command),
        "tokens": [{"id": token, "text": text} for token, text in c.tokens],
        "taps": [_row(row, full) for row in c.rows],
        "logits": c.logits and {name: getattr(c.logits, name) for name in _OF_LOGITS}, "provenance": provenance(c),
        "loss": c.more.get("loss"), "devices": c.more.get("devices"),
    }  # fmt: skip
    cleaned: dict[str, Any] = finite({name: made[name] if name in made else getattr(c, name) for name in ENTRIES})
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
    drift = row.drift
    return {
        "tap": row.tap, "layer": row.layer, "op": row.op, "weight": row.weight, "weight_type": row.weight_type,
        "shape": row.shape, "verdict": row.verdict, "span": row.span,
        "drift": None if drift is None else {
            "nmse": drift.nmse, "cosine": drift.cosine, "max_abs": drift.max_abs,
            "ratio_to_noise": row.ratio_to_noise, "expected": row.expected_drift, **_per_token(drift.per_token, full),
        },
        "explained": row.explained, "misrecorded": row.misrecorded,
        "distance_to_engine": row.distance, **_own_errors(row, full),
        "baseline": row.baseline, "candidate": row.candidate,
        "mean_drift": drift.mean_drift if drift else None,
        "worst": drift.worst if drift else None,
    }  # fmt: skip


def _own_errors(row: Row, full: bool) -> dict[str, Any]:
    """A tap's own error, and the baseline's; what it looks like in words."""
    told: dict[str, Any] = {}
    for side, local in (("local", row.local), ("baseline_local", row.baseline_local)):
        if local is None:
            told[side] = None
            continue
        values = {field.name: getattr(local, field.name) for field in fields(local) if field.name not in _LISTS}
        lists = {"open_tokens": local.open_tokens} if full else {}
        facts = [fact.says for fact in local.facts]
        told[side] = {**values, **lists, **_per_token(local.per_token, full), "facts": facts}
    return told


def _per_token(errors: Sequence[float], full: bool) -> dict[str, Any]:
    """The errors of the tokens, summed up or each."""
    if full:
        return {"per_token": errors, **_per_token(errors, False)}
    known = [(error, token) for token, error in enumerate(errors) if not math.isnan(error)]
    largest, token = max(known, default=(None, None))
    middle = median(error for error, _ in known) if known else None
    return {"over_tokens": {"count": len(errors), "median": middle, "largest": largest, "token": token}}


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


def to_csv(comparison: Comparison, about: About) -> str:
    """One line a tap, in graph order. It says nothing of how it was made: CSV has no place for that."""
    text: str = comparison.frame().to_csv(index=False)
    return text


def checks_to_csv(results: Sequence[tuple[Path, Comparison]], about: About) -> str:
    """The same of several: each line begins with whose it is."""
    parts = list[str]()
    for path, result in results:
        frame = result.frame()
        frame.insert(0, "graph", path.as_posix())
        parts.append(frame.to_csv(index=False, header=not parts))
    return "".join(parts)
