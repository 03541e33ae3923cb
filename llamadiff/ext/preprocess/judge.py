"""The verb: is what an engine fed its encoder what the checkpoint's processor makes of a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.preprocess.candidate import read_dump
from llamadiff.ext.preprocess.processor import Processor, processor_of
from llamadiff.ext.preprocess.search import Cause, Search
from llamadiff.judge.verdict import of_check
from llamadiff.system.progress import Progress

Array = NDArray[Any]


@dataclass(frozen=True)
class Preprocessed:
    """``kind``: ``picture`` or ``sound``. ``shape``: of the dump, ``expected`` of what the processor gives.

    ``causes``: what explains a wrong dump, ``left``: the rms that remains then. ``worst``, ``error``: the largest and
    the rms difference, in levels of a picture, or in the sound's features. ``where`` it is off. ``unseen``: mistakes
    that this file would not show. ``partly``: where nothing explains it, what explains most, and the rms it leaves;
    ``noise``: what that looks like, if it does.
    """

    verdict: str
    kind: str
    processor: str
    file: str
    name: str
    shape: Sequence[int]
    expected: Sequence[int]
    read_as: str | None
    causes: Sequence[Cause] = ()
    left: float | None = None
    worst: float | None = None
    error: float | None = None
    allowed: float = 0.0
    where: str | None = None
    unseen: Sequence[str] = ()
    partly: tuple[str, float] | None = None
    noise: str | None = None
    about: Mapping[str, Any] | None = None


def judge_preprocessing(
    checkpoint: Path, file: Path, candidate: Path, name: str | None, progress: Progress
) -> Preprocessed:
    """Hold a file's tensor against the processor of a checkpoint. Raises UserError."""
    name, dump = read_dump(candidate, name)
    progress("loading the processor")
    with processor_of(checkpoint, file) as processor:
        return judge_dump(processor, file, name, dump, progress)


def judge_dump(processor: Processor, file: Path, name: str, dump: Array, progress: Progress) -> Preprocessed:
    """Hold what an encoder was fed against what a processor makes of a file."""
    search = Search(processor, dump, progress)
    found = Preprocessed(
        of_check(None), processor.kind, processor.about["class"], str(file), name, dump.shape,
        search.truth_features.values.shape, None, allowed=search.most_allowed,
        about={key: value for key, value in processor.about.items() if key != "config"},
    )  # fmt: skip
    wild = dump.size - int(np.isfinite(dump).sum())
    if wild:
        causes = (Cause("values", f"{wild} of {dump.size} values are NaN or Inf"),)
        return replace(found, verdict=of_check(causes), causes=causes)
    right = search.right()
    if right is not None:
        reading, fit = right
        return replace(found, read_as=reading.says, worst=fit.worst, error=fit.error, unseen=search.unseen())
    near, explained = search.nearest(), search.explain()
    if near is not None:
        reading, fit = near
        found = replace(found, read_as=reading.says, worst=fit.worst, error=fit.error, where=search.where(reading))
    if explained is not None:
        read_as = explained.read_as or found.read_as
        found = replace(found, read_as=read_as, causes=explained.causes, left=explained.error)
    else:
        found = replace(found, partly=search.partly(), noise=search.noise())
    return replace(found, verdict=of_check("it differs"))
