"""What ``check`` prints: a line for each trace, and under one that failed where its recording comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from llamadiff.comparison.logits import Positions
from llamadiff.comparison.provenance import provenance
from llamadiff.comparison.result import Comparison
from llamadiff.comparison.updating import Changed
from llamadiff.numerics import tolerances
from llamadiff.report.terminal.escape import shown
from llamadiff.report.terminal.report import make_console, render

_LONG = 4000  # cells
_WIDTH = 110
PASSED = (tolerances.MATCH, tolerances.NOISE)


def lines_of(path: Path, result: Comparison) -> list[str]:
    """The verdict in a line, with the statistics over positions; the provenance of what failed under it."""
    said = result.summary if result.positions is None else f"{result.summary}; {in_words(result.positions)}"
    line = f"{result.verdict.upper():6}  {shown(str(path), _LONG)}: {shown(said, _LONG)}"
    if result.verdict in PASSED:
        return [line]
    return [line, f"        {shown(provenance(result), _LONG)}"]


def update_lines(changed: Changed) -> list[str]:
    """What recording a capture anew has changed, in numbers."""
    apart, what = changed.apart, [f"{changed.taps} taps"]
    if apart:
        name = max(apart, key=lambda tap: apart[tap])
        what.append(f"{len(apart)} changed, the most {shown(name)} by an NMSE of {apart[name]:.1e}")
        what.append(f"the first {shown(next(iter(apart)))}")
    else:
        what.append("none changed")
    what += [f"{len(changed.gone)} gone ({shown(changed.gone[0])})"] if changed.gone else []
    what += [f"{len(changed.new)} new ({shown(changed.new[0])})"] if changed.new else []
    pairs = [(name, str(getattr(changed.before, name)), str(getattr(changed.after, name))) for name in ("tokens",)]
    pairs += [(name, _stated(before, name), _stated(after, name)) for before, after, name in _facts(changed)]
    what += [f"{name}: {shown(was, 300)} -> {shown(now, 300)}" for name, was, now in pairs if was != now]
    return [f"UPDATED  {shown(str(changed.path), _LONG)}: {'; '.join(what)}; checked: {changed.verdict.upper()}"]


def _stated(said: Mapping[str, Any], name: str) -> str:
    """A fact as text; of settings, those that say anything."""
    value = said.get(name)
    return str({key: one for key, one in value.items() if one != ""} if isinstance(value, Mapping) else value)


def _facts(changed: Changed) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any], str]]:
    """What a capture says of its run, before and now: who, with what, of which model."""
    before, after = changed.before, changed.after
    yield before.producer, after.producer, "version"
    yield before.producer, after.producer, "settings"
    yield before.model, after.model, "sha256"


def in_words(p: Positions) -> str:
    """The statistics over positions: what a gate holds, and the worst."""
    alike = f"{p.agreeing} of {p.count} first tokens agree"
    return (
        f"{alike}, KL mean {p.kl_mean:.1e}, 99% {p.kl_p99:.1e}, worst {p.kl_worst:.1e} after token {p.worst_at}, "
        f"regret mean {p.regret_mean:.1e}, worst {p.regret_worst:.1e}"
    )


def report_text(path: Path, result: Comparison) -> str:
    """What a failing test shows: the report as on a terminal, without colours, and where the capture is from."""
    text = StringIO()
    console = make_console(text, width=_WIDTH)
    render(result, console)
    said = "" if result.positions is None else f"{in_words(result.positions)}\n"
    return f"{shown(str(path), _LONG)}\n{text.getvalue()}{said}{shown(provenance(result), _LONG)}"
