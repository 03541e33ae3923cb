"""By which positions the rows of a RoPE tap were rotated, where those are not the right ones, and by what law."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from math import gcd

import numpy as np
from llamaref import ops
from llamaref.config import Rope
from numpy.typing import NDArray

from llamadiff.ext.explain.pattern.deviation import SAME, SHOWN, Deviation, factor, listed
from llamadiff.judge.fact import Fact
from llamadiff.numerics.arithmetic import ROUNDINGS

Array = NDArray[np.float64]
WHOLE = 0.05  # how near a whole number a turn must be to be one
TURNS = 2  # of the slowest pair, that a row may be turned further, either way
SIXTEEN = {"F16": ("float16", 2048), "BF16": ("bfloat16", 256)}  # and up to which number they hold all whole ones


def turns(d: Deviation) -> Iterator[Fact]:
    """The positions that RoPE's rows seem to have been rotated by, where those are not the right ones."""
    found = _positions(d) if d.rope is not None and d.finite else None
    right = np.array(d.positions)
    if found is None or (found == right).all():
        return
    steps = {*(found - right).tolist()}
    if len(right) > 1 and len(steps) == 1:
        says = f"every token is rotated by its position {steps.pop():+d}"
    else:
        moved = np.flatnonzero(found != right)
        each = [f"token {row} is rotated by position {found[row]}, where {right[row]} is right" for row in moved]
        says = (law(found, right) if len(moved) > SHOWN else None) or listed(each)
    yield Fact("turns", says, tuple(map(int, found)))


def law(found: NDArray[np.int64], right: NDArray[np.int64]) -> str | None:
    """What the positions found are, of those that are right; None if they are in no order that is looked for."""
    off, last = right - found, int(found.max())
    for kind, (name, whole) in SIXTEEN.items():
        if (ROUNDINGS[kind](right.astype(np.float32)) == found).all():
            return f"its positions are rounded to {name}, which holds whole numbers up to {whole}"
    if (np.minimum(right, last) == found).all():
        return f"positions beyond {last} are taken for {last}"
    if (size := gcd(*map(int, off))) > 1 and (right % size == found).all():
        return f"its positions begin again at 0 after each {size}"
    times = found[right > 0] / right[right > 0]
    if np.ptp(times) < 1e-9 and not found[right == 0].any():
        return f"every token is rotated by its position times {factor(float(times[0]))}"
    runs = [[*run] for _, run in groupby(range(len(off)), lambda row: (int(off[row]), found[row] == 0))]
    if not found[off != 0].any():
        runs = [[*run] for _, run in groupby(range(len(off)), lambda row: off[row] != 0)]
    runs = [run for run in runs if off[run[0]]]
    return "; ".join(_of_run(run, found, right) for run in runs) if len(runs) <= SHOWN else None


def _of_run(run: list[int], found: NDArray[np.int64], right: NDArray[np.int64]) -> str:
    """What holds of the rows of a run."""
    first, last = right[run[0]], right[run[-1]]
    which = f"position {first} is" if len(run) == 1 else f"positions from {first} to {last} are"
    if not found[run].any():
        return f"{which} taken for 0"
    return f"{which} taken for {found[run[0]]}{f' to {found[run[-1]]}' if len(run) > 1 else ''}"


def _positions(d: Deviation) -> NDArray[np.int64] | None:
    """Rotations add up: a row is the right one turned further, whose turn its pairs tell, the slowest first."""
    assert d.rope is not None
    for rotate, in_pairs in ((ops.rope_pairs, True), (ops.rope_halves, False)):
        sides = (_pairs(side, d.rope, in_pairs) for side in (d.recorded, d.expected))
        recorded, expected = sides
        further = _turns((recorded * expected.conj()).sum(axis=1), d.rope)
        theta = ops.rope_theta(d.rope, further)
        turned = rotate(d.expected, np.cos(theta), np.sin(theta))
        gaps, size = (np.square(side).sum(axis=(1, 2)) for side in (turned - d.recorded, d.recorded))
        if (gaps < SAME * np.maximum(size, 1e-300)).all():
            return np.asarray(np.array(d.positions) + further, np.int64)
    return None


def _pairs(x: Array, rope: Rope, in_pairs: bool) -> NDArray[np.complex128]:
    """The pairs that are rotated, as complex numbers: [row, head, pair]."""
    half, n = rope.n_rot // 2, rope.n_rot
    first, second = (x[..., 0:n:2], x[..., 1:n:2]) if in_pairs else (x[..., :half], x[..., half:n])
    return np.asarray(first + 1j * second)


def _turns(products: NDArray[np.complex128], rope: Rope) -> Array:
    """By how many positions each row is turned further, a whole number, from each pair's [row, pair]."""
    speed = ops.rope_theta(rope, np.ones(1))[0]
    order = np.argsort(speed)
    tried, left = list[Array](), list[Array]()
    for by in range(-TURNS, TURNS + 1):
        further = np.full(len(products), by * 2 * np.pi / speed[order[0]])
        for pair in order:
            further = further + np.angle(products[:, pair] * np.exp(-1j * further * speed[pair])) / speed[pair]
        tried.append(np.rint(further))
        left.append(np.abs(np.angle(products * np.exp(-1j * tried[-1][:, None] * speed))).mean(axis=1))
    best = np.argmin([side + (0 if n == TURNS else WHOLE) for n, side in enumerate(left)], axis=0)
    return np.asarray(np.choose(best, tried), np.float64)
