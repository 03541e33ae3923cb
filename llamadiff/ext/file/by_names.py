"""A checkpoint of an architecture that no table is for: its tensors by the names that llama.cpp's converters give them.

Of the transforms that converters do, each tensor has the one that comes nearest to the file's values; where none does,
rows may lie in another order. What nothing brings near is not compared: it may have been cut or joined.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np
from llamaref.known_tensors import usual_names

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.file.pairs import Pair, floor_of, in_file
from llamadiff.ext.file.transforms import TRANSFORMS, Sizes
from llamadiff.ext.file.views import (
    Array,
    InFile,
    Shaped,
    View,
    plain,
    reordered,
    rows_of,
    sample,
    stacked,
    whole,
    width_of,
)

LEGAL = (
    "identity",
    "plus one",
    "permuted by heads",
    "permuted by kv heads",
    "transposed",
    "-exp",
    "gate half",
    "up half",
)
ROWS = 16  # that tell which transform fits
ALIKE, TINY = 0.5, np.finfo(np.float32).tiny  # the cosine from which on two rows are one, quantized or not
MOST_PRODUCTS = 1 << 37  # of two matrices whose rows are matched
NEAR = 0.5  # NMSE of a tensor that was quantized, or changed, and is still the same
_EXPERT = re.compile(r"(?<=\.)[0-9]+\.(?=\w+\.weight$)")


def pairs_by_names(model: ModelFile, tensors: Mapping[str, View]) -> Iterator[Pair]:
    """The file's tensors that a checkpoint has too, matrices before biases."""
    sources = _sources(model, tensors)
    number = model.hyper_parameter
    heads, kv_heads = number("attention.head_count"), number("attention.head_count_kv")
    sizes = Sizes(*(each if isinstance(each, int) else 0 for each in (heads, kv_heads or heads)))
    orders: dict[str, Array] = {}  # of rows that lie in another order: a bias lies in its matrix's
    for name in sorted(sources.keys() & set(model.tensors), key=lambda name: name.endswith(".bias")):
        ours, (source, view) = in_file(model, name), sources[name]
        order, found = orders.get(f"{name.removesuffix('.bias')}.weight"), None
        if name.endswith(".weight") or order is None:
            found = _nearest(ours, source, view, sizes)
            order = _order_of_rows(ours, view) if found is None else None
        if order is not None:
            orders[name] = order
            found = Pair(ours, reordered(view, order), f"{source}, its rows in another order")
        if found is not None:
            yield found


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
        elif len(view.shape) == 3 and (layer := re.search(r"\.([0-9]+)\.", name)):  # gate and up of all experts
            found |= {f"blk.{layer[1]}.ffn_{half}_exps.weight": (name, view) for half in ("gate", "up")}
    for tensor, parts in experts.items():
        in_order = sorted(parts, key=lambda name: [int(x) for x in re.findall("[0-9]+", name)])
        try:
            found[tensor] = _EXPERT.sub("*.", in_order[0]), stacked([parts[name] for name in in_order])
        except ValueError:  # experts of several sizes
            continue
    return found


def _order_of_rows(ours: InFile, theirs: View) -> Array | None:
    """Which row of a checkpoint's matrix each of the file's is; None where they are no permutation of them."""
    rows, width = rows_of(theirs), width_of(theirs)
    if ours.shape != theirs.shape or rows * rows * width > MOST_PRODUCTS:
        return None
    sides = [whole(view) for view in (ours, theirs)]
    mine, other = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), TINY) for x in sides)
    cosines = mine @ other.T
    order = cosines.argmax(axis=1)
    is_order = len(np.unique(order)) == rows and cosines[np.arange(rows), order].min() > ALIKE
    return order if is_order else None


def _nearest(ours: InFile, name: str, source: View, sizes: Sizes) -> Pair | None:
    """The pair whose transform brings a source nearest, if any does."""
    some = sample(ours, ROWS)
    values = ours.take(some)
    best, found = NEAR, None
    for rule in LEGAL:
        try:
            view = TRANSFORMS[rule]([source], sizes)
            if plain(view.shape) != plain(ours.shape):
                continue
            view = Shaped(view, ours.shape)
            off = float(np.mean((values - view.take(some)) ** 2) / np.mean(values**2))
        except (ValueError, IndexError, ZeroDivisionError):  # it is for tensors of other sizes
            continue
        if off < best:
            made = name + (f", {rule}" if rule != "identity" else "")
            best, found = off, Pair(ours, view, made, floor_of(rule, view.kind))
    return found
