"""A saved op -> the cases that a kernel is tried on: it as it was saved, other shapes, other values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from llamaref.weights import block_sizes

from llamadiff.ext.graph.op import Op, Operand
from llamadiff.ext.graph.repro import Memory, SavedInputs, decoded
from llamadiff.ext.replay.axes import OUTER, Axes, axes_of, is_blocks
from llamadiff.ext.replay.values import USUAL, Values, sources_of, values_of
from llamadiff.llamacpp.sent_tensor import NUMPY_TYPES

AS_SAVED = "as saved"


@dataclass(frozen=True)
class Case:
    """One case: its inputs as a file keeps them, the sizes of its named axes, and what its values are called."""

    number: int
    inputs: SavedInputs
    sizes: Mapping[str, int]
    values: str

    @property
    def op(self) -> Op:
        """The op, decoded."""
        return decoded(self.inputs.op)

    @property
    def title(self) -> str:
        """``64 rows, 257 columns, large values``."""
        if self.values == AS_SAVED:
            return AS_SAVED
        sizes = (count(size, name) for name, size in self.sizes.items() if size > 1 or name not in OUTER)
        return ", ".join([*sizes, self.values])


def count(size: int, name: str) -> str:
    """``1 row``, ``17 rows``."""
    one = {"batches": "batch"}.get(name, name.removesuffix("s"))
    return f"{size} {one if size == 1 else name}"


def cases_of(inputs: SavedInputs, seed: int) -> Iterator[Case]:
    """The cases of an op, the saved one first; of one that was generated, itself alone."""
    stored = replace(inputs, op=_on_four_axes(inputs.op))
    n = decoded(stored.op)
    axes = axes_of(n)
    if inputs.case:
        yield Case(0, stored, axes.sizes, inputs.case)
        return
    yield Case(0, stored, axes.sizes, AS_SAVED)
    asked = [(dict(axes.usual), kind) for kind in (USUAL, *values_of(n))]
    asked += [(sizes, USUAL) for sizes in axes.varied()]
    for number, (sizes, kind) in enumerate(asked, 1):
        made = _made(stored, n, axes, sizes, kind, np.random.default_rng([seed, number]))
        if made is not None:
            yield Case(number, replace(made, case=kind.name), sizes, kind.name)


def _on_four_axes(n: Op) -> Op:
    return replace(n, sources=tuple(
        None if s is None else replace(s, values=s.values.reshape(*[1] * (4 - s.values.ndim), *s.values.shape))
        for s in n.sources
    ))  # fmt: skip


def _made(
    stored: SavedInputs, n: Op, axes: Axes, sizes: Mapping[str, int], kind: Values, dice: np.random.Generator
) -> SavedInputs | None:
    *shapes, result = axes.shapes(sizes)
    assert result is not None
    sources = sources_of(stored.op, n, shapes, kind, dice)
    if sources is None:
        return None
    op = replace(stored.op, sources=sources, shape=result)
    return replace(stored, op=op, memory=stored.memory and _in_rows(stored.memory, op))


def _in_rows(old: Memory, n: Op) -> Memory:
    """How ggml holds an op all of whose sources lie in rows one after the other."""
    there: list[tuple[tuple[int, ...], Operand]] = []
    for s in decoded(n).sources:
        if s is not None:
            there.append((s.values.shape[::-1], s))
    there = there[: len(old.types)]
    strides = tuple(_strides(kind, sizes) for kind, (sizes, _) in zip(old.types, there, strict=True))
    return replace(
        old, line=_line(old.line, n, [sizes for sizes, _ in there], strides),
        sizes=tuple(sizes for sizes, _ in there), strides=strides,
    )  # fmt: skip


def _strides(kind: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    per_block, size = block_sizes(kind) if is_blocks(kind) else (1, np.dtype(NUMPY_TYPES[kind]).itemsize)
    row = sizes[0] // per_block * size
    return (size, row, row * sizes[1], row * sizes[1] * sizes[2])


def _line(old: str, n: Op, sizes: list[tuple[int, ...]], strides: tuple[tuple[int, ...], ...]) -> str:
    """The line for ggml's own tests (``Node.in_memory``) with other sizes; an empty one where the old one is."""
    words = old.split()
    try:
        parameters = int(words[6])
        numbers = [words[8 + parameters + 9 * place] for place in range(len(sizes))]
    except (IndexError, ValueError):
        return ""
    head = [*words[:2], *map(str, reversed(n.shape)), *words[6 : 8 + parameters]]
    for number, own, steps in zip(numbers, sizes, strides, strict=True):
        head += [number, *map(str, own), *map(str, steps)]
    return " ".join([*head, words[-1]]) + "\n"
