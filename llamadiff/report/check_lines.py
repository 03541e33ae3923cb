"""What ``check`` prints: the finding of each trace, and under one that failed where its recording comes from.

On GitHub, workflow commands too: one annotation for each cause, at the file and line of a test or a capture. It shows
ten of a kind in a step, so the last one counts those that are left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

from rich.text import Text

from llamadiff.judge.verdict import is_right
from llamadiff.report.facts import mistakes
from llamadiff.report.terminal.escape import escape_line
from llamadiff.report.terminal.page import PROSE, Page
from llamadiff.result.comparison import Comparison
from llamadiff.result.logits import Positions
from llamadiff.words.diagnosis_text import fix
from llamadiff.words.provenance import provenance
from llamadiff.words.repairs import repairs_of

_LONG, _FIXES, _BLANK = 4000, 3, " " * 8  # cells of a line; causes that have their fix beside them


def put_check(page: Page, path: Path, result: Comparison) -> None:
    """Print the finding of a trace, how much was judged where that is not all, and of what failed proof and remedy."""
    style = page.style_of(result.verdict) if page.console.color_system and not page.console.no_color else ""
    word = Text.assemble((result.verdict.upper(), style)).append(" " * max(2, len(_BLANK) - len(result.verdict)))
    name, headline = f"{path_text(path)}:", escape_line(result.headline, _LONG)
    if word.cell_len + len(name) < min(page.width, PROSE):
        page.paragraph(word, f"{name} {headline}")
    else:  # a path is not broken
        page.console.print(word.append(name), soft_wrap=True)
        page.paragraph(_BLANK, headline)
    said = [in_words(result.positions)] if result.positions is not None else []
    right, several = is_right(result.verdict), len(repairs_of(result)) > 1
    fixes = [f"{f'{d.tap}: ' * several}{fix(d)}" for d in mistakes(result)]
    said += ["; ".join(result.proof)] * bool(result.proof and (result.missing or not right))
    if not right:
        said += [f"fix: {each}" for each in fixes[:_FIXES]] or [f"next: {step}" for step in result.next_steps[:_FIXES]]
    is_own = not result.is_engine and result.baseline.get("name") != "llama.cpp"  # perhaps the candidate's own run
    if is_own or not right:
        said.append(provenance(result))
    for text in said:
        page.paragraph(_BLANK, escape_line(text, _LONG))


def path_text(path: PurePath) -> str:
    """A path on one line."""
    return escape_line(str(path), _LONG, plain=os.sep)


def in_words(p: Positions) -> str:
    """The statistics over positions: what a gate holds, and the worst."""
    alike = f"{p.agreeing} of {p.count} first tokens agree"
    return (
        f"{alike}, KL mean {p.kl_mean:.1e}, 99% {p.kl_p99:.1e}, worst {p.kl_worst:.1e} after token {p.worst_at}, "
        f"regret mean {p.regret_mean:.1e}, worst {p.regret_worst:.1e}"
    )


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
        places = f"file={_escape(self.file, _PROPERTY)},line={self.line},title={_escape(self.title, _PROPERTY)}"
        return f"::error {places}::{_escape(self.message, _MESSAGE)}"


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


def _escape(text: str, pairs: Iterable[tuple[str, str]]) -> str:
    """As GitHub's runner reads it back (toolkit's command.ts): % first."""
    for plain, code in pairs:
        text = text.replace(plain, code)
    return text.replace("\x00", "")
