"""One file by itself: every tensor listed, decoded twice, and looked at for what is odd."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from llamaref.file_kind import ADAPTER, PROJECTOR, OtherKind, other_kind
from llamaref.known_tensors import known_stems

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.file.adapter import adapter_oddities, ranks_and_scales
from llamadiff.ext.file.finite import scale_missing
from llamadiff.ext.file.oddities import oddities_of, out_of_line
from llamadiff.ext.file.result import TensorRow, WeightReport
from llamadiff.ext.file.rules import assumptions, rule_oddities
from llamadiff.ext.file.statistics import NEITHER, ONLY_GGML, ONLY_GGUF, TensorRead, examine
from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.request import Request
from llamadiff.result.oddity import Oddity
from llamadiff.system.errors import UnrunnableError
from llamadiff.system.pages import let_go
from llamadiff.system.progress import Progress, silent


@np.errstate(all="ignore")  # what overflows shows in the values
def inspect(path: str | Path, progress: Progress = silent, load: bool = True) -> WeightReport:
    """Read a model file's tensors, one after the other. ``load``: ask llama.cpp too whether it takes the file."""
    started = time.perf_counter()
    model = ModelFile(path)
    rows, oddities, unchecked = list[TensorRow](), list[Oddity](), list[str]()
    for number, name in enumerate(model.tensors):
        progress(f"reading {name}", number, len(model.tensors))
        found = examine(model.weights, name, model.dequantizer.of_type(model.weights.type(name)))
        row = TensorRow.of(model.weights, name, found.decoders != NEITHER)
        rows.append(replace(row, stats=found.stats, decoders=found.decoders))
        oddities += [*oddities_of(model.weights, name, found), *scale_missing(model.weights, name)]
        unchecked += _untold(name, model.weights.type(name), found)
        let_go(model.weights.read_raw(name))
    oddities += out_of_line({row.name: row.stats.rms for row in rows if row.stats is not None})
    kind = other_kind(model.weights.fields, model.tensors)
    if kind is None:
        notes = tuple(assumptions(model))
        oddities += list(rule_oddities(model))
    else:
        ranks = f" of {ranks_and_scales(model.weights)}" if kind is ADAPTER else ""
        notes = (f"the file holds {kind.name}{ranks}: {kind.use}",)
        oddities = [_of_no_model(kind, oddity) for oddity in oddities if oddity.certain or kind is PROJECTOR]
        oddities += adapter_oddities(model.weights) if kind is ADAPTER else []
    if load:
        progress("loading the model into llama.cpp")
        oddities += refused(model, oddities)
    timing = {"total_s": time.perf_counter() - started}
    described = model.describe(sha256="")
    return WeightReport(described, None, tuple(rows), _sorted(oddities, model), notes,
                        tuple(dict.fromkeys(unchecked)), timing)  # fmt: skip


def _of_no_model(kind: OtherKind, oddity: Oddity) -> Oddity:
    """What is odd in a model's matrices is not in counts; and an adapter may have zeros, which add nothing."""
    return replace(oddity, certain=False) if kind is ADAPTER and oddity.cause == "zero" else oddity


def _untold(name: str, kind: str, found: TensorRead) -> Iterator[str]:
    """What could not be compared, by type."""
    if found.decoders in (ONLY_GGML, ONLY_GGUF):
        other = "gguf-py" if found.decoders == ONLY_GGML else "ggml"
        yield f"{kind} is decoded by {found.decoders}: {other} has none for it, so that nothing confirms the values"
    elif found.decoders == NEITHER:
        yield f"{name} is of type {kind}, which neither gguf-py nor ggml decodes: its values were not looked at"


def refused(model: ModelFile, found: Sequence[Oddity]) -> list[Oddity]:
    """That llama.cpp does not load the file: certain, where nothing says why already."""
    if other_kind(model.weights.fields, model.tensors) is not None or known_stems(model.architecture) is None:
        return []
    said = refusal(model)
    return [Oddity("llama.cpp", said, "unloadable", certain=not any(o.certain for o in found))] if said else []


def _sorted(oddities: list[Oddity], model: ModelFile) -> tuple[Oddity, ...]:
    """In the file's order, what is certain first."""
    order = {name: number for number, name in enumerate(model.tensors)}
    return tuple(sorted(oddities, key=lambda o: (not o.certain, order.get(o.where, len(order)))))


def refusal(model: ModelFile) -> str | None:
    """What llama.cpp says against the file; None if it loads, or if there is no llama.cpp to ask."""
    path = str(model.path)
    request = Request(path, tuple(map(str, model.weights.files)), errand="llamadiff.ext.file.errands:load_only")
    try:
        with Child() as child:
            child.ask(request, silent)
    except UnrunnableError as error:
        said = str(error)
        return said.removeprefix(f"{path}: ") if said.startswith(f"{path}: ") else None
    return None
