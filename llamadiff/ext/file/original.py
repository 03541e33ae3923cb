"""A file's model with the weights and the metadata of the checkpoint that it was converted from."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from llamaref import Weights

from llamadiff.engines.model_file import ModelFile
from llamadiff.engines.reference_model import Model
from llamadiff.ext.file.against import compare_weights
from llamadiff.ext.file.architectures import TABLES
from llamadiff.ext.file.checkpoint import Checkpoint
from llamadiff.ext.file.views import whole
from llamadiff.judge.preflight.checks import Check
from llamadiff.judge.verdict import of_check
from llamadiff.result.oddity import Oddity
from llamadiff.system.errors import UserError
from llamadiff.system.progress import Progress
from llamadiff.verbs.by_original import Original


def faults_of(findings: Iterable[Oddity], faulty: str) -> tuple[Check, ...]:
    """What is certainly wrong with the weights of a file, as checks; ``faulty`` says whose faults they are."""
    return tuple(Check(f"{faulty}'s {each.where}", of_check(each), each.says) for each in findings)


def original_of(file: ModelFile, folder: Path, progress: Progress) -> Original | None:
    """The checkpoint of a file, in its place; None if it is not known how such files are converted."""
    if file.architecture not in TABLES:
        return None
    try:
        checkpoint = Checkpoint(file, folder)
        report = compare_weights(file, checkpoint, progress)
        progress("reading the checkpoint's weights")
        model = Model(file.path, weights=_weights(file, checkpoint))
    except UserError:
        return None
    return Original(model, checkpoint.label, faults_of(report.findings, "the file"))


def _weights(file: ModelFile, checkpoint: Checkpoint) -> Weights:
    """The file's, and in place of each tensor and key what the checkpoint makes of it."""
    weights = Weights(file.path)
    for key, value in checkpoint.stated.values.items():
        if f"{file.architecture}.{key}" in weights.fields or key.startswith("rope."):
            weights.fields[f"{file.architecture}.{key}"] = value
    for name, made in checkpoint.complete().items():
        weights.put(name, whole(made.view).reshape(made.view.shape))
    return weights
