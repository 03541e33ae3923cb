"""Where a capture comes from: who recorded it, with which settings, of which model, and who found it right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from llamadiff.result.comparison import Comparison
from llamadiff.system.errors import UserError
from llamadiff.trace.metadata import Info

CHECKED = "checked"  # the key of a producer under which it stands
MOST = 12  # settings that are told
COMPARED = ("type_k", "type_v", "flash_attn")  # settings that change what is computed


def checked_by(result: Comparison) -> dict[str, Any]:
    """What a capture says of who checked it."""
    engine = result.engine.name if result.engine is not None else "numpy"
    version = import_module("llamadiff").__version__  # an import would go in a circle: that is the face of this room
    return {"engine": engine, "llamadiff": version, "verdict": result.verdict, "taps": len(result.rows)}


def provenance(result: Comparison) -> str:
    """A line about the trace that was checked, or that a candidate was held against."""
    return "; ".join(_clauses(result.baseline, result.model))


def _clauses(producer: Mapping[str, Any], model: Mapping[str, Any]) -> Iterator[str]:
    version = f" ({producer['version']})" if producer.get("version") else ""
    yield f"recorded by {producer.get('name')}{version}"
    settings = producer.get("settings")
    if isinstance(settings, Mapping):
        stated = [f"{name} {_brief(value)}" for name, value in list(settings.items())[:MOST] if value != ""]
        yield f"with {', '.join(stated)}"
    yield f"of {model.get('file')} (sha256 {str(model.get('sha256'))[:12]})"
    checked = producer.get(CHECKED)
    if isinstance(checked, Mapping):
        who = f"the {checked.get('engine')} engine of llamadiff {checked.get('llamadiff')}"
        yield f"checked by {who}: {str(checked.get('verdict')).upper()}, {checked.get('taps')} taps"
    else:
        yield "not checked when it was recorded"


def _brief(value: object) -> str:
    return {True: "on", False: "off"}.get(value, "?") if isinstance(value, bool) else str(value)[:40]


def refuse_other_settings(recorded: Info, candidate: Info) -> None:
    """Raise UserError, with both values, for a candidate that states settings other than those of the recording."""
    theirs, own = (_settings(info) for info in (recorded, candidate))
    for name in COMPARED:
        if name in theirs and name in own and _same(theirs[name]) != _same(own[name]):
            raise UserError(
                f"the candidate was run with {name} = {str(own[name])[:40]}, "
                f"the recording with {str(theirs[name])[:40]}; run it with the same, or record anew"
            )


def _same(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


def _settings(info: Info) -> Mapping[str, Any]:
    settings = info.producer.get("settings")
    return settings if isinstance(settings, Mapping) else {}
