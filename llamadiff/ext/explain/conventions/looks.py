"""Tells errors that come from rounded operands: they are even, bounded by a step, and no factor or vector.

A product with at least as many outputs as inputs tells how far its inputs must have been moved to give its outputs:
W d = error, least squares for each token. Rounding moves each value by a part of a step, evenly; a bug moves some by a
thousand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from llamaref.weights import each_expert
from numpy.typing import NDArray

from llamadiff.ext.explain.case import Case
from llamadiff.ext.explain.conventions import cached
from llamadiff.ext.explain.conventions.evenness import (
    CRUDE,
    EVEN,
    SUMMED,
    USUAL_OF_8,
    Looks,
    even,
    is_steady,
)
from llamadiff.ext.explain.conventions.recipes import Op, Product, recipe_of
from llamadiff.numerics.arithmetic import precision
from llamadiff.numerics.policies import F32
from llamadiff.numerics.rounding import BLOCKS, OWN, TENSOR, steps

Array = NDArray[Any]

STEPS_OF_8 = 1.25  # steps of 8 bits that activations may be moved by at most: 1 where values are cut off
SMALLEST = 2.0**-14  # float16's smallest normal: below it values have no 16 bits
LEFT = 0.05  # of the error, that the movement of inputs may leave unexplained
MOST_WORK = 3e10  # multiplications of one least squares
LARGE = 1 << 22  # weights, or results, that are looked at of one product
RIDGE = 1e-14  # of the squares' trace: keeps what is not determined small
BY_TABLE = ("ROPE", "SOFT_MAX", "SWIGLU")  # ops that engines look up or approximate
KEPT = {"kv_k": "kept_k", "kv_v": "kept_v"}  # caches -> their rows on the way into them


def looks_of(case: Case, error: Array) -> Looks:
    """The roundings of operands that an error looks like."""
    recipe = recipe_of(case)
    if isinstance(recipe, Product):
        return _of_product(case, recipe, error)
    right = np.asarray(recipe.compute(case.carrier)[0], np.float64)
    if case.tap.kind.word in KEPT:
        return cached.of_rows(right, error)
    if case.tap.kind.word in ("kq", "kqv_out"):
        others, rows = (np.asarray(x[0], np.float64) for x in recipe.given)
        if case.tap.kind.word == "kqv_out":
            return cached.of_values(others, rows, error.reshape(len(error), len(others), -1))
        seen = case.run.positions[None, :] <= case.run.positions[:, None]
        return cached.of_scores(others, rows, error.swapaxes(0, 1), seen)
    return _of_value(case, recipe, right, error)


def _of_product(case: Case, product: Product, error: Array) -> Looks:
    """Of a product's inputs, or of every term of its sums.

    Where results do not determine inputs, or have 16 bits themselves, all movements count that make sums as uneven.
    """
    x = np.asarray(product.x[0], np.float64)
    if product.chosen is not None:
        x = np.broadcast_to(x, (*product.chosen.shape[1:], x.shape[-1]))
    error = error.reshape(*x.shape[:-1], -1)
    there = np.isfinite(error).all(axis=-1, keepdims=True)
    x, error = np.where(there, x, 0.0), np.where(there, error, 0.0)
    matrices = list(_matrices(case, product))
    if is_steady(error, _each(matrices, x)):
        return {}

    def spread(block: int) -> Array:
        """What moving every input by a step makes of the sums."""
        moved = np.square(_steps_of(case, x, block))
        return np.asarray(np.sqrt(_each([replace(one, w=np.square(one.w)) for one in matrices], moved)))

    terms = even(0.0, [(OWN, np.abs(error), spread(OWN))], SUMMED, 2 * EVEN)
    if determines(case):
        return _of_inputs(case, matrices, x, error) or terms
    blocks = ((block, np.abs(error), spread(block)) for block in BLOCKS if block != OWN)
    return terms | even(np.inf, blocks, SUMMED, EVEN, USUAL_OF_8)


def determines(case: Case) -> bool:
    """Whether a product's outputs, being no fewer than its inputs and in float32, tell what these were."""
    if case.weight is None or case.channels is not None or precision(np.asarray(case.recorded)) != F32:
        return False
    *experts, out, n = case.engine.w.shape(case.weight)
    size = int(np.prod(experts)) * out * n
    return out >= n and size * n <= MOST_WORK and size <= 4 * LARGE


def _of_inputs(case: Case, matrices: Sequence[_Matrix], x: Array, error: Array) -> Looks:
    """Of inputs x that are determined by the results: least squares for each token, by the normal equations."""
    d = np.zeros_like(x)
    for one in matrices:
        squares = one.w.T @ one.w
        squares.flat[:: len(squares) + 1] += RIDGE * np.trace(squares)
        d[one.rows] = np.linalg.solve(squares, (error[one.rows] @ one.w).T).T
    left = error - _each(matrices, d)
    enough = float(np.square(left).sum()) <= LEFT * float(np.square(error).sum())
    return _like_rounding(d, x, step=partial(_steps_of, case)) if enough else {}


def _of_value(case: Case, recipe: Op, right: Array, error: Array) -> Looks:
    """Of each value by itself, where sines, exponentials and the like are approximate.

    An angle's error moves a pair by a part of its length; a score's, a probability by a part of itself for each unit.
    """
    size, given = np.abs(right), [np.abs(np.asarray(x[0], np.float64)) for x in recipe.given]
    if case.tap.kind.op == "ROPE":
        size = _lengths_of_pairs(right, case)
    elif case.tap.kind.word == "kq_soft_max":
        hidden = case.run.positions[None, :] > case.run.positions[:, None]
        size = right * (1 + np.where(hidden, 0.0, given[0]).max(axis=-1, keepdims=True)) + SMALLEST
        error, right, size = (x.swapaxes(0, 1) for x in (error, right, size))
    elif case.tap.kind.op == "SWIGLU":
        size = given[1] * (given[0] + SMALLEST)
    there = np.isfinite(error).reshape(len(error), -1).all(axis=1)
    error, right, size = (x[there] for x in (error, right, size))
    rows = error.reshape(len(error), -1), right.reshape(len(right), -1)
    if is_steady(*rows):
        return {}
    looks = even(0.0, [(OWN, np.abs(error), size)], CRUDE)
    whole = float(np.sqrt((error**2).sum() / (right**2).sum()))
    return {block: (kurtosis, whole) for block, (kurtosis, _) in looks.items()}


def _lengths_of_pairs(x: Array, case: Case) -> Array:
    """The length of the pair that each value [..., dim] was rotated in."""
    n, size = case.config.rope.n_rot, np.abs(x)
    shape, axis = ((-1, 2), -1) if case.run.model.rope_pairs else ((2, -1), -2)
    pairs = x[..., :n].reshape(*x.shape[:-1], *shape)
    length = np.sqrt((pairs**2).sum(axis=axis, keepdims=True))
    size[..., :n] = np.broadcast_to(length, pairs.shape).reshape(*x.shape[:-1], n)
    return size


def _like_rounding(d: Array, x: Array, most: float = STEPS_OF_8, step: Callable[[Array, int], Array] = steps) -> Looks:
    """The roundings that a movement d of values x [token, ..., n] looks like: bounded, even, no factor, no vector."""
    if not np.isfinite(d).all() or not d.any() or is_steady(d, x):
        return {}
    blocks = [block for block in BLOCKS if block <= 0 or x.shape[-1] % block == 0]
    return even(most, ((block, np.abs(d), step(x, block)) for block in blocks))


def _steps_of(case: Case, x: Array, block: int) -> Array:
    """The steps of values [token, ...]; what the tokens of a batch share, those of another do not."""
    if block != TENSOR:
        return steps(x, block)
    calls = np.split(x, range(case.run.n_prefill, len(x)))
    return np.concatenate([steps(part, block) for part in calls if len(part)])


@dataclass(frozen=True)
class _Matrix:
    """A matrix [out, in], and which of the inputs it multiplied."""

    w: Array
    rows: Any


def _matrices(case: Case, product: Product) -> Iterator[_Matrix]:
    """A product's matrix, or those of its chosen experts: the outputs that are looked at."""
    stored = case.engine.w.read_raw(product.name)
    every = ((None, slice(None)),) if product.chosen is None else each_expert(product.chosen[0])
    for expert, mine in every:
        data = (stored if expert is None else stored[expert])[product.rows]
        w = np.asarray(case.engine.w.decode_rows(product.name, data), np.float64)
        if product.scale is not None:
            w = w * (product.scale if expert is None else product.scale[expert])
        yield _Matrix(w, mine)


def _each(matrices: Sequence[_Matrix], x: Array) -> Array:
    """Every input x [..., in] by its matrix: [..., out]."""
    result = np.empty((*x.shape[:-1], len(matrices[0].w)))
    for one in matrices:
        result[one.rows] = x[one.rows] @ one.w.T
    return result
