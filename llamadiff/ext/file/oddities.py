"""What looks odd in one file's tensors, each with why: certain faults, and what is merely suspicious."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from llamaref import Weights
from llamaref.known_tensors import stem_of
from numpy.typing import NDArray

from llamadiff.ext.file.blocks.fields import blocks_of, halves_of
from llamadiff.ext.file.statistics import TensorRead
from llamadiff.result.oddity import Oddity

Array = NDArray[Any]
FEW_BITS = 0x000F  # float16 bits: a subnormal scale that has at most four of its ten
MEAN = 1.0  # a matrix's mean, in standard deviations
APART = 8.0  # how many times larger or smaller than its neighbours in depth a tensor's RMS may be
SPREADS = 6.0  # and how many times the usual spread between them
LEAST_LAYERS = 4
LEAST_WIDTH = 16  # values of a row, below which a matrix is a list of constants such as ssm_a
SHOWN = 4  # rows that are told by number


def oddities_of(weights: Weights, name: str, found: TensorRead) -> Iterator[Oddity]:
    """What one tensor shows by itself."""
    shape, stats = weights.shape(name), found.stats
    if found.apart:
        where = f"first in row {found.apart_row}"
        yield Oddity(name, f"gguf-py and ggml decode {found.apart} values of {weights.type(name)} otherwise, {where}")
    if stats.nan or stats.inf:
        yield Oddity(name, f"{_not_finite(stats.nan, stats.inf)}, first in row {found.not_finite_row}", "not-finite")
    yield from _scales(weights, name)
    if stats.zeros == 1:
        yield Oddity(name, "all values are zero", "zero", certain=len(shape) > 1)
        return
    if len(shape) < 2 or "norm" in stem_of(name)[1]:  # ssm_norm is a matrix, whose values lie around one
        return
    yield from _rows(name, found, int(np.prod(shape[:-1])))
    if abs(stats.mean) > MEAN * stats.deviation > 0 and shape[-1] >= LEAST_WIDTH:
        yield Oddity(name, f"the mean {stats.mean:.3g} is far from zero for a spread of {stats.deviation:.3g}",
                     certain=False)  # fmt: skip


def _not_finite(nan: int, inf: int) -> str:
    return " and ".join(f"{count} {word}" for count, word in ((nan, "NaN"), (inf, "Inf")) if count)


def _rows(name: str, found: TensorRead, count: int) -> Iterator[Oddity]:
    """Rows that are zero, constant, or equal to others."""
    pairs = found.equal_rows
    texts = {
        "zero": f"{_numbers(found.zero_rows, count)} all zero" if found.zero_rows else "",
        "constant": f"{_numbers(found.constant_rows, count)} constant" if found.constant_rows else "",
        "equal": f"row {pairs[0][0]} equals row {pairs[0][1]}" if pairs else "",
    }
    if len(pairs) > 1:
        texts["equal"] += f", and {len(pairs) - 1} more rows equal earlier ones"
    for text in filter(None, texts.values()):
        yield Oddity(name, text, certain=False)


def _numbers(rows: Sequence[int], count: int) -> str:
    if len(rows) == 1:
        return f"row {rows[0]} is"
    run = rows[-1] - rows[0] == len(rows) - 1
    told = f"{rows[0]} to {rows[-1]}" if run else ", ".join(map(str, rows[:SHOWN])) + (" ..." * (len(rows) > SHOWN))
    return f"rows {told} ({len(rows)} of {count}) are"


def _scales(weights: Weights, name: str) -> Iterator[Oddity]:
    """Blocks whose scale is NaN or infinite, or so small that float16 holds few of its bits."""
    yield from (Oddity(name, says, "scale-not-finite") for says in broken_scales(weights, name))
    for word, size in _sizes_of_scales(weights, name):
        tiny = np.flatnonzero((size > 0) & (size <= FEW_BITS))
        if len(tiny):
            says = f"the {word} of {_place(weights, name, tiny)} is subnormal: float16 keeps at most 4 bits of it"
            yield Oddity(name, says, certain=False)


def broken_scales(weights: Weights, name: str) -> Iterator[str]:
    """The first block whose scale, or whose minimum, is NaN or infinite."""
    for word, size in _sizes_of_scales(weights, name):
        broken = np.flatnonzero(size >= 0x7C00)
        if len(broken):
            value = "NaN" if size[broken[0]] > 0x7C00 else "infinite"
            yield f"the {word} of {_place(weights, name, broken)} is {value}"


def _sizes_of_scales(weights: Weights, name: str) -> Iterator[tuple[str, Array]]:
    """The float16 fields of a tensor's blocks: a word, and their bits without the sign."""
    kind = weights.type(name)
    for field, bits in halves_of(kind, blocks_of(kind, weights.read_raw(name))).items():
        yield {"d": "scale", "m": "minimum"}[field], bits & 0x7FFF


def _place(weights: Weights, name: str, blocks: Array) -> str:
    """The first of some blocks, by its row, and how many there are."""
    per_row = max(1, weights.shape(name)[-1] // weights.block_size(name))
    row, block = divmod(int(blocks[0]), per_row)
    more = f" (and of {len(blocks) - 1} more blocks)" if len(blocks) > 1 else ""
    return f"row {row}, block {block}{more}"


def out_of_line(sizes: Mapping[str, float]) -> Iterator[Oddity]:
    """Tensors whose RMS is far from that of their like in other layers: name -> RMS."""
    groups: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for name, size in sizes.items():
        head, layer, stem = (*name.split(".", 2), "", "")[:3]
        if head == "blk" and layer.isdigit() and size > 0:
            groups[stem].append((name, float(np.log(size))))
    for group in groups.values():
        if len(group) >= LEAST_LAYERS:
            yield from _far(group)


def _far(group: Sequence[tuple[str, float]]) -> Iterator[Oddity]:
    logs = np.array([log for _, log in group])
    middle = float(np.median(logs))
    usual = float(np.median(np.abs(logs - middle)))
    for name, log in group:
        if abs(log - middle) > max(np.log(APART), SPREADS * usual):
            times = float(np.exp(abs(log - middle)))
            word = "larger" if log > middle else "smaller"
            yield Oddity(name, f"its values are {times:.3g} times {word} than in the other layers", certain=False)
