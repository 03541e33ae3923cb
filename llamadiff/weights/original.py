"""A file's model with the weights and the metadata of the checkpoint that it was converted from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llamaref import Weights

from llamadiff.engines.model_file import ModelFile, Runnable
from llamadiff.engines.reference_model import Model
from llamadiff.system.errors import UserError
from llamadiff.system.progress import Progress
from llamadiff.weights.against import compare_weights
from llamadiff.weights.architectures import TABLES
from llamadiff.weights.checkpoint import Checkpoint
from llamadiff.weights.result import Oddity
from llamadiff.weights.views import whole


@dataclass(frozen=True)
class Original:
    """``model``: what a right conversion would be, in float32; ``faults``: where the file is another, certainly.

    ``faulty`` says whose faults they are.
    """

    model: Runnable
    label: str
    faults: tuple[Oddity, ...]
    faulty: str = "the file"


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
    return Original(model, checkpoint.label, report.findings)


def _weights(file: ModelFile, checkpoint: Checkpoint) -> Weights:
    """The file's, and in place of each tensor and key what the checkpoint makes of it."""
    weights = Weights(file.path)
    for key, value in checkpoint.stated.values.items():
        if f"{file.architecture}.{key}" in weights.fields or key.startswith("rope."):
            weights.fields[f"{file.architecture}.{key}"] = value
    for name, made in checkpoint.complete().items():
        weights.put(name, whole(made.view).reshape(made.view.shape))
    return weights
