"""A LoRA adapter: is it whole, and does it fit the model that it is for? It adds s B A to matrices W of the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from llamaref import Weights
from llamaref.adapters import ALPHA, EMBEDDING, LowRank, pairs_of, rank_of, scale_of

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.file.against import label_of
from llamadiff.ext.file.pairs import in_file
from llamadiff.ext.file.result import WeightReport
from llamadiff.ext.file.views import sample
from llamadiff.result.oddity import Oddity

ROWS = 256  # of W, by which its size is told
LARGE = 1.0  # times W's size: what is added is seldom as large


def fitted(report: WeightReport, adapter: ModelFile, model: ModelFile) -> WeightReport:
    """An adapter's report with whether it fits a model: its tensors there, of these shapes, and how much is added."""
    found, notes = list(report.oddities), list(report.notes)
    if adapter.architecture != model.architecture:
        says = f"is {adapter.architecture}, {model.path.name} has {model.architecture}: llama.cpp refuses the adapter"
        found.append(Oddity("general.architecture", says, "metadata"))
    low, sizes = adapter.weights, dict[str, float]()
    for name, pair in pairs_of(low).items():
        says = _misfit(low, pair, name, model.weights)
        if says:
            found.append(Oddity(name, says, "shape"))
        elif pair.is_whole and _is_of_one_rank(low, pair, name):
            sizes[name] = _added(low, pair, model, name)
    for name, size in sizes.items():
        if size > LARGE:
            says = f"what is added is {size:.3g} times as large as the weight: is alpha this adapter's?"
            found.append(Oddity(name, says, certain=False))
    if sizes:
        most = max(sizes, key=lambda name: sizes[name])
        often = f"at most {sizes[most]:.2g} times the weight's size ({most})"
        notes.append(f"it adds to {len(sizes)} tensors of {label_of(model.path)}, {often}")
    order = tuple(sorted(found, key=lambda each: not each.certain))
    return replace(report, oddities=order, notes=tuple(notes))


def adapter_oddities(low: Weights) -> Iterator[Oddity]:
    """What is wrong with an adapter by itself: halves without the other one, ranks that differ, no alpha."""
    for name, pair in pairs_of(low).items():
        if not pair.is_whole:
            lacks = ".lora_b" if pair.a else ".lora_a"
            yield Oddity(name, f"has no {lacks}: llama.cpp refuses the adapter", "missing")
        elif not _is_of_one_rank(low, pair, name):
            says = f"lora_a has {low.shape(pair.a)[-2]} rows, lora_b rows of {rank_of(low, pair)}: both are the rank"
            yield Oddity(name, says, "shape")
    if not low.fields.get(ALPHA):
        says = f"{ALPHA} is {low.fields.get(ALPHA, 'not in the file')}: llama.cpp then adds B A, not alpha / rank of it"
        yield Oddity("metadata", says, "metadata", certain=False)


def _is_of_one_rank(low: Weights, pair: LowRank, name: str) -> bool:
    return low.shape(pair.a)[-1 if name == EMBEDDING else -2] == rank_of(low, pair)


def _misfit(low: Weights, pair: LowRank, name: str, weights: Weights) -> str:
    """Why what is there for a tensor does not fit the model; empty where it does."""
    if name not in weights:
        return "is in no tensor of the model: llama.cpp refuses the adapter"
    rows, width = (1, *weights.shape(name))[-2:]
    sides = {pair.a: (rows, 0), pair.b: (width, 0)} if name == EMBEDDING else {pair.a: (width, 1), pair.b: (rows, 0)}
    for half, (size, axis) in sides.items():
        if half and (len(low.shape(half)) < 2 or low.shape(half)[-2:][axis] != size):
            return f"{half.rpartition('.')[2]} is {list(low.shape(half))}, the model's matrix is {[rows, width]}"
    return ""


def _added(low: Weights, pair: LowRank, model: ModelFile, name: str) -> float:
    """The size of s B A beside that of W: by the products of A and B with themselves, without making B A."""
    a, b = (low.whole(half).astype(np.float64) for half in (pair.a, pair.b))
    if name == EMBEDDING:
        a, b = b.T, a
    inner = np.einsum("...ri,...si->...rs", a, a), np.einsum("...or,...os->...rs", b, b)
    added = float(np.sqrt((inner[0] * inner[1]).sum() / (b.size // b.shape[-1] * a.shape[-1])))
    view = in_file(model, name)
    some = view.take(sample(view, ROWS)).astype(np.float64)
    own = float(np.sqrt(np.square(some).mean()))
    return abs(scale_of(low.fields, rank_of(low, pair))) * added / own if own else float("inf")
