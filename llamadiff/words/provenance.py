"""Where a capture comes from: who recorded it, with which settings, of which model, and who found it right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llamadiff.result.comparison import Comparison
from llamadiff.trace.metadata import CHECKED

MOST = 12  # settings that are told


def provenance(result: Comparison) -> str:
    """A line about the trace that was checked, or that a candidate was held against."""
    return "; ".join(_clauses(result.baseline, result.model))


def _clauses(producer: Mapping[str, Any], model: Mapping[str, Any]) -> Iterator[str]:
    version = f" ({producer['version']})" if producer.get("version") else ""
    yield f"recorded by {producer.get('name')}{version}"
    settings = producer.get("settings")
    if isinstance(settings, Mapping):
        stated = [f"{name} {_brief(value)}" for name, value in list(settings.items())[:MOST] if value != ""]
        yield from [f"with {', '.join(stated)}"] * bool(stated)
    known = f" (sha256 {str(model['sha256'])[:12]})" if model.get("sha256") else ""
    yield f"of {model.get('file')}{known}"
    checked = producer.get(CHECKED)
    if isinstance(checked, Mapping):
        who = f"the {checked.get('engine')} engine of llamadiff {checked.get('llamadiff')}"
        yield f"checked by {who}: {str(checked.get('verdict')).upper()}, {checked.get('taps')} taps"
    else:
        yield "not checked when it was recorded"


def _brief(value: object) -> str:
    return {True: "on", False: "off"}.get(value, "?") if isinstance(value, bool) else str(value)[:40]
