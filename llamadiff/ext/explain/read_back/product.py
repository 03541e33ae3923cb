"""Products with weights read back: inputs that the sums leave out, or read in another order; other rows, other tensors.

A finding is computed again for every output before it is said: what the product would be with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from llamadiff.ext.explain.pattern.deviation import SHOWN, factor
from llamadiff.ext.explain.read_back.observed import (
    Array,
    Facts,
    Observed,
    Readings,
    factor_of,
    first_fit,
    nearest_range,
    only_run,
    sole,
)
from llamadiff.ext.file.orders import order_in_words
from llamadiff.judge.fact import Fact, runs_of
from llamadiff.numerics.halves import round_bf16, round_f16

LARGE, ALL = 1 << 24, 1 << 25  # weights of one matrix, and of all, that are looked at
MOST_WORK = 1e10  # multiplications of one least squares
RIDGE = 1e-14  # of the squares' trace: keeps what is not determined small
SOME_OUTPUTS = 32  # by which it is told where each one's sums end
SAMPLES = 6  # outputs by which ranges of inputs are looked for
PLACES = 1024  # where ranges may begin and end
SCALED = (16, 32, 64, 128, 256)  # inputs that may share a scale
CLOSE = 1e-4  # of a factor, that two may differ by and be one
TILES = (16, 32, 64, 128, 256)
BLOCKS = (8, 16, 32, 64, 128, 256)  # of inputs, each of which may be in another order
LEAST = 3  # tokens by which an input is known again
NEAR = 0.05  # of an error, that what is worth to be tried may leave in some outputs
SURE = 1e-3  # of the right values, that a matrix and an input must leave to be known for the product's


@dataclass(frozen=True)
class Multiplied:
    """y = scale * (w x) + bias, with x [token, in] and w [out, in]."""

    o: Observed
    x: Array
    w: Array
    scale: float
    first: int  # which row of the tensor is the first of w

    def fits_change(self, change: Array) -> bool:
        """Whether the recorded values are the right ones and what ``change`` [token, out] adds to w x."""
        return self.o.fits(self.o.expected + (self.scale * change).reshape(self.o.expected.shape))

    def is_near(self, change: Array, outputs: Array) -> bool:
        """Whether such a change of some outputs is worth to be tried on all."""
        error = self.error[:, outputs]
        return bool(np.square(error - change).sum() <= NEAR * np.square(error).sum())

    @property
    def error(self) -> Array:
        """Of w x: [token, out]."""
        return self.o.error.reshape(len(self.x), -1) / self.scale

    @cached_property
    def moved_inputs(self) -> Array | None:
        """The inputs that would give the results: where there are no fewer outputs than inputs."""
        out, width = self.w.shape
        if out < width or out * width * width > MOST_WORK:
            return None
        squares = self.w.T @ self.w
        squares.flat[:: width + 1] += RIDGE * np.trace(squares)
        return np.asarray(self.x + np.linalg.solve(squares, (self.error @ self.w).T).T)

    @property
    def name(self) -> str:
        assert self.o.case.weight is not None
        return self.o.case.weight


def product(o: Observed) -> Facts:
    """What was multiplied, or not."""
    p = _parts(o)
    if p is None:
        return
    readings = (
        _ranges, _in_16_bits, _scaled_inputs, _transposed_tiles, _input_order, _cut_off, _other_rows, _fewer_inputs
    )  # fmt: skip
    yield from first_fit(p.fits_change, *(each(p) for each in readings))


def _parts(o: Observed) -> Multiplied | None:
    """Matrix and input; None where the right values are no product of them."""
    case, weights = o.case, o.case.engine.w
    if case.weight is None or len(weights.shape(case.weight)) != 2:
        return None
    out, width = weights.shape(case.weight)
    if out * width > LARGE or o.input_names() == []:
        return None
    x = np.asarray(o.values(case.run.model.inputs(case.tap)[0]), np.float64).reshape(len(o.recorded), -1)
    if x.shape[1] != width:
        return None
    w, right = np.asarray(weights.whole(case.weight), np.float64), o.expected.reshape(len(x), -1)
    first = 0 if out == right.shape[1] else _place(w @ x.T, right.T)
    w = w[first : first + right.shape[1]]
    if len(w) != right.shape[1]:
        return None
    plain = x @ w.T
    moved, ours = (side - side.mean(axis=0) if len(x) > 1 else side for side in (right, plain))
    scale = float(factor_of(ours, moved))
    scale = 1.0 if abs(scale - 1) < SURE else scale
    left = np.square(moved - scale * ours).sum()
    return Multiplied(o, x, w, scale, first) if left <= SURE * np.square(moved).sum() and scale else None


def _place(rows: Array, wanted: Array) -> int:
    """Where in rows [n, token] those wanted [out, token] begin, by the largest of these."""
    place = int(np.square(wanted).sum(axis=1).argmax())
    return int(np.square(rows - wanted[place]).sum(axis=1).argmin()) - place


def _ranges(p: Multiplied) -> Readings:
    """A range of inputs that the sums leave out, or count twice."""
    width = p.x.shape[1]
    step = -(-width // PLACES)
    edges = np.unique(np.append(np.arange(0, width + 1, step), width))
    flat = np.argsort(-np.abs(p.error), axis=None)[:SAMPLES]
    tokens, outputs = np.unravel_index(flat, p.error.shape)
    sums = np.stack([np.append(0.0, np.cumsum(w * x))[edges] for w, x in zip(p.w[outputs], p.x[tokens], strict=True)])
    for sign, words in ((-1.0, "leave out"), (1.0, "count twice")):
        wanted = sign * p.error[tokens, outputs]
        start, stop = (int(edges[place]) for place in nearest_range(sums, wanted, np.arange(len(edges))))
        if stop - start < width:
            which = f"inputs {start} to {stop - 1}" if stop - start > 1 else f"input {start}"
            fact = Fact("inputs summed", f"its sums {words} {which}", (sign, start, stop - 1))
            yield sign * p.x[:, start:stop] @ p.w[:, start:stop].T, fact


def _in_16_bits(p: Multiplied) -> Readings:
    """A matrix whose weights are rounded to 16 bits, or cut off to them."""
    w = p.w.astype(np.float32)
    for how, made in (
        ("rounded to bfloat16", round_bf16(w)),
        ("cut off to bfloat16", (w.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)),
        ("rounded to float16", round_f16(w)),
    ):
        change = made.astype(np.float64) - p.w
        if change.any():
            yield p.x @ change.T, Fact("weight in 16 bits", f"its weights are {how}", (how,))


def _scaled_inputs(p: Multiplied) -> Readings:
    """A block of inputs whose weights have another scale, the same for all outputs, or one of each output's own."""
    width, error = p.x.shape[1], p.error
    if len(p.x) < LEAST:
        return
    for size in SCALED:
        for start in range(0, width if width % size == 0 and width > size else 0, size):
            part = p.x[:, start : start + size] @ p.w[:, start : start + size].T
            factors = factor_of(part, error, axis=0)
            if not p.is_near(part * factors, np.arange(error.shape[1])):
                continue
            one, which = sole(factors, CLOSE), f"inputs {start} to {start + size - 1}"
            if one is not None:
                says = f"the weights of {which} count {factor(1 + one)} times"
                yield part * one, Fact("inputs scaled", says, (1 + one, start, size))
            low, high = 1 + factors.min(), 1 + factors.max()
            says = (
                f"the weights of {which} have another scale in each output, from {factor(low)} to {factor(high)} times"
            )
            yield part * factors, Fact("inputs scaled", says, (float(low), float(high), start, size))


def _transposed_tiles(p: Multiplied) -> Readings:
    """A matrix that is transposed tile by tile."""
    out, width = p.w.shape
    for size in TILES:
        if out % size or width % size or size == out == width:
            continue
        first = _in_tiles(p.w[:size], size)
        if not p.is_near(p.x @ (first - p.w[:size]).T, np.arange(size)):
            continue
        change = p.x @ (_in_tiles(p.w, size) - p.w).T
        yield change, Fact("tiles", f"{p.name} is transposed in tiles of {size}", (size,))


def _in_tiles(w: Array, size: int) -> Array:
    """Each tile of a matrix transposed in its place."""
    out, width = w.shape
    return w.reshape(out // size, size, width // size, size).transpose(0, 3, 2, 1).reshape(out, width)


def _input_order(p: Multiplied) -> Readings:
    """Inputs that are read in another order."""
    width = p.x.shape[1]
    for order in _orders(p):
        if (order != np.arange(width)).any():
            says = f"its inputs are in another order: {_order(order)}"
            yield (p.x[:, order] - p.x) @ p.w.T, Fact("input order", says, tuple(int(i) for i in order))


def _orders(p: Multiplied) -> Iterator[Array]:
    """Orders that the inputs may have: the one that results tell, where they do, or those of people's engines."""
    moved = p.moved_inputs
    width = p.x.shape[1]
    if moved is not None and len(p.x) >= LEAST and width <= 4096:
        gaps = np.square(moved).sum(axis=0)[:, None] + np.square(p.x).sum(axis=0)[None] - 2 * moved.T @ p.x
        order = gaps.argmin(axis=1)
        if len(set(order)) == len(order):
            yield order
        return
    some = np.unique(np.linspace(0, len(p.w) - 1, 64).astype(int))
    for size in (*(block for block in BLOCKS if width % block == 0 and block < width), width):
        one = np.arange(size)
        for each in (
            np.roll(one, size // 2), one[::-1], np.roll(one, 1), np.roll(one, -1),
            one.reshape(-1, 2).T.ravel(), one.reshape(2, -1).T.ravel(),
        ):  # fmt: skip
            order = (np.arange(0, width, size)[:, None] + each).ravel()
            if p.is_near((p.x[:, order] - p.x) @ p.w[some].T, some):
                yield order


def _order(order: Array) -> str:
    """An order in words: of a block, if all blocks have the same."""
    for size in BLOCKS:
        each = order[:size]
        if len(order) % size or size >= len(order) or each.max() >= size:
            continue
        if (order.reshape(-1, size) - np.arange(0, len(order), size)[:, None] == each).all():
            runs = runs_of(each)
            if len(runs) <= SHOWN:
                said = [f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
                return f"of each block of {size}, {', '.join(said)}"
    return order_in_words(order, "input")


def _cut_off(p: Multiplied) -> Readings:
    """Inputs that are cut off above some size."""
    moved = p.moved_inputs
    if moved is None:
        return
    largest = float(np.abs(moved).max())
    bound = float(np.median(np.abs(moved)[np.abs(p.x) > largest])) if (np.abs(p.x) > largest).any() else largest
    if 1e-3 < bound / float(np.abs(p.x).max()) < 1:
        change = (np.clip(p.x, -bound, bound) - p.x) @ p.w.T
        yield change, Fact("input cut", f"its inputs are cut off beyond {bound:.4g}", (bound,))


def _fewer_inputs(p: Multiplied) -> Readings:
    """Sums that end early, each output's at a place of its own: as many inputs more or fewer from one to the next."""
    (out, width), recorded = p.w.shape, p.x @ p.w.T + p.error
    if out * width * len(p.x) > MOST_WORK or len(p.x) < 2:
        return
    some = np.unique(np.linspace(0, out - 1, SOME_OUTPUTS).astype(int))
    counts = [_summed(p, c, recorded[:, c]) for c in some]
    step, first = np.rint(np.polyfit(some, counts, 1)).astype(int)
    every = np.clip(first + step * np.arange(out), 0, width)
    if not step or np.abs(every[some] - counts).max() > 0:
        return
    kept = np.arange(width)[None] < every[:, None]
    more = "more" if step > 0 else "fewer"
    says = f"output 0 sums its first {every[0]} inputs, and each output {abs(step)} {more} than the one before"
    yield -p.x @ np.where(kept, 0.0, p.w).T, Fact("fewer inputs", says, (int(every[0]), int(step)))


def _summed(p: Multiplied, output: int, recorded: Array) -> int:
    """How many inputs, from the first on, an output's sums come nearest to."""
    sums = np.cumsum(p.x * p.w[output], axis=1)
    return int(np.square(sums - recorded[:, None]).sum(axis=0).argmin()) + 1


def _other_rows(p: Multiplied) -> Readings:
    """Rows of another tensor, or other rows of this one: for all outputs, or for those that are wrong."""
    wrong = np.abs(p.error).max(axis=0) > 1e-3 * float(np.sqrt(np.mean(np.square(p.x @ p.w.T))))
    run, looked_at = only_run(wrong), 0
    first, last = run or (0, len(p.w) - 1)
    wanted = (p.x @ p.w.T + p.error).T[first : last + 1]
    weights = p.o.case.engine.w
    for name in p.o.case.run.model.tensors:
        shape = weights.shape(name)
        size = int(np.prod(shape))
        if len(shape) != 2 or shape[1] != p.x.shape[1] or size > LARGE or looked_at + size > ALL:
            continue
        looked_at += size
        matrix = np.asarray(weights.whole(name), np.float64)
        place = _place(matrix @ p.x.T, wanted)
        rows = matrix[max(place, 0) : place + len(wanted)]
        if place < 0 or len(rows) != len(wanted) or (name == p.name and place == first + p.first):
            continue
        change = np.zeros_like(p.error)
        change[:, first : last + 1] = p.x @ (rows - p.w[first : last + 1]).T
        where = f"in channels {first} to {last} " if run else ""
        what = name if len(rows) == len(matrix) else f"rows {place} to {place + len(rows) - 1} of {name}"
        yield change, Fact("other rows", f"{where}it multiplies by {what}", (name, first, last, place))
