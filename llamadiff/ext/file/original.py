"""A file's model with the weights and the metadata of the checkpoint that it was converted from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from llamadiff.engines.model_file import ModelFile, Runnable
from llamadiff.ext.file.against import compare_weights
from llamadiff.ext.file.architectures import TABLES
from llamadiff.ext.file.checkpoint import Checkpoint, CheckpointByNames
from llamadiff.ext.file.views import Array, View, whole
from llamadiff.judge.preflight.checks import Check
from llamadiff.judge.verdict import of_check
from llamadiff.result.oddity import Oddity
from llamadiff.system.errors import UserError
from llamadiff.system.progress import Progress
from llamadiff.verbs.by_original import Original

Engine = Callable[[Mapping[str, Array], Mapping[str, Any]], Runnable]


def faults_of(findings: Iterable[Oddity], faulty: str) -> tuple[Check, ...]:
    """What is certainly wrong with the weights of a file, as checks; ``faulty`` says whose faults they are."""
    return tuple(Check(f"{faulty}'s {each.where}", of_check(each), each.says) for each in findings)


def original_of(
    file: ModelFile,
    folder: Path,
    engine: Callable[[Mapping[str, Array], Mapping[str, Any]], Runnable],
    progress: Progress,
) -> Original | None:
    """The checkpoint of a file, in its place; None where the folder holds none of it.

    ``engine`` gives what runs the file with these tensors, and these keys, in place of its own.
    """
    try:
        known = Checkpoint(file, folder) if file.architecture in TABLES else None
        checkpoint = known or CheckpointByNames(file, folder)
        report = compare_weights(file, checkpoint, progress)
        progress("reading the checkpoint's weights")
        if known is not None:
            model = engine(_whole({n: made.view for n, made in known.complete().items()}), _keys(file, known))
        else:
            model = engine(_whole({pair.name: pair.theirs for pair in checkpoint.pairs()}), {})
    except UserError:
        return None
    return Original(model, checkpoint.label, faults_of(report.findings, "the file"))


def _whole(views: Mapping[str, View]) -> dict[str, Array]:
    return {name: whole(view).reshape(view.shape) for name, view in views.items()}


def _keys(file: ModelFile, checkpoint: Checkpoint) -> dict[str, Any]:
    """The file's metadata as config.json states it."""
    names = {f"{file.architecture}.{key}": (key, value) for key, value in checkpoint.stated.values.items()}
    return {
        name: value for name, (key, value) in names.items() if name in file.weights.fields or key.startswith("rope.")
    }
