"""A file against another side: every tensor measured, what is off explained, what is missing told."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.file.pairs import Measured, Pair, measure_all
from llamadiff.ext.file.result import TensorRow, WeightReport
from llamadiff.result.oddity import Oddity
from llamadiff.system.progress import Progress, silent


class OtherSide(Protocol):
    """What a file is compared with. ``label`` names it in reports."""

    label: str

    def pairs(self) -> Sequence[Pair]:
        """The tensors that can be compared."""
        ...

    def oddities(self) -> Iterable[Oddity]:
        """What is wrong besides values: tensors missing, shapes, metadata."""
        ...

    def explain(self, measured: Measured) -> Oddity:
        """Why a tensor is not what it should be."""
        ...

    def unchecked(self) -> Iterable[tuple[str, str]]:
        """Tensors that cannot be compared, and why."""
        return ()

    def notes(self) -> Iterable[str]:
        """Facts that are no faults."""
        return ()


@np.errstate(all="ignore")  # what overflows shows in the values
def compare_weights(model: ModelFile, other: OtherSide, progress: Progress = silent) -> WeightReport:
    """Measure all that can be, explain what is off."""
    started = time.perf_counter()
    measured = measure_all(other.pairs(), progress)
    oddities = [_explanation(one, other, progress) for one in measured if one.is_wrong]
    oddities += other.oddities()
    left = dict(other.unchecked())
    rows = {one.pair.name: one.judged() for one in measured}
    rows |= {name: TensorRow.of(model.weights, name, is_known=False) for name in left if name in model.weights}
    order = {name: number for number, name in enumerate(model.tensors)}
    inside = sorted(rows.values(), key=lambda row: order.get(row.name, len(order)))
    found = sorted(_merged(oddities), key=lambda oddity: (not oddity.certain, order.get(oddity.where, -1)))
    told = tuple(dict.fromkeys(f"{name}: {why}" for name, why in left.items()))
    timing = {"total_s": time.perf_counter() - started}
    return WeightReport(model.describe(sha256=""), other.label, tuple(inside), tuple(found), tuple(other.notes()), told,
                        timing)  # fmt: skip


def _explanation(one: Measured, other: OtherSide, progress: Progress) -> Oddity:
    progress(f"explaining {one.pair.name}")
    return other.explain(one)


def _merged(oddities: Sequence[Oddity]) -> list[Oddity]:
    """Each place's first: what explains a tensor's values stands before what merely follows."""
    kept: dict[tuple[str, str], Oddity] = {}
    for oddity in oddities:
        kept.setdefault((oddity.where, oddity.says), oddity)
    return list(kept.values())


def label_of(path: str | Path) -> str:
    """What a report calls a side."""
    return Path(path).name or str(path)
