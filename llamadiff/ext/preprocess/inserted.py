"""The verb: is what an engine gives its text model what the checkpoint's own code does; on a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from llamadiff.ext.preprocess.insertion import judge_insertion
from llamadiff.ext.preprocess.search import Cause
from llamadiff.ext.preprocess.text_inputs import dumped_inputs, right_inputs
from llamadiff.judge.verdict import MATCH, of_check
from llamadiff.report.json import in_json
from llamadiff.report.terminal.page import STRONG, Page
from llamadiff.system.errors import UserError
from llamadiff.system.progress import Progress

SCHEMA = "llamadiff.extras.insertion/1"


@dataclass(frozen=True)
class Inserted:
    """``rows``: given and right; ``media``: those of the picture or the sound. ``notes``: what was not looked at."""

    verdict: str
    model: str
    file: str
    prompt: str
    rows: tuple[int, int]
    media: int
    causes: Sequence[Cause] = ()
    notes: Sequence[str] = ()


def judge_inserted(checkpoint: Path, file: Path, prompt: str, candidate: Path, progress: Progress) -> Inserted:
    """Hold what an engine gave its text model against the checkpoint's own code. Raises UserError."""
    given = dumped_inputs(candidate)
    progress("running the checkpoint as far as its text model")
    right = right_inputs(checkpoint, file, prompt)
    if given.embeds is not None and given.embeds.shape[1] != right.embeds.shape[1]:
        raise UserError(
            f"{candidate}: rows have {given.embeds.shape[1]} values, the checkpoint's have {right.embeds.shape[1]}; "
            "give what its text model is given of each position, [row, value]"
        )
    judged = judge_insertion(right, given)
    return Inserted(
        of_check(judged.causes), right.model, str(file), prompt, (judged.rows, right.count), int(right.is_media.sum()),
        judged.causes, judged.notes,
    )  # fmt: skip


def print_inserted(found: Inserted, console: Console) -> None:
    """The verdict, and what is wrong."""
    page = Page(console)
    page.paragraph(page.badge(found.verdict), Text(page.data(headline(found), 4000), STRONG))
    page.blank()
    for cause in found.causes:
        page.paragraph(Text(f"{page.data(cause.step)}  ".ljust(15), STRONG), page.data(cause.says, 1000))
    for note in found.notes:
        page.paragraph("note  ", page.data(note, 1000))


def headline(found: Inserted) -> str:
    """The verdict in a sentence."""
    made = f"what {found.model} makes of {found.file} and the prompt"
    if found.verdict == MATCH:
        return f"text model's input: {made}: {found.rows[0]} rows, {found.media} of them the encoder's"
    steps = " and ".join(dict.fromkeys(cause.step for cause in found.causes))
    return f"text model's input: is not {made}: {steps}"


def inserted_as_json(found: Inserted) -> str:
    """One object."""
    return in_json({"schema": SCHEMA, **asdict(found)})
