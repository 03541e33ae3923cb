"""Which axes of an op can have other sizes, and what its sources and its result look like then."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from llamaref.weights import block_sizes

from llamadiff.ext.graph.op import Op

# An op's sources and its result, each by its four axes, outermost first. An axis that is a word can have another size,
# one that is a letter keeps its own; "queries+" keeps what it has more than there are queries (a mask's padding).
_ROWS = "batches slices rows columns"
_EACH = f"{_ROWS} -> {_ROWS}"
_PAIR = f"{_ROWS}, {_ROWS} -> {_ROWS}"
_REDUCED = f"{_ROWS} -> batches slices rows x"
OUTER = ("batches", "slices", "heads")  # axes that no kernel has tiles of
AXES: Mapping[str, str] = {
    "MUL_MAT": "batches slices outputs channels, batches slices rows channels -> batches slices rows outputs",
    "MUL_MAT_ID": "a experts outputs channels, b tokens c channels, d e tokens f -> g tokens h outputs",
    "OUT_PROD": "a b c columns, d e c rows -> d e rows columns",
    "SOFT_MAX": "batches heads queries keys, batches heads queries+ keys, a b c heads -> batches heads queries keys",
    "FLASH_ATTN_EXT": "batches heads tokens a, batches heads keys a, batches heads keys b, batches heads tokens+ keys, "
    "c d e heads -> batches tokens heads b",
    "ROPE": "a tokens heads c, d e f tokens, g h i j -> a tokens heads c",
    "GET_ROWS": "a b rows columns, c d e picks -> f g picks columns",
    "SET_ROWS": "a b picks c, d e f picks, g h i j -> k l m n",
    "ADD_ID": "a tokens b columns, c d experts columns, e f tokens g -> a tokens b columns",
    "ARGMAX": "a b rows columns -> c d e rows",
    "CONT": _EACH, "DUP": _EACH, "CPY": f"{_ROWS}, {_ROWS} -> {_ROWS}",
    **dict.fromkeys(("ADD", "SUB", "MUL", "DIV"), _PAIR),
    **dict.fromkeys(("REGLU", "GEGLU", "SWIGLU", "GEGLU_ERF", "GEGLU_QUICK", "SWIGLU_OAI", "SWIGLU_CLAMP"), _PAIR),
    **dict.fromkeys(("RMS_NORM", "NORM", "L2_NORM", "SCALE", "CLAMP", "CUMSUM", "ARGSORT", "LEAKY_RELU"), _EACH),
    **dict.fromkeys(("SUM_ROWS", "MEAN", "TOP_K"), _REDUCED),
    **dict.fromkeys(
        ("ABS", "SGN", "NEG", "STEP", "TANH", "ELU", "RELU", "SIGMOID", "SILU", "EXP", "EXPM1", "SOFTPLUS", "HARDSWISH",
         "HARDSIGMOID", "GELU", "GELU_ERF", "GELU_QUICK", "FLOOR", "CEIL", "TRUNC", "ROUND", "SQR", "SQRT", "LOG",
         "SIN", "COS", "XIELU"), _EACH,
    ),
}  # fmt: skip
EDGES = tuple(size for tile in (16, 32, 64, 128, 256, 1024) for size in (tile - 1, tile, tile + 1))
FEW, TILES = (1, 2, 3, 4, 8), 64  # other sizes; what axes have, of which there are more, while another one has many
MOST = 1 << 22  # values that a result and its sources may have in a case


@dataclass(frozen=True)
class Side:
    """One axis of a source or of the result: so many ``times`` the size that has this name, and so many ``more``."""

    name: str
    times: int
    more: int

    def size(self, sizes: Mapping[str, int]) -> int:
        return self.times * sizes.get(self.name, 0) + self.more


@dataclass(frozen=True)
class Axes:
    """An op's axes that can have other sizes, and by them what its sources and its result (the last) look like.

    ``steps``: what a size is a multiple of, where there are blocks.
    """

    sizes: Mapping[str, int]
    sides: Sequence[Sequence[Side] | None]
    steps: Mapping[str, int]

    def shapes(self, sizes: Mapping[str, int]) -> list[tuple[int, ...] | None]:
        """The shapes of the sources and of the result with these sizes."""
        return [None if side is None else tuple(axis.size(sizes) for axis in side) for side in self.sides]

    @property
    def usual(self) -> dict[str, int]:
        """Sizes while no axis is at an edge: the op's own, or whole tiles."""
        return {name: min(size, self._at_least(name, TILES)) for name, size in self.sizes.items()}

    def varied(self) -> Iterator[dict[str, int]]:
        """Sizes of cases: one axis at an edge at a time, then all of them."""
        for name in self.sizes:
            edges = FEW[:3] if name in OUTER else (*FEW, *EDGES)
            for size in dict.fromkeys(self._at_least(name, size) for size in edges):
                sizes = {**self.usual, name: size}
                if size != self.usual[name] and self._is_small(sizes):
                    yield sizes
        for tile in (16, 32, 64) if len(self.sizes) > 1 else ():
            yield {
                name: self._at_least(name, 1 + place + (0 if name in OUTER else tile))
                for place, name in enumerate(self.sizes)
            }

    def _at_least(self, name: str, size: int) -> int:
        step = self.steps.get(name, 1)
        return -(-size // step) * step

    def _is_small(self, sizes: Mapping[str, int]) -> bool:
        return sum(math.prod(shape) for shape in self.shapes(sizes) if shape is not None) <= MOST


def axes_of(n: Op) -> Axes:
    """The axes of a decoded op; none where it is not known how its sizes go together."""
    sources, _, result = AXES.get(n.name, " -> ").partition(" -> ")
    words = [side.split() for side in (*sources.split(", "), *[""] * len(n.sources))][: len(n.sources)]
    shapes = [None if s is None else s.values.shape for s in n.sources]
    every = [
        (names or ["a"] * 4, shape) for names, shape in zip([*words, result.split()], [*shapes, n.shape], strict=True)
    ]
    sizes: dict[str, int] = {}
    for names, shape in (every[-1], *every[:-1]):  # what the result says goes first
        for name, size in zip(names, shape or (), strict=False):
            if len(name) > 1 and not name.endswith("+"):
                sizes.setdefault(name, size)
    for names, shape in every:
        for name, size in zip(names, shape or (), strict=False):
            if _side(name, size, sizes) is None:
                sizes.pop(name.rstrip("+"))
    sides = [None if shape is None else [_side(name, size, sizes) or Side("", 0, size)
             for name, size in zip(names, shape, strict=True)] for names, shape in every]  # fmt: skip
    kinds = [*("f32" if s is None else s.kind for s in n.sources), n.kind]
    steps = {names[-1]: block_sizes(kind)[0] for (names, _), kind in zip(every, kinds, strict=True) if is_blocks(kind)}
    return Axes(sizes, sides, steps)


def _side(name: str, size: int, sizes: Mapping[str, int]) -> Side | None:
    """How an axis goes with the size of its name; None where it does not, though it should."""
    known = sizes.get(name.rstrip("+"))
    if known is None or (size == 1 < known):  # a letter; or what serves all rows
        return Side("", 0, size)
    if name.endswith("+"):
        return Side(name[:-1], 1, size - known) if size >= known else None
    return Side(name, size // known, 0) if known and size % known == 0 and size else None


def is_blocks(kind: str) -> bool:
    """Whether values of a type are kept in blocks."""
    try:
        return block_sizes(kind)[0] > 1
    except KeyError:
        return False
