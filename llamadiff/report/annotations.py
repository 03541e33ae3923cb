"""GitHub's workflow commands: one annotation for each cause, at the file and line of a test or a capture.

GitHub shows ten of a kind in a step, so the last one counts those that are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from llamadiff.comparison.repairs import repairs_of
from llamadiff.comparison.result import Comparison
from llamadiff.numerics import tolerances

MOST = 10
_BAD = (tolerances.WRONG, tolerances.UNCHECKED)
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
    if result.verdict not in _BAD:
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
