"""What a kernel gave for a case, held to what is right there, value by value.

Two numbers may lie between a value and the right one, as squares: the limit that ``backend`` has for the op, of that
value; and what rounding makes of it, measured on the case's own data: the op is computed again in float64 on inputs
that are moved by as much as float32 sums in any order move theirs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property

import numpy as np

from llamadiff.ext.cpus.device import ROUNDS
from llamadiff.ext.graph.check import SORTED, comparable
from llamadiff.ext.graph.op import Array, Op, Operand, arithmetics, compute, unfollowed
from llamadiff.ext.graph.ops.products import PRODUCTS
from llamadiff.ext.replay.axes import is_blocks
from llamadiff.judge.verdict import Ruling, of_node
from llamadiff.numerics import tolerances
from llamadiff.numerics.cpu import PARTNER, Q8_WAYS
from llamadiff.numerics.types import HALF_STEP, HALVES

_SUMS = ("MUL_MAT*", "OUT_PROD", "CONV_*", "FLASH_ATTN_EXT", "NORM", "GROUP_NORM", "SUM*", "MEAN", "CUMSUM", "*_SCAN",
         "SSM_CONV", "*WKV*", "GATED_*", "SOLVE_TRI")  # fmt: skip
_POSITIONS = {"ROPE": 1, "ROPE_BACK": 1}  # sources whose numbers a kernel turns into floats
_TIMES = 4  # that inputs are moved
_STEP = 2 * HALF_STEP["f32"]  # how far, of itself, where no sum follows
_ANGLE = 4 * HALF_STEP["f32"]  # the same of an angle (numerics/tolerances.py has it as a square)
_SMALLEST = 2.0**-126  # of float32; what is smaller may be taken for nothing
_WIDE = 1 << 25  # values of a source that are not widened to float64
NO_ROUNDING = "F32"


@dataclass(frozen=True)
class Fit:
    """The right values under the arithmetic that fits best, and by how much each found one is beyond its limit.

    ``beyond``: squares of errors over squares of limits, in the shape of the result.
    """

    arithmetic: str
    right: Array
    found: Array
    limits: Array
    beyond: Array

    @property
    def ruling(self) -> Ruling:
        return of_node(float(self.beyond.max(initial=0.0)), 1.0)


@dataclass(frozen=True)
class Rounding:
    """What rounding may leave of an op's values, as squares [like the result]; ``plain``: the right ones in float64."""

    n: Op
    plain: Array
    squares: Array

    @cached_property
    def granted(self) -> float:
        """NMSE of sums that the op keeps in float16 in an order that is not known, where it rounds as ggml does."""
        return unfollowed(self.n) if self.n.name == "FLASH_ATTN_EXT" else 0.0

    @classmethod
    def of(cls, n: Op) -> Rounding:
        """Measured on the op's own inputs."""
        exact = replace(n, exact=True, kind=_unrounded(n))
        right = _values(exact)
        squares, dice = np.zeros(right.shape), np.random.default_rng(0)
        if right.dtype.kind == "f":
            moved = (_values(_moved(exact, dice)) for _ in range(_TIMES))
            with np.errstate(all="ignore"):
                squares = np.mean([np.square(np.nan_to_num(x - right, posinf=0, neginf=0)) for x in moved], axis=0)
                squares += squares.mean(axis=-1, keepdims=True)
        return cls(n, right, squares)


def fit(n: Op, found: Array, rounding: Rounding) -> Fit:
    """Hold what a kernel found for a decoded op to every arithmetic that is legal for it, the exact one first."""
    best: Fit | None = None
    with np.errstate(all="ignore"):
        for name, tried in _legal(n):
            right = rounding.plain if name == NO_ROUNDING else _values(tried)
            granted = 0.0 if name == NO_ROUNDING else rounding.granted
            now = _fit(n, name, right, found, rounding.squares, granted)
            if best is None or now.beyond.max(initial=0.0) < best.beyond.max(initial=0.0):
                best = now
            if best.beyond.max(initial=0.0) <= 1:
                break
    assert best is not None
    return best


def _fit(n: Op, name: str, right: Array, found: Array, rounding: Array, granted: float) -> Fit:
    if right.dtype.kind != "f":
        return _fit_places(n, name, right, found)
    values, seen = comparable(n, right, found)
    error, limits = _squared_errors(values, seen), _squared_limits(n, values, granted) + rounding
    beyond = np.where(error > 0, error / limits, 0.0)
    return Fit(name, values, seen, limits, beyond)


def _fit_places(n: Op, name: str, right: Array, found: Array) -> Fit:
    """Whole numbers: the same; those that say where something is, the same there, each place of a row once."""
    wrong = found != right
    if n.name in (*SORTED, "ARGMAX"):
        one = n.name == "ARGMAX"
        rows = found.reshape(*n.x().shape[:-1], -1)
        missing = (rows < 0) | (rows >= n.x().shape[-1])
        inside = np.where(missing, 0, rows)
        again = np.zeros(rows.shape, bool) if one else _is_repeated(inside)
        if one:
            values = np.take_along_axis(n.x(), inside.astype(np.int64), axis=-1)
            other = values != n.x().max(axis=-1, keepdims=True)
        else:
            other = np.not_equal(*comparable(n, right, inside))
        wrong = (missing | again | other).reshape(found.shape)
    return Fit(name, right, found, np.zeros(right.shape), np.where(wrong, np.inf, 0.0))


def _is_repeated(rows: Array) -> Array:
    """Which numbers of each row stand in it already."""
    order = np.argsort(rows, axis=-1, kind="stable")
    ordered = np.take_along_axis(rows, order, axis=-1)
    again = np.zeros(rows.shape, bool)
    again[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
    out = np.zeros(rows.shape, bool)
    np.put_along_axis(out, order, again, axis=-1)
    return out


def _squared_errors(right: Array, found: Array) -> Array:
    """Of values that are not finite: nothing where both are the same, else infinite."""
    gap = np.subtract(found, right, dtype=np.float64)
    same = (found == right) | (np.isnan(found) & np.isnan(right))
    return np.asarray(np.where(same, 0.0, np.where(np.isfinite(gap), np.square(gap), np.inf)))


def _squared_limits(n: Op, right: Array, granted: float) -> Array:
    """What the op's rule leaves of each value, and its own type; and what sums in float16 do to a row of them."""
    rule = tolerances.rule_for(tolerances.RULES, "*", n.name, "*")
    squares = np.square(np.where(np.isfinite(right), right, 0), dtype=np.float64)
    of_type = HALF_STEP.get(n.kind, 0.0) if n.kind.upper() in HALVES else 0.0
    smallest = 2.0**-25 if n.kind == "f16" else _SMALLEST
    row = squares.mean(axis=-1, keepdims=True)
    return np.asarray((rule.match + of_type**2) * squares + granted * row + smallest**2)


def _unrounded(n: Op) -> str:
    """The type of the result before it is rounded to 16 bits."""
    return "f32" if n.kind.upper() in HALVES else n.kind


def _legal(n: Op) -> Iterator[tuple[str, Op]]:
    """An op as it may be computed: exactly; as ggml's CPU kernels round; a product by blocks as devices' do."""
    yield NO_ROUNDING, replace(n, exact=True, kind=_unrounded(n))
    rounds = {s.kind.upper() for s in n.sources if s is not None} | {n.kind.upper()}
    in_eight = any(PARTNER.get(kind, "").startswith("Q8") for kind in rounds)
    for way in Q8_WAYS if in_eight else ("",):
        for tried in arithmetics(replace(n, q8=way)):
            if not tried.exact or is_blocks(n.kind):
                name = tried.rounds_to(tried.source_kind()) if n.name in PRODUCTS else f"{n.name} as ggml rounds it"
                yield name, tried
    if n.name in PRODUCTS and is_blocks(n.source_kind()):
        weights, activations, *others = n.sources
        assert activations is not None
        for name, rounding in ROUNDS.items():
            if name.startswith("activations") and activations.values.shape[-1] % rounding.block == 0:
                x = np.asarray(rounding.activations(activations.values), np.float32)
                yield name, replace(n, exact=True, sources=(weights, replace(activations, values=x), *others))


def _values(n: Op) -> Array:
    """What an op gives; where sums are what rounds, from operands in float64, but for what it rounds itself."""
    places = range(len(n.sources)) if _sums(n) and n.exact else range(int(n.name in PRODUCTS))
    sources = tuple(_wide(s) if place in places else s for place, s in enumerate(n.sources))
    with np.errstate(all="ignore"):
        return np.asarray(compute(replace(n, sources=sources))).reshape(n.shape)


def _wide(s: Operand | None) -> Operand | None:
    if s is None or s.values.dtype != np.float32 or s.values.size > _WIDE:
        return s
    return replace(s, values=s.values.astype(np.float64))


def _sums(n: Op) -> bool:
    return any(fnmatchcase(n.name, pattern) for pattern in _SUMS)


def _moved(n: Op, dice: np.random.Generator) -> Op:
    """An op on inputs each of which is a little off: by rounding, as often as numbers are added."""
    sources = list(n.sources)
    longest = max((s.values.shape[-1] for s in n.sources if s is not None), default=1)
    step = _STEP * math.sqrt(longest) if _sums(n) else _STEP
    for place, s in enumerate(sources):
        is_weight = n.name in PRODUCTS and place == 0  # a product is as far off by its activations
        if s is not None and s.values.dtype.kind == "f" and not is_weight:
            sources[place] = replace(s, values=_off(s.values, step, dice))
        elif s is not None and _POSITIONS.get(n.name) == place:
            sources[place] = replace(s, values=_off(s.values, _ANGLE, dice))
    return replace(n, sources=tuple(sources))


def _off(x: Array, step: float, dice: np.random.Generator) -> Array:
    with np.errstate(all="ignore"):
        return np.asarray(x * (1 + dice.choice((-step, step), size=x.shape)))
