"""The verb: is what an engine gives its text model what the checkpoint's own code does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llamadiff.ext.preprocess.insertion import judge_insertion
from llamadiff.ext.preprocess.search import Cause
from llamadiff.ext.preprocess.text_inputs import dumped_inputs, right_inputs
from llamadiff.judge.verdict import of_check
from llamadiff.system.errors import UserError
from llamadiff.system.progress import Progress


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
