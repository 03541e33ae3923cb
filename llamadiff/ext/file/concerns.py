"""What is odd about a file, as far as a second tells: a line for whoever compares something else."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.file.oddities import oddities_of, out_of_line
from llamadiff.ext.file.rules import rule_oddities
from llamadiff.ext.file.statistics import examine
from llamadiff.result.oddity import Oddity

READ = 1 << 24  # bytes of tensors that are looked at, the smallest first


@np.errstate(all="ignore")  # what overflows shows in the values
def concerns(model: ModelFile) -> Iterator[str]:
    """One line, with the command that says all; none where nothing is odd."""
    found = sorted(_oddities(model), key=lambda each: not each.certain)
    if found:
        first, more = found[0], f", and {len(found) - 1} more" if len(found) > 1 else ""
        kind = "is damaged" if first.certain else "looks odd, which may be right"
        yield f"the file {kind}: {first.where}: {first.says}{more}; llamadiff weights {model.path}"


def _oddities(model: ModelFile) -> Iterator[Oddity]:
    weights, left, sizes = model.weights, READ, dict[str, float]()
    for name in sorted(model.tensors, key=lambda name: weights.read_raw(name).nbytes):
        left -= weights.read_raw(name).nbytes
        if left < 0:
            break
        found = examine(weights, name, model.dequantizer.of_type(weights.type(name)))
        sizes[name] = found.stats.rms
        yield from oddities_of(weights, name, found)
    yield from out_of_line(sizes)
    yield from rule_oddities(model)
