"""What a model is compared with: nothing, another file, a checkpoint, or a directory of a stranger's weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from llamaref.file_kind import ADAPTER, PROJECTOR, other_kind

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.file.adapter import fitted
from llamadiff.ext.file.against import OtherSide, compare_weights
from llamadiff.ext.file.alone import inspect, refused
from llamadiff.ext.file.architectures import TABLES
from llamadiff.ext.file.checkpoint import Checkpoint, CheckpointByNames
from llamadiff.ext.file.dump import WeightDump
from llamadiff.ext.file.other_file import OtherFile
from llamadiff.ext.file.projector import Projector
from llamadiff.ext.file.result import WeightReport
from llamadiff.system.collisions import Named
from llamadiff.system.errors import UserError
from llamadiff.system.progress import Progress, silent


def judge_weights(
    model: str | Path, other: str | Path | None = None, progress: Progress = silent, load: bool = False
) -> WeightReport:
    """A file by itself, or against whatever ``other`` is. Raises UserError for what cannot be read.

    ``load``: ask llama.cpp too whether it takes the file, where it is compared with another; by itself it is asked.
    """
    if other is None:
        return inspect(model, progress)
    model_file = ModelFile(model)
    for adapter, base in ((model, other), (other, model)):
        if Path(base).is_file() and Path(adapter).is_file() and _is_adapter(adapter) and not _is_adapter(base):
            return fitted(inspect(adapter, progress), ModelFile(adapter), _model_at(base))
    if Path(other).is_dir() and _is_adapter(model):
        raise UserError(
            f"{model}: is a LoRA adapter, {other} holds a model: llamadiff weights {model} MODEL.gguf says whether it "
            f'fits; llamadiff port MODEL.gguf MERGED "text" --llama-cpp lora={model} looks at a merged checkpoint'
        )
    side = _other_side(model_file, Path(other))
    report = compare_weights(model_file, side, progress)
    if not load or not isinstance(side, (Checkpoint, CheckpointByNames, OtherFile)):
        return report
    progress("loading the model into llama.cpp")
    return replace(report, oddities=(*report.findings, *refused(model_file, report.findings), *report.suspicions))


def _is_adapter(path: str | Path) -> bool:
    weights = ModelFile(path).weights
    return other_kind(weights.fields, list(weights)) is ADAPTER


def _model_at(path: str | Path) -> ModelFile:
    """Raises UserError for a file that holds something else."""
    model = ModelFile(path)
    model.check_is_model()
    return model


def _other_side(model: ModelFile, path: Path) -> OtherSide:
    """What a path is."""
    if not path.exists():
        raise UserError(f"{path}: no such file or directory")
    if path.is_file():
        return OtherFile(model, path)
    if (path / "config.json").exists():
        if other_kind(model.weights.fields, model.tensors) is PROJECTOR:
            return Projector(model, path)
        return Checkpoint(model, path) if model.architecture in TABLES else CheckpointByNames(model, path)
    return WeightDump(model, path)


def files_of(words: str, path: Path | None) -> Iterator[Named]:
    """The files that are read for one side."""
    if path is not None and path.is_dir():
        yield from ((words, file) for file in sorted(path.rglob("*")) if file.is_file())
    else:
        yield words, path
