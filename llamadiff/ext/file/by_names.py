"""A checkpoint of an architecture that no table is for: its tensors by the names that llama.cpp's converters give them.

Of the transforms that converters do, each tensor has the one that comes nearest to the file's values. What none brings
near is not compared: it may have been cut, joined or reordered.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np
from llamaref.known_tensors import usual_names

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.file.pairs import Pair, floor_of, in_file
from llamadiff.ext.file.transforms import TRANSFORMS, Sizes
from llamadiff.ext.file.views import InFile, View, rows_of, sample, stacked, width_of

LEGAL = ("identity", "plus one", "permuted by heads", "permuted by kv heads", "transposed",
         "kernel without its middle axis", "-exp", "as a column")  # fmt: skip
ROWS = 16  # that tell which transform fits
NEAR = 0.5  # NMSE of a tensor that was quantized, or changed, and is still the same
_EXPERT = re.compile(r"(?<=\.)[0-9]+\.(?=\w+\.weight$)")


def pairs_by_names(model: ModelFile, tensors: Mapping[str, View]) -> Iterator[Pair]:
    """The file's tensors that a checkpoint has too, in the file's order."""
    sources = _sources(model, tensors)
    number = model.hyper_parameter
    heads, kv_heads = number("attention.head_count"), number("attention.head_count_kv")
    sizes = Sizes(*(each if isinstance(each, int) else 0 for each in (heads, kv_heads or heads)))
    for name in model.tensors:
        if name in sources:
            yield from _nearest(in_file(model, name), *sources[name], sizes)


def _sources(model: ModelFile, tensors: Mapping[str, View]) -> dict[str, tuple[str, View]]:
    """Tensor of the file -> what the checkpoint calls it, and its values; those of experts, stacked."""
    layers = model.hyper_parameter("block_count")
    usual = usual_names(model.architecture, layers if isinstance(layers, int) else 0)
    found: dict[str, tuple[str, View]] = {}
    experts: dict[str, dict[str, View]] = {}
    for name, view in tensors.items():
        merged, number = _EXPERT.subn("", name)
        tensor = usual(name) or (usual(merged) if number else None)
        if tensor is not None and number and usual(name) is None:
            experts.setdefault(tensor, {})[name] = view
        elif tensor is not None:
            found[tensor] = name, view
    for tensor, parts in experts.items():
        in_order = sorted(parts, key=lambda name: [int(x) for x in re.findall("[0-9]+", name)])
        try:
            found[tensor] = _EXPERT.sub("*.", in_order[0]), stacked([parts[name] for name in in_order])
        except ValueError:  # experts of several sizes
            continue
    return found


def _nearest(ours: InFile, name: str, source: View, sizes: Sizes) -> Iterator[Pair]:
    """The pair whose transform brings a source nearest, if any does."""
    some = sample(ours, ROWS)
    values = ours.take(some)
    best, found = NEAR, None
    for rule in LEGAL:
        try:
            view = TRANSFORMS[rule]([source], sizes)
            same_size = rows_of(view) == rows_of(ours) and width_of(view) == width_of(ours)
            off = float(np.mean((values - view.take(some)) ** 2) / np.mean(values**2)) if same_size else np.inf
        except (ValueError, IndexError, ZeroDivisionError):  # it is for tensors of other sizes
            continue
        if off < best:
            made = name + (f", {rule}" if rule != "identity" else "")
            best, found = off, Pair(ours, view, made, floor_of(rule, view.kind))
    if found is not None:
        yield found
