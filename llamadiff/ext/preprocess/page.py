"""Preprocessing on a terminal, and as JSON. Computes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from llamadiff.ext.preprocess.inserted import Inserted
from llamadiff.ext.preprocess.judge import Preprocessed
from llamadiff.judge.verdict import MATCH
from llamadiff.report.json import in_json
from llamadiff.report.terminal.page import STRONG, Page

SCHEMA, INSERTED_SCHEMA = "llamadiff.extras.preprocess/1", "llamadiff.extras.insertion/1"
MOST = 12  # mistakes that a file would not show, that are listed


def print_preprocessed(found: Preprocessed, console: Console) -> None:
    """The verdict, the steps that are wrong, and by how much."""
    page = Page(console)
    page.paragraph(page.badge(found.verdict), Text(page.data(headline(found), 4000), STRONG))
    page.blank()
    for cause in found.causes:
        page.paragraph(Text(f"{page.data(cause.step)}  ".ljust(15), STRONG), page.data(cause.says, 1000))
    for line in _more(found):
        page.paragraph(" " * 15 if found.causes else "", page.data(line, 1000))
    if found.verdict == MATCH and found.unseen:
        page.blank()
        shown = "; ".join(found.unseen[:MOST])
        more = f"; and {len(found.unseen) - MOST} more" if len(found.unseen) > MOST else ""
        page.paragraph("note  ", page.data(f"this file would not show: {shown}{more}", 4000))


def headline(found: Preprocessed) -> str:
    """The verdict in a sentence."""
    what = "encoder's input"
    if found.verdict == MATCH:
        return f"{what}: what {found.processor} makes of {found.file}, read as {found.read_as}"
    if not found.causes:
        return f"{what}: is not what {found.processor} makes of {found.file}, and no step done otherwise explains it"
    steps = " and ".join(dict.fromkeys(cause.step for cause in found.causes))
    return f"{what}: is not what {found.processor} makes of {found.file}: {steps}"


def _more(found: Preprocessed) -> Iterator[str]:
    unit = "levels of 255" if found.kind == "picture" else "of the features"
    if found.worst is None:
        yield f"{found.name} has the shape {_shape(found.shape)}; the processor gives {_shape(found.expected)}"
    else:
        yield (
            f"off by up to {found.worst:.3g} {unit}, {found.error:.3g} rms; rounding explains up to {found.allowed:.3g}"
        )
        if found.verdict != MATCH:
            yield f"where: {found.where}"
    if found.partly is not None:
        says, left = found.partly
        yield f"explains most of it, not all: {says}; {left:.2g} rms remain then"
    if found.noise is not None:
        yield found.noise
    if found.left is not None:
        yield f"with {'these' if len(found.causes) > 1 else 'this'} done so, {found.left:.2g} rms remain"


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "one value"


def print_inserted(found: Inserted, console: Console) -> None:
    """The verdict, and what is wrong."""
    page = Page(console)
    page.paragraph(page.badge(found.verdict), Text(page.data(inserted_headline(found), 4000), STRONG))
    page.blank()
    for cause in found.causes:
        page.paragraph(Text(f"{page.data(cause.step)}  ".ljust(15), STRONG), page.data(cause.says, 1000))
    for note in found.notes:
        page.paragraph("note  ", page.data(note, 1000))


def inserted_headline(found: Inserted) -> str:
    """The verdict in a sentence."""
    made = f"what {found.model} makes of {found.file} and the prompt"
    if found.verdict == MATCH:
        return f"text model's input: {made}: {found.rows[0]} rows, {found.media} of them the encoder's"
    steps = " and ".join(dict.fromkeys(cause.step for cause in found.causes))
    return f"text model's input: is not {made}: {steps}"


def as_json(found: Preprocessed | Inserted) -> str:
    """One object; a number that is not finite is null."""
    if isinstance(found, Inserted):
        return in_json({"schema": INSERTED_SCHEMA, **asdict(found)})
    return in_json({"schema": SCHEMA, **asdict(found)})
