"""What ``check`` prints: a line for each trace, and under one that failed where its recording comes from.

On GitHub, workflow commands too: one annotation for each cause, at the file and line of a test or a capture. It shows
ten of a kind in a step, so the last one counts those that are left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path, PurePath

from llamadiff.judge.verdict import is_right
from llamadiff.report.terminal.escape import shown
from llamadiff.report.terminal.report import make_console, render
from llamadiff.result.changed import Changed
from llamadiff.result.comparison import Comparison
from llamadiff.result.logits import Positions
from llamadiff.trace.metadata import Info
from llamadiff.words.provenance import provenance
from llamadiff.words.repairs import repairs_of

_LONG = 4000  # cells
_WIDTH = 110


def lines_of(path: Path, result: Comparison) -> list[str]:
    """The verdict in a line, with the statistics over positions; the provenance of what failed under it."""
    said = result.summary if result.positions is None else f"{result.summary}; {in_words(result.positions)}"
    line = f"{result.verdict.upper():6}  {_path(path)}: {shown(said, _LONG)}"
    if is_right(result.verdict):
        return [line]
    return [line, f"        {shown(provenance(result), _LONG)}"]


def _path(path: PurePath) -> str:
    return shown(str(path), _LONG, plain=os.sep)


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
    sides = [_facts(info) for info in (changed.before, changed.after)]
    changes = ((name, was, sides[1][name]) for name, was in sides[0].items())
    what += [f"{name}: {shown(was, 300)} -> {shown(now, 300)}" for name, was, now in changes if was != now]
    return [f"UPDATED  {_path(changed.path)}: {'; '.join(what)}; checked: {changed.verdict.upper()}"]


def _facts(info: Info) -> dict[str, str]:
    """What a capture says of its run: who, with what, of which model; of settings, those that say anything."""
    settings = info.producer.get("settings")
    if isinstance(settings, Mapping):
        settings = {key: value for key, value in settings.items() if value != ""}
    stated = {"tokens": info.tokens, "version": info.producer.get("version"), "settings": settings,
              "sha256": info.model.get("sha256")}  # fmt: skip
    return {name: str(value) for name, value in stated.items()}


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
    return f"{_path(path)}\n{text.getvalue()}{said}{shown(provenance(result), _LONG)}"


MOST = 10  # annotations of a kind that GitHub shows of one step: the last one counts those that are left out
_MESSAGE = (("%", "%25"), ("\r", "%0D"), ("\n", "%0A"))
_PROPERTY = (*_MESSAGE, (":", "%3A"), (",", "%2C"))


@dataclass(frozen=True)
class Annotation:
    """What is said where."""

    file: str
    line: int
    title: str
    message: str

    def __str__(self) -> str:
        places = f"file={_escaped(self.file, _PROPERTY)},line={self.line},title={_escaped(self.title, _PROPERTY)}"
        return f"::error {places}::{_escaped(self.message, _MESSAGE)}"


def annotations_of(file: Path | str, line: int, result: Comparison) -> Iterator[Annotation]:
    """One for each cause of a comparison that failed; or one that says why it did."""
    if is_right(result.verdict):
        return
    repairs = repairs_of(result)
    title = f"llamadiff: {result.verdict.upper()}"
    for repair in repairs:
        do = f"\n{repair.fix}" if repair.fix else ""
        known = f" ({repair.id})" if repair.id and repair.fix else ""
        yield Annotation(str(file), line, f"{title} {repair.tap}{known}", f"{repair.says}{do}")
    if not repairs:
        yield Annotation(str(file), line, title, result.summary)


def refusal(file: Path | str, line: int, reason: str) -> Annotation:
    """One for a trace that could not be checked."""
    return Annotation(str(file), line, "llamadiff: refused", reason)


def shown_ten(annotations: Iterable[Annotation]) -> list[str]:
    """The lines to print: no more than GitHub shows."""
    every = list(annotations)
    if len(every) <= MOST:
        return list(map(str, every))
    shown, left = every[: MOST - 1], every[MOST - 1 :]
    text = "\n".join(f"{one.file}: {one.message.splitlines()[0]}" for one in left)
    more = Annotation(left[0].file, left[0].line, f"llamadiff: {len(left)} more causes", text)
    return [*map(str, shown), str(more)]


def _escaped(text: str, pairs: Iterable[tuple[str, str]]) -> str:
    """As GitHub's runner reads it back (toolkit's command.ts): % first."""
    for plain, code in pairs:
        text = text.replace(plain, code)
    return text.replace("\x00", "")
