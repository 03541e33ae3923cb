"""Every op that ggml's CPU computes forwards: right on random inputs and parameters, and each mistake is WRONG.

ggml itself computes the op; the judge computes it again. A mistake is put into what the judge computes from.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import run
from llamaref import Weights
from one_op import BOOL, FLOAT, INT, LONG, SIZE, Blocks, Graph, Input, Then
from optional import needs_slices
from sent import own_rounding

from llamadiff.ext.graph.check import distance, replay
from llamadiff.ext.graph.node_checker import NodeChecker
from llamadiff.ext.graph.op import Array, Op, function_of
from llamadiff.judge.verdict import of_node
from llamadiff.llamacpp.request import Request
from llamadiff.numerics import tolerances

RUNS = [
    pytest.param(range(10), id="few"),
    pytest.param(range(10, 110), id="many", marks=pytest.mark.slow),
]
HALF = np.float16
Mistake = Callable[[Op], Op]


@dataclass(frozen=True)
class Case:
    """What ggml's constructor ``name`` is called with, and mistakes by name."""

    name: str
    inputs: Sequence[Input]
    types: Sequence[Any] = ()
    values: Sequence[Any] = ()
    mistakes: Sequence[tuple[str, Mistake]] = ()
    then: Then | None = None


class Dice:
    """Random numbers of one run."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def n(self, low: int, high: int) -> int:
        """From ``low`` to ``high``."""
        return int(self.rng.integers(low, high + 1))

    def ns(self, count: int, low: int, high: int) -> list[int]:
        return [self.n(low, high) for _ in range(count)]

    def of(self, *choices: Any) -> Any:
        return choices[self.n(0, len(choices) - 1)]

    def x(self, *shape: int, size: float = 1.0, off: float = 0.0) -> Array:
        return (size * self.rng.standard_normal(shape) + off).astype(np.float32)

    def shape(self, most: int = 9) -> list[int]:
        return [*self.ns(2, 1, 3), self.n(1, 7), self.n(2, most)]


# Mistakes


def whole(place: int, by: int = 1) -> tuple[str, Mistake]:
    """A parameter that is a whole number, off by one."""

    def made(n: Op) -> Op:
        ints = n.ints.copy()
        ints[place] += by
        return replace(n, params=ints.tobytes())

    return f"parameter {place} plus {by}", made


def wholes(*places: int) -> list[tuple[str, Mistake]]:
    return [whole(place) for place in places]


def real(place: int, factor: float = 1.01) -> tuple[str, Mistake]:
    """A parameter that is a real number, off by a hundredth."""

    def made(n: Op) -> Op:
        floats = n.floats.copy()
        floats[place] *= np.float32(factor)
        return replace(n, params=floats.tobytes())

    return f"parameter {place} times {factor}", made


def source(place: int, change: Callable[[Array], Array], word: str) -> tuple[str, Mistake]:
    """A source that is read otherwise."""

    def made(n: Op) -> Op:
        sources = list(n.sources)
        old = sources[place]
        if old is not None:
            sources[place] = replace(old, values=change(old.values))
        return replace(n, sources=tuple(sources))

    return f"source {place} {word}", made


def rolled(place: int = 0, axis: int = -1) -> tuple[str, Mistake]:
    return source(place, lambda x: np.roll(x, 1, axis), f"one to the side on axis {axis}")


def larger(place: int = 0) -> tuple[str, Mistake]:
    return source(place, lambda x: x * np.float32(1.01), "a hundredth larger")


def first_lost(place: int = 0) -> tuple[str, Mistake]:
    """A source's largest value is taken for nothing."""

    def change(x: Array) -> Array:
        x = x.copy()
        x.reshape(-1)[np.abs(np.where(np.isfinite(x), x, 0)).argmax()] = 0
        return x

    return source(place, change, "without its largest value")


def named(name: str) -> tuple[str, Mistake]:
    """Another op."""
    return f"taken for {name}", lambda n: replace(n, name=name)


# Cases

CASES: dict[str, Callable[[Dice], Case]] = {}


def case(make: Callable[[Dice], Case]) -> Callable[[Dice], Case]:
    CASES[make.__name__] = make
    return make


@dataclass(frozen=True)
class Places:
    """Sizes and steps of a convolution, the innermost axis first."""

    kernel: list[int]
    image: list[int]
    params: list[int]

    @classmethod
    def of(cls, d: Dice, axes: int) -> Places:
        kernel, strides, paddings, dilations = (d.ns(axes, *ends) for ends in ((1, 4), (1, 3), (0, 2), (1, 3)))
        sizes = zip(kernel, strides, dilations, strict=True)
        image = [(k - 1) * dilation + 1 + stride + d.n(0, 6) for k, stride, dilation in sizes]
        return cls(kernel, image, [*strides, *paddings, *dilations])


def kernels(d: Dice, *shape: int) -> Array:
    return d.x(*shape).astype(d.of(np.float32, HALF))


@case
def conv_2d_direct(d: Dice) -> Case:
    p, channels = Places.of(d, 2), d.n(1, 40)
    inputs = [kernels(d, d.n(1, 9), channels, *p.kernel[::-1]), d.x(d.n(1, 3), channels, *p.image[::-1])]
    return Case("conv_2d_direct", inputs, [INT] * 6, p.params, [*wholes(*range(6)), rolled(0), first_lost(1)])


@case
def conv_3d_direct(d: Dice) -> Case:
    p, (channels, outs, count) = Places.of(d, 3), (d.n(1, 8), d.n(1, 5), d.n(1, 2))
    inputs = [kernels(d, channels * outs, *p.kernel[::-1]), d.x(channels * count, *p.image[::-1])]
    mistakes = [*wholes(*range(9)), rolled(0, -4), first_lost(1)]
    return Case("conv_3d_direct", inputs, [INT] * 12, [*p.params, channels, count, outs], mistakes)


@case
def conv_2d_dw_direct(d: Dice) -> Case:
    p, channels = Places.of(d, 2), d.n(1, 9)
    inputs = [kernels(d, channels, 1, *p.kernel[::-1]), d.x(d.n(1, 3), channels, *p.image[::-1])]
    return Case("conv_2d_dw_direct", inputs, [INT] * 6, p.params, [*wholes(*range(6)), rolled(0, -4)])


@case
def im2col(d: Dice) -> Case:
    p, channels = Places.of(d, 2), d.n(1, 5)
    inputs = [d.x(d.n(1, 3), channels, *p.kernel[::-1]), d.x(d.n(1, 3), channels, *p.image[::-1])]
    values = [*p.params, True, d.of(0, 1)]
    return Case("im2col", inputs, [*[INT] * 6, BOOL, INT], values, [*wholes(*range(6)), rolled(1)])


@case
def im2col_1d(d: Dice) -> Case:
    p, channels = Places.of(d, 1), d.n(1, 5)
    inputs = [d.x(1, d.n(1, 3), channels, *p.kernel), d.x(1, d.n(1, 3), channels, *p.image)]
    stride, padding, dilation = p.params
    values = [stride, 0, padding, 0, dilation, 0, False, d.of(0, 1)]
    return Case("im2col", inputs, [*[INT] * 6, BOOL, INT], values, [*wholes(0, 2, 4), rolled(1)])


@case
def im2col_3d(d: Dice) -> Case:
    p, channels = Places.of(d, 3), d.n(1, 4)
    inputs = [d.x(channels * d.n(1, 3), *p.kernel[::-1]), d.x(channels * d.n(1, 3), *p.image[::-1])]
    values = [channels, *p.params, d.of(0, 1)]
    return Case("im2col_3d", inputs, [LONG, *[INT] * 10], values, [*wholes(*range(9)), rolled(1)])


@case
def col2im_1d(d: Dice) -> Case:
    size, outs, steps, stride = d.n(2, 7), d.n(1, 5), d.n(2, 12), d.n(1, 4)
    cut = d.n(0, (size - 1) // 2)
    x = as_kind(d.x(1, 1, steps, size * outs), d.of("f32", "f16", "bf16"))
    mistakes = [rolled(0), rolled(0, -2), *smaller_stride(stride)]
    return Case("col2im_1d", [x], [INT] * 3, [stride, outs, cut], mistakes)


def smaller_stride(stride: int) -> list[tuple[str, Mistake]]:
    """What is spread lies nearer together; a larger one would not fit the result."""
    return [whole(0, -1)] if stride > 1 else []


@case
def conv_transpose_1d(d: Dice) -> Case:
    channels, stride = d.n(1, 40), d.n(1, 4)
    inputs = [kernels(d, 1, channels, d.n(1, 6), d.n(1, 7)), d.x(1, 1, channels, d.n(2, 12))]
    mistakes = [rolled(0), rolled(1), first_lost(1), larger(0), *smaller_stride(stride)]
    return Case("conv_transpose_1d", inputs, [INT] * 3, [stride, 0, 1], mistakes)


@case
def conv_transpose_2d(d: Dice) -> Case:
    channels, stride = d.n(1, 40), d.n(1, 4)
    inputs = [kernels(d, channels, d.n(1, 5), *d.ns(2, 1, 4)), d.x(d.n(1, 3), channels, *d.ns(2, 2, 6))]
    mistakes = [rolled(0), rolled(1), rolled(1, -2), first_lost(1), *smaller_stride(stride)]
    return Case("conv_transpose_2d_p0", inputs, [INT], [stride], mistakes)


@case
def pool_1d(d: Dice) -> Case:
    size, stride = d.n(2, 4), d.n(1, 3)
    x = d.x(*d.shape()[:3], size + stride + d.n(0, 9))
    values = [d.of(0, 1), size, stride, d.n(0, size // 2)]
    return Case("pool_1d", [x], [INT] * 4, values, [*wholes(1, 2, 3), whole(0, 1 - 2 * values[0])])


@case
def pool_2d(d: Dice) -> Case:
    sizes, strides = d.ns(2, 2, 4), d.ns(2, 1, 3)
    image = [size + stride + d.n(0, 7) for size, stride in zip(sizes, strides, strict=True)]
    kind, paddings = d.of(0, 1), [d.n(0, size // 2) for size in sizes]
    mistakes = [*wholes(1, 2, 3, 4, 5, 6), whole(0, 1 - 2 * kind)]
    values = [kind, *sizes, *strides, *paddings]
    return Case("pool_2d", [d.x(*d.ns(2, 1, 3), *image[::-1])], [*[INT] * 5, FLOAT, FLOAT], values, mistakes)


@case
def upscale(d: Dice) -> Case:
    mode = d.of(0, 1, 2, 1 | 512) | d.of(0, 256)
    x, shape = d.x(*d.ns(2, 1, 3), *d.ns(2, 2, 9)), [*d.ns(2, 1, 4), *d.ns(2, 2, 20)]
    kind = mode & 0xFF
    mistakes = [whole(0, 1 - kind if kind != 1 else -1), rolled(0), rolled(0, -2)]
    return Case("interpolate", [x], [*[LONG] * 4, INT], [*shape[::-1], mode], mistakes)


@case
def pad(d: Dice) -> Case:
    name = d.of("pad_ext", "pad_ext_circular")
    x, params = d.x(*d.ns(4, 3, 6)), d.ns(8, 0, 2)
    return Case(name, [x], [INT] * 8, params, [rolled(0), rolled(0, -3)])


@case
def pad_reflect_1d(d: Dice) -> Case:
    x = d.x(*d.shape()[:3], d.n(4, 12))
    return Case("pad_reflect_1d", [x], [INT] * 2, d.ns(2, 0, 3), [rolled(0)])


@case
def group_norm(d: Dice) -> Case:
    groups = d.n(1, 4)
    x = d.x(d.n(1, 3), groups * d.n(1, 6), *d.ns(2, 1, 7), off=1)
    return Case("group_norm", [x], [INT, FLOAT], [groups, d.of(1e-6, 1e-2)], [rolled(0, -3), whole(0)])


@case
def norms(d: Dice) -> Case:
    mistakes = [rolled(0), named("L2_NORM"), named("NORM"), named("RMS_NORM")]
    name = d.of("norm", "rms_norm", "l2_norm")
    x = d.x(*d.shape()[:3], d.n(3, 70), off=0.5)
    return Case(name, [x], [FLOAT], [1e-5], [each for each in mistakes if not each[0].endswith(f" {name.upper()}")])


@case
def arange(d: Dice) -> Case:
    start, step = d.n(-5, 5) / 2, d.n(1, 9) / 4
    return Case("arange", [], [FLOAT] * 3, [start, start + step * d.n(2, 40), step], [real(2)])


@case
def timestep_embedding(d: Dice) -> Case:
    steps = d.rng.uniform(0, d.of(1, 50, 1000), (1, 1, 1, d.n(1, 6))).astype(np.float32)
    period = d.of(100, 10000)
    mistakes = [whole(1, period // 10), larger(0)]
    return Case("timestep_embedding", [steps], [INT] * 2, [d.n(4, 330), period], mistakes)


@case
def win_part(d: Dice) -> Case:
    x, size = d.x(1, *d.ns(2, 2, 12), d.n(1, 5)), d.n(2, 5)
    return Case("win_part", [x], [INT], [size], [rolled(0, -2), rolled(0, -3)])


@case
def win_unpart(d: Dice) -> Case:
    (height, width), size = d.ns(2, 2, 12), d.n(2, 5)
    x = d.x(math.ceil(height / size) * math.ceil(width / size), size, size, d.n(1, 5))
    return Case("win_unpart", [x], [INT] * 3, [width, height, size], [rolled(0, -2), rolled(0, -3)])


@case
def get_rel_pos(d: Dice) -> Case:
    size = d.n(2, 7)
    return Case("get_rel_pos", [d.x(1, 1, 2 * size - 1, d.n(1, 9)).astype(HALF)], [INT] * 2, [size, size],
                [rolled(0, -2), source(0, lambda x: x[..., ::-1, :], "backwards")])  # fmt: skip


@case
def add_rel_pos(d: Dice) -> Case:
    size, windows, (rows, columns) = d.n(2, 6), d.n(1, 4), d.ns(2, 2, 5)
    inputs = [d.x(1, windows, rows * columns, size * size), *(d.x(windows, rows, columns, size) for _ in range(2))]
    swapped: Mistake = lambda n: replace(n, sources=(n.sources[0], n.sources[2], n.sources[1]))  # noqa: E731
    return Case("add_rel_pos", inputs, [], [], [("rows for columns", swapped), rolled(1), rolled(2)])


ROPES = {"normal": 0, "neox": 2, "mrope": 8, "vision": 24, "imrope": 40}


def rotated(kind: str) -> Callable[[Dice], Case]:
    def make(d: Dice) -> Case:
        mode = ROPES[kind]
        heads, tokens, pairs = d.n(1, 4), d.n(2, 9), 4 * d.n(2, 8)
        width = 2 * pairs if mode == 24 or d.of(0, 1) else 2 * pairs + 2 * d.n(1, 8)
        multi = mode >= 8
        positions = np.sort(d.rng.integers(0, 400, (4 if multi else 1) * tokens)).astype(np.int32)
        sections = [*d.ns(3, 1, max(1, pairs // 3)), d.of(0, 1)]
        if mode == 24:
            sections = [pairs // 2, pairs // 2, 0, 0]
        factors = d.rng.uniform(1, 4, (1, 1, 1, 2 * pairs)).astype(np.float32) if d.of(0, 0, 1) else None
        x = d.x(d.n(1, 2), tokens, heads, width).astype(d.of(np.float32, np.float32, HALF))
        dims = pairs if mode == 24 else 2 * pairs
        yarn = [d.of(0.5, 0.25), 1.0, 1.0] if mode != 24 and d.of(0, 1) else [1.0, 0.0, d.of(1.0, 1.3)]
        rest = [4096, d.of(100.0, 10000.0), *yarn, 32.0, 1.0]
        inputs = [x, positions.reshape(1, 1, 1, -1), factors]
        mistakes = [whole(1, 2 if mode != 24 else -2), real(5), rolled(0), rolled(1), real(8)]
        if not multi:
            return Case("rope_ext", inputs, [INT] * 3 + [FLOAT] * 6, [dims, mode, *rest], mistakes[1:])
        turned = (ctypes.c_int * 4)(*sections)
        types = [INT, ctypes.c_void_p, INT, INT, *[FLOAT] * 6]
        mistakes += [whole(11), ("one position for all", _first_position)]
        return Case("rope_multi", inputs, types, [dims, ctypes.addressof(turned), mode, *rest], mistakes[1:],
                    then=lambda *_, keep=turned: None)  # fmt: skip

    return make


def _first_position(n: Op) -> Op:
    """The temporal position in place of height and width."""
    positions = n.sources[1]
    assert positions is not None
    first = positions.values.reshape(4, -1)[:1].repeat(4, 0).reshape(positions.values.shape)
    return replace(n, sources=(n.sources[0], replace(positions, values=first), n.sources[2]))


CASES |= {f"rope {kind}": rotated(kind) for kind in ROPES}


def add_sinks(name: str, sinks: Array | None) -> Then | None:
    if sinks is None:
        return None

    def then(graph: Graph, context: int, node: Any) -> None:
        function = getattr(graph.base, name)
        function.restype, function.argtypes = None, [graph.pointer, graph.pointer]
        function(node, graph.tensor(context, sinks))

    return then


def attended(tokens: Callable[[Dice], int], keys: Callable[[Dice], int]) -> Callable[[Dice], Case]:
    def make(d: Dice) -> Case:
        kv_heads, (t, s) = d.n(1, 2), (tokens(d), keys(d))
        heads, width, outer = kv_heads * d.n(1, 3), 32 * d.n(1, 3), d.of(1, 1, 2)
        kind = d.of("f16", "f16", "f32", "bf16", "q8_0", "q4_0")
        k, v = (as_kind(d.x(outer, kv_heads, s, size), kind) for size in (width, 32 * d.n(1, 3)))
        bias = d.of(0.0, 0.0, 8.0)
        masks = d.of(1, heads), d.of(1, outer)
        mask = np.where(d.rng.random((*masks[::-1], t, s)) < 0.2, -np.inf, d.x(*masks[::-1], t, s)).astype(HALF)
        given = mask if bias or d.of(0, 1) else None
        sinks = d.x(1, 1, 1, heads, off=math.log(s)) if d.of(0, 1) else None
        values = [width**-0.5, bias, d.of(0.0, 0.0, 3.0)]
        mistakes = [real(0, 1.2), rolled(1, -2), rolled(2, -2), real(2, 0.5), real(1, 0.5)]
        if sinks is not None:
            mistakes.append(("no sinks", lambda n: replace(n, sources=(*n.sources[:4], *[None] * 2))))
        if given is not None:
            mistakes.append(rolled(3))
        return Case("flash_attn_ext", [d.x(outer, heads, t, width), k, v, given], [FLOAT] * 3, values, mistakes,
                    add_sinks("ggml_flash_attn_ext_add_sinks", sinks))  # fmt: skip

    return make


CASES |= {
    "flash attention of few": attended(lambda d: d.n(1, 9), lambda d: d.n(4, 90)),
    "flash attention of one, split": attended(lambda d: 1, lambda d: d.n(512, 700)),
    "flash attention of many": attended(lambda d: d.n(64, 80), lambda d: d.n(4, 90)),
}


@case
def soft_max_ext(d: Dice) -> Case:
    heads, t, s = d.n(1, 5), d.n(1, 6), d.n(2, 40)
    mask = np.where(d.rng.random((1, 1, t, s)) < 0.2, -np.inf, d.x(1, 1, t, s)).astype(d.of(np.float32, HALF))
    bias = d.of(0.0, 8.0)
    sinks = d.x(1, 1, 1, heads) if d.of(0, 1) else None
    inputs = [d.x(d.n(1, 2), heads, t, s), mask if bias or d.of(0, 1) else None]
    mistakes = [real(0), real(1, 0.5), rolled(0), rolled(1)]
    return Case("soft_max_ext", inputs, [FLOAT] * 2, [0.7, bias], mistakes,
                add_sinks("ggml_soft_max_add_sinks", sinks))  # fmt: skip


@case
def cross_entropy_loss(d: Dice) -> Case:
    shape = [*d.ns(2, 1, 2), d.n(1, 30), d.n(2, 90)]
    labels = np.abs(d.x(*shape))
    labels /= labels.sum(axis=-1, keepdims=True)
    return Case("cross_entropy_loss", [d.x(*shape, size=3), labels], mistakes=[larger(0), larger(1), rolled(1)])


@case
def set_or_acc(d: Dice) -> Case:
    shape = d.ns(4, 2, 5)
    part = [d.n(1, size) for size in shape]
    a, b = d.x(*shape), d.x(*part)
    start = sum(d.n(0, size - less) * step for size, less, step in zip(shape, part, a.strides, strict=True))
    mistakes = [rolled(0), rolled(1, -2), named("SET"), named("ACC")]
    name = d.of("set", "acc")
    wrong = [each for each in mistakes if not each[0].endswith(f" {name.upper()}")]
    return Case(name, [a, b], [SIZE] * 4, [*a.strides[2::-1], start], wrong)


@case
def diag(d: Dice) -> Case:
    return Case("diag", [d.x(*d.ns(2, 1, 3), 1, d.n(2, 9))], mistakes=[rolled(0)])


@case
def diag_mask(d: Dice) -> Case:
    kind, (rows, columns) = d.of("inf", "zero"), (d.n(1, 6), d.n(7, 12))
    return Case(f"diag_mask_{kind}", [d.x(*d.ns(2, 1, 3), rows, columns)], [INT], [d.n(0, 3)], [whole(0), rolled(0)])


@case
def count_equal(d: Dice) -> Case:
    shape = [1, 1, d.n(1, 9), d.n(2, 40)]  # ggml counts wrongly over more axes: docs/found.md
    a, b = (d.rng.integers(0, 3, shape).astype(np.int32) for _ in range(2))
    b.reshape(-1)[0] = a.reshape(-1)[0]
    return Case("count_equal", [a, b], mistakes=[source(0, lambda x: x + 3, "that is never so")])


@case
def sorted_(d: Dice) -> Case:
    order = d.of(0, 1)
    return Case("argsort", [d.x(*d.shape(30))], [INT], [order], [whole(0, 1 - 2 * order)])


@case
def top_k(d: Dice) -> Case:
    x = d.x(*d.shape(30))
    return Case("top_k", [x], [INT], [d.n(1, x.shape[-1] - 1)], [source(0, np.negative, "of the other sign")])


@case
def argmax(d: Dice) -> Case:
    return Case("argmax", [d.x(1, 1, d.n(2, 9), d.n(2, 60))], mistakes=[rolled(0)])


@case
def sums(d: Dice) -> Case:
    x = as_kind(d.x(*d.shape(60), off=1), "f32")
    return Case(d.of("sum", "sum_rows", "mean", "cumsum"), [x], mistakes=[larger(0), first_lost(0)])


@case
def sum_of_halves(d: Dice) -> Case:
    x = as_kind(d.x(*d.shape(60), off=1), d.of("f16", "bf16"))
    return Case("sum", [x], mistakes=[source(0, np.negative, "negative")])


@case
def fill(d: Dice) -> Case:
    return Case("fill", [as_kind(d.x(*d.shape()), d.of("f32", "f16"))], [FLOAT], [float(d.x(1)[0])], [real(0)])


@case
def tri(d: Dice) -> Case:
    size, kind = d.n(2, 8), d.n(0, 3)
    return Case("tri", [d.x(*d.ns(2, 1, 3), size, size)], [INT], [kind], [whole(0, 1 if kind < 3 else -1), rolled(0)])


@case
def solve_tri(d: Dice) -> Case:
    outer, rows = d.ns(2, 1, 2), d.n(2, 20)
    matrix = d.x(*outer, rows, rows, size=0.3) + 2 * np.eye(rows, dtype=np.float32)
    mistakes = [rolled(1, -2), source(0, lambda x: x.swapaxes(-1, -2), "on its side")]
    return Case("solve_tri", [matrix, d.x(*outer, rows, d.n(1, 6))], [BOOL] * 3, [True, True, False], mistakes)


def as_kind(x: Array, kind: str) -> Input:
    """As one_op gives values of a type: bfloat16 as its bits."""
    if kind.startswith("q"):
        return Blocks(kind, x)
    if kind == "bf16":
        return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return x.astype({"f32": np.float32, "f16": HALF}[kind])


UNARY = [
    "ABS", "SGN", "NEG", "STEP", "TANH", "ELU", "RELU", "SIGMOID", "GELU", "GELU_QUICK", "SILU", "HARDSWISH",
    "HARDSIGMOID", "EXP", "EXPM1", "SOFTPLUS", "GELU_ERF", None, "FLOOR", "CEIL", "ROUND", "TRUNC",
]  # fmt: skip


def of_one(number: int, kind: str) -> Callable[[Dice], Case]:
    def make(d: Dice) -> Case:
        mistakes = [source(0, lambda x: x - np.float32(0.5), "smaller by a half"), named("ABS" if number else "NEG")]
        return Case("unary", [as_kind(d.x(*d.shape(60), size=3), kind)], [INT], [number], mistakes)

    return make


KINDS = ("f32", "f16", "bf16")
CASES |= {f"{name} {kind}": of_one(number, kind) for (number, name), kind in itertools.product(enumerate(UNARY), KINDS)
          if name}  # fmt: skip


def function(name: str, kind: str, low: float) -> Callable[[Dice], Case]:
    def make(d: Dice) -> Case:
        x = d.rng.uniform(low, 5, d.shape(60)).astype(np.float32)
        return Case(name, [as_kind(x, kind)], mistakes=[larger(0), named("NEG")])

    return make


CASES |= {f"{name} {kind}": function(name, kind, 0.1 if name in ("sqrt", "log") else -5)
          for name, kind in itertools.product(("sqr", "sqrt", "log", "sin", "cos"), KINDS)}  # fmt: skip


@case
def xielu(d: Dice) -> Case:
    x, values = as_kind(d.x(*d.shape(40)), d.of(*KINDS)), [*d.rng.uniform(0.2, 2, 3).tolist(), -1e-6]
    return Case("xielu", [x], [FLOAT] * 4, values, [larger(0), *(real(place, 1.1) for place in (1, 2, 3))])


@case
def leaky_relu(d: Dice) -> Case:
    x = as_kind(d.x(*d.shape(40)), d.of("f32", "f16"))
    return Case("leaky_relu", [x], [FLOAT, BOOL], [0.1, False], [real(0, 1.2)])


GLUS = ["REGLU", "GEGLU", "SWIGLU", None, "GEGLU_ERF", "GEGLU_QUICK"]


def gated(number: int, kind: str) -> Callable[[Dice], Case]:
    def make(d: Dice) -> Case:
        shape = d.shape(40)
        other: Mistake = lambda n: replace(n, sources=n.sources[1::-1])  # noqa: E731
        if d.of(0, 1):
            inputs = [as_kind(d.x(*shape, size=2), kind) for _ in range(2)]
            return Case("glu_split", inputs, [INT], [number], [("the other way round", other)])
        turned = d.of(0, 1)
        x = as_kind(d.x(*shape[:3], 2 * shape[3], size=2), kind)
        return Case("glu", [x], [INT, BOOL], [number, bool(turned)], [whole(1, 1 - 2 * turned)])

    return make


CASES |= {f"{name} {kind}": gated(number, kind) for (number, name), kind in itertools.product(enumerate(GLUS), KINDS)
          if name}  # fmt: skip


@case
def swiglu_oai(d: Dice) -> Case:
    shape = d.shape(40)
    inputs = [d.x(*shape, size=3) for _ in range(2)]
    return Case("swiglu_oai", inputs, [FLOAT] * 2, [1.702, 7.0], [real(2), real(3, 0.5)])


@case
def swiglu_clamp(d: Dice) -> Case:
    shape, kind = d.shape(40), d.of("f32", "f16")
    return Case("swiglu_clamp", [as_kind(d.x(*shape, size=3), kind) for _ in range(2)], [FLOAT], [3.0], [real(3, 0.5)])


def of_two(name: str, kinds: tuple[str, str]) -> Callable[[Dice], Case]:
    def make(d: Dice) -> Case:
        shape = d.shape(40)
        other = [d.of(1, size) for size in shape]
        b = np.sign(d.x(*other)) * d.rng.uniform(0.5, 2, other).astype(np.float32)
        inputs = [as_kind(d.x(*shape), kinds[0]), as_kind(b, kinds[1])]
        return Case(name, inputs, mistakes=[source(1, np.negative, "negative")])

    return make


PAIRS = [("f32", "f32"), ("f16", "f16"), ("f16", "f32"), ("bf16", "bf16"), ("bf16", "f32")]
CASES |= {f"{name} {'+'.join(kinds)}": of_two(name, kinds)
          for name, kinds in itertools.product(("add", "sub", "mul", "div"), PAIRS)}  # fmt: skip


@case
def add_to_blocks(d: Dice) -> Case:
    """As an adapter is merged into a weight."""
    shape = [*d.ns(2, 1, 2), d.n(1, 9), 32 * d.n(1, 4)]
    inputs = [Blocks(d.of("q8_0", "q4_0", "q5_0"), d.x(*shape)), d.x(*shape)]
    return Case("add", inputs, mistakes=[source(1, np.negative, "negative")])


@case
def scale_bias(d: Dice) -> Case:
    return Case("scale_bias", [d.x(*d.shape(40))], [FLOAT] * 2, [1.7, -0.3], [real(0), real(1)])


@case
def clamp(d: Dice) -> Case:
    x = as_kind(d.x(*d.shape(40)), d.of("f32", "f16"))
    return Case("clamp", [x], [FLOAT] * 2, [-0.5, 0.7], [real(0, 1.1), real(1, 1.1)])


@case
def concat(d: Dice) -> Case:
    axis, shape = d.n(0, 3), d.shape()
    other = [d.n(1, 5) if 3 - i == axis else size for i, size in enumerate(shape)]
    return Case("concat", [d.x(*shape), d.x(*other)], [INT], [axis], [rolled(0), rolled(1)])


@case
def repeat_4d(d: Dice) -> Case:
    shape = d.shape()
    return Case("repeat_4d", [d.x(*shape)], [LONG] * 4, [size * d.n(1, 3) for size in shape[::-1]], [rolled(0)])


@case
def get_rows(d: Dice) -> Case:
    rows, kind = d.n(2, 9), d.of("f32", "f16", "bf16")
    numbers = d.rng.integers(0, rows, (1, 1, 1, d.n(2, 6))).astype(np.int32)
    return Case("get_rows", [as_kind(d.x(1, 1, rows, d.n(2, 40)), kind), numbers], mistakes=[rolled(0), rolled(0, -2)])


@case
def out_prod(d: Dice) -> Case:
    shared, outer = d.n(1, 20), d.ns(2, 1, 2)
    inputs = [d.x(*outer, shared, d.n(1, 9)), d.x(*outer, shared, d.n(2, 9))]
    return Case("out_prod", inputs, mistakes=[rolled(1), first_lost(0)])


@case
def mul_mat(d: Dice) -> Case:
    inner, outer, kind = d.n(1, 300), d.n(1, 3), d.of(*KINDS)
    w = as_kind(d.x(1, outer, d.n(1, 20), inner), kind)
    x = as_kind(d.x(1, outer * d.n(1, 2), d.n(1, 30), inner), d.of("f32", kind))  # a kernel in 16 bits, by IM2COL's
    return Case("mul_mat", [w, x], mistakes=[larger(0), first_lost(1)])


# The judge


def judged(n: Op, found: Array) -> tuple[str, float, float]:
    """The verdict of a node, its NMSE and the limit, as llamadiff backend has them."""
    rule = tolerances.rule_for(tolerances.RULES, "node", n.name, "*")
    best = replay(n, found, enough=rule.match)
    assert best is not None, n.name
    match = rule.match + best.rounding
    return of_node(best.nmse, match).verdict, best.nmse, match


@pytest.fixture(scope="module")
def graph() -> Graph:
    return Graph()


OF_IMAGES = {
    "add_rel_pos", "col2im_1d", "conv_2d_direct", "conv_2d_dw_direct", "conv_3d_direct", "conv_transpose_1d",
    "conv_transpose_2d", "get_rel_pos", "im2col", "im2col_1d", "im2col_3d", "pool_1d", "pool_2d", "timestep_embedding",
    "upscale", "win_part", "win_unpart",
}  # fmt: skip
NAMES = [pytest.param(name, marks=[needs_slices("watch")] * (name in OF_IMAGES)) for name in CASES]


@pytest.mark.parametrize("seeds", RUNS)
@pytest.mark.parametrize("name", NAMES)
def test_right_at_random_and_mistakes_are_wrong(graph: Graph, name: str, seeds: range) -> None:
    caught = set[str]()
    for seed in seeds:
        made = CASES[name](Dice(seed))
        n, found = graph.run(made.name, list(made.inputs), list(made.types), list(made.values), made.then)
        verdict, nmse, limit = judged(n, found)
        assert verdict == "match", (seed, n.name, n.ints[:12], nmse, limit)
        for word, mistake in made.mistakes:
            mistaken = mistake(n)
            if changes(n, mistaken, found):
                caught.add(word)
                verdict, nmse, limit = judged(mistaken, found)
                assert verdict == "wrong", (seed, word, n.ints[:12], nmse, limit)
    lost = {word for word, _ in made.mistakes} - caught
    assert not lost, "mistakes that never changed anything"


KEPT = [
    "conv_2d_direct", "conv_3d_direct", "conv_transpose_2d", "im2col_3d", "upscale", "pad_reflect_1d", "rope vision",
    "timestep_embedding", "get_rel_pos", "SILU f16", "flash attention of few",
]  # fmt: skip


@needs_slices("builds")
@needs_slices("replay", "watch")
def test_kept_ops_run_again(graph: Graph, small_model: Callable[..., Path], tmp_path: Path) -> None:
    """As nodes of a run: judged, saved with how ggml held them, and computed anew from the files."""
    checker = NodeChecker(Weights(small_model()), Request("", keep=str(tmp_path), keep_nodes=("*",)), own_rounding())
    checker.begin(0)
    for name in KEPT:
        made = CASES[name](Dice(1))
        graph.run(made.name, made.inputs, made.types, made.values, made.then, checker=checker)
    assert [result.problem for result in checker.results] == [None] * len(KEPT)
    saved = sorted(tmp_path.glob("*.safetensors"))
    assert len(saved) == len(KEPT)
    done = run("replay", *saved)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("MATCH") >= len(KEPT)


def changes(n: Op, mistaken: Op, found: Array) -> bool:
    """Whether a mistake shows in these inputs at all: where a stride is used once, it may be any number."""
    right, wrong = (function_of(each.name)(replace(each, exact=True)) for each in (n, mistaken))  # type: ignore[misc]
    return distance(n, np.asarray(wrong), np.asarray(right).reshape(found.shape)) > 0


def test_a_count_over_three_axes_that_reads_other_rows_is_wrong(graph: Graph) -> None:
    """ggml's own mistake (docs/found.md), in NumPy: rows of later planes are looked for by the wrong axis' size."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 3, (1, 2, 3, 9)).astype(np.int32) for _ in range(2))
    n, _ = graph.run("count_equal", [a[:, :1], b[:, :1]])
    sources = tuple(s and replace(s, values=values) for s, values in zip(n.sources, (a, b), strict=False))
    rows = [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (1, 3 - 1)]
    found = sum(int((a[0, plane, row] == b[0, plane, row]).sum()) for plane, row in rows)
    assert judged(replace(n, sources=sources), np.array(found).reshape(1, 1, 1, 1))[0] == "wrong"
    assert judged(replace(n, sources=sources), np.array((a == b).sum()).reshape(1, 1, 1, 1))[0] == "match"
