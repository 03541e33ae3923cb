"""What an engine's arithmetic rounds, read back from what it recorded.

A product with at least as many outputs as inputs tells how far its inputs must have been moved to give its outputs:
W d = error, least squares for each token. Rounding moves each value by a part of a step, evenly; a bug moves some by a
thousand. What is read this way is described, and sets the noise that the engine's other ops of this kind may have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff import limits
from llamadiff.diagnose.attention import Scores, Values
from llamadiff.diagnose.case import Case, NotRecordedError
from llamadiff.diagnose.diagnosis import Scene, case_of
from llamadiff.diagnose.known import recipe_of
from llamadiff.diagnose.products import Product
from llamadiff.diagnose.search import Clock, search
from llamadiff.judging import Finding, Local
from llamadiff.lanes import rounding_type
from llamadiff.model import Runnable
from llamadiff.rounding import BLOCKS, LEVELS, OWN, Rounding, steps
from llamadiff.taps import Tap

Array = NDArray[Any]
Looks = dict[int, tuple[float, float]]  # what shares a step -> the largest movement over the rms, and the rms in steps

EVEN = 8.0  # the largest movement over their rms: sqrt(3) of a rounding, up to this where roundings add up
EIGHT_BITS = 1.25  # steps of 8 bits that activations may be moved by at most: 1 where values are cut off
FOUR_BITS = LEVELS / 7 * EIGHT_BITS  # the same of a cache, which may have 4
FLOATING = 2.0**-6  # of a value: sums and values of 16 bits are moved by less
SUMMED = EVEN * 2.0**-7  # the same where an error is a sum of many
LEFT = 0.05  # of the error, that the movement of inputs may leave unexplained
STEADY = 0.8  # of the movement, that one factor or one vector may explain: more is no rounding
MOST_WORK = 1e11  # multiplications of one least squares
READ = 4  # taps of a kind that are read
NEAR = 0.1  # of float32's error, that another arithmetic leaves where the engine's is a variant of it
AGREE = 3.0  # sizes of one rounding, read at several taps, differ by less
CACHED = {"kq": "cache_k", "kqv_out": "cache_v"}  # products of attention -> what they read
KEPT = {"kv_k": "kept_k", "kv_v": "kept_v"}  # caches -> their rows on the way into them
MOSTLY = 0.6  # of the taps of a kind must show it


@dataclass(frozen=True)
class Reading:
    """Roundings by kind of operand: a weight type, ``cache_k``, ``cache_v``; those of size 0 are ggml's, exactly."""

    roundings: Mapping[str, Rounding]

    @property
    def found(self) -> dict[str, Rounding]:
        """Those that are nobody's we know."""
        return {kind: rounding for kind, rounding in self.roundings.items() if rounding.size}


def _like_rounding(d: Array, x: Array, most: float = EIGHT_BITS) -> Looks:
    """The roundings that a movement d of values x [token, n] looks like: bounded, even, no factor, no vector."""
    if not np.isfinite(d).all() or not d.any() or _is_steady(d, x):
        return {}
    blocks = [block for block in BLOCKS if block <= 0 or x.shape[-1] % block == 0]
    return _even(most, ((block, np.abs(d), steps(x, block)) for block in blocks))


def _even(most: float, movements: Iterable[tuple[int, Array, Array]], own: float = FLOATING) -> Looks:
    """Of movements in several steps (block, movement, its steps), those that are even and no larger than rounding is.

    ``most``: how many steps rounding may move a value by; ``own``: the part of a value, where that is its own step.
    """
    found: Looks = {}
    for block, moved, step in movements:
        in_steps = moved[step > 0] / step[step > 0]
        size, peak = float(np.sqrt(np.mean(in_steps**2))), float(in_steps.max())
        if 0 < peak <= min(own if block == OWN else most, EVEN * size):
            found[block] = peak / size, size
    return found


def _is_steady(d: Array, x: Array) -> bool:
    """Whether one factor a token, or one vector for all tokens, makes most of a movement [token, n]."""
    total = float((d * d).sum())
    size = np.maximum((x * x).sum(axis=-1), 1e-300)
    factors = (d * x).sum(axis=-1) ** 2 / size
    rows = np.unique(x.reshape(-1, x.shape[-1]), axis=0, return_index=True)[1]
    some = d.reshape(-1, d.shape[-1])[rows]
    vector = len(some) * float((some.mean(axis=0) ** 2).sum()) / max(float((some * some).sum()), 1e-300)
    return bool(factors.sum() > STEADY * total or (len(some) >= 4 and vector > STEADY))


@dataclass(frozen=True)
class Beyond:
    """A tap that is beyond every known arithmetic, ready to be read; ``kind``: what its op multiplies by."""

    case: Case
    local: Local
    kind: str


def read(scene: Scene, findings: Sequence[Finding]) -> Reading | None:
    """The roundings of an engine; None where all that it recorded has a known one, or shows none."""
    fitting: dict[str, Counter[str]] = {}
    beyond: dict[str, list[Beyond]] = {}
    for finding in findings:
        local = finding.local.get(scene.source.name)
        kind = kind_of(finding.tap, scene.run.model)
        if local is None or local.span or kind is None:
            continue
        if local.verdict == limits.MATCH:
            fitting.setdefault(kind, Counter())[local.arithmetic or "F32"] += 1
        elif local.verdict == limits.WRONG and np.isfinite(local.nmse):
            case = case_of(scene.run, scene.source, finding.tap, local)
            beyond.setdefault(kind, []).append(Beyond(case, local, kind))
    roundings = {kind: Rounding(counts.most_common(1)[0][0]) for kind, counts in fitting.items()}
    for kind, own in beyond.items():
        if len(own) < MOSTLY * (len(own) + fitting.get(kind, Counter()).total()):
            continue
        found = _agreed([_read(candidate, scene.clock) for candidate in _chosen(own)])
        if found is not None:
            roundings[kind] = found
    reading = Reading(roundings)
    return reading if reading.found else None


def _chosen(own: Sequence[Beyond]) -> list[Beyond]:
    """The taps of a kind that are read: one of each word first, those that determine their inputs before others."""
    ordered = sorted(own, key=lambda candidate: -_is_determined(candidate.case))
    firsts = {candidate.case.tap.kind.word: candidate for candidate in reversed(ordered)}
    once = [candidate for candidate in ordered if firsts[candidate.case.tap.kind.word] is candidate]
    return [*once, *(candidate for candidate in ordered if candidate not in once)][:READ]


def _is_determined(case: Case) -> bool:
    if case.weight is None:
        return False
    *_, out, n = case.engine.w.shape(case.weight)
    return bool(out >= n)


def _agreed(found: Sequence[tuple[str, Looks]]) -> Rounding | None:
    """What most of the readings allow, in the steps in which it is evenest."""
    bases = Counter(base for base, looks in found if looks)
    blocks = Counter(block for _, looks in found for block in looks)
    likely = [block for block, count in blocks.items() if count >= MOSTLY * len(found)]
    if not likely:
        return None
    alike = {block: [looks[block] for _, looks in found if block in looks] for block in likely}
    best = min(likely, key=lambda block: float(np.mean([ratio for ratio, _ in alike[block]])))
    sizes = [size for _, size in alike[best]]
    return Rounding(bases.most_common(1)[0][0], best, max(sizes)) if max(sizes) <= AGREE * min(sizes) else None


def _read(beyond: Beyond, clock: Clock) -> tuple[str, Looks]:
    """What is known of one tap's rounding, and what the rest looks like; nothing where a known bug explains it."""
    case, local = beyond.case, beyond.local
    try:
        recipe = recipe_of(case)
        base, error = _nearest(case, recipe)
    except NotRecordedError:
        return "F32", {}
    looks = _looks(case, recipe, error)
    if looks and search(case, local.nmse, clock, pairs=False).fits:
        return base, {}
    return base, looks


def _nearest(case: Case, recipe: Any) -> tuple[str, Array]:
    """The known arithmetic that comes near, float32 where none does, and what it leaves [token, ...]."""
    assert case.recorded is not None
    results = np.asarray(recipe.compute(case), np.float64)
    errors = [np.asarray(case.recorded, np.float64).reshape(y.shape) - y for y in results]
    sums = [float((error**2).sum()) for error in errors]
    best = int(np.argmin(sums))
    best = best if sums[best] <= NEAR * sums[0] else 0
    policy, stored = case.carrier.ways[best]
    return rounding_type(policy, kind_of(case.tap, case.run.model) or "F32", stored), errors[best]


def kind_of(tap: Tap, model: Runnable) -> str | None:
    """The kind of operand that a tap's op multiplies by, or keeps; None if it does neither."""
    if not tap.kind.op.startswith("MUL_MAT"):
        return KEPT.get(tap.kind.word)
    return CACHED.get(tap.kind.word) or model.weight_types.get(tap.name)


def _looks(case: Case, recipe: Any, error: Array) -> Looks:
    """The roundings of operands that an error looks like."""
    if isinstance(recipe, Product):
        return _of_product(case, recipe, error) if recipe.chosen is None else {}
    if isinstance(recipe, Scores):
        return _of_scores(case, recipe, error)
    if isinstance(recipe, Values):
        return _of_values(recipe, error)
    kept = np.asarray(recipe.compute(case)[0], np.float64) if case.tap.kind.word in KEPT else None
    return {} if kept is None else _like_rounding(error, kept, FOUR_BITS)


def _of_product(case: Case, product: Product, error: Array) -> Looks:
    """Of a product's inputs; if these cannot have been moved so, of every term of its sums."""
    x = np.asarray(product.x[0], np.float64)
    error = error.reshape(len(x), -1)
    w = np.asarray(case.engine.w.whole(product.name), np.float64)
    w = w if product.rows is None else w[product.rows]
    w = w if product.scale is None else w * product.scale
    out, n = w.shape
    if out >= n and out * n * n <= MOST_WORK:
        d = np.linalg.lstsq(w, error.T, rcond=None)[0].T
        left = error - d @ w.T
        found = _like_rounding(d, x)
        if found and float((left * left).sum()) <= LEFT * float((error * error).sum()):
            return found
    terms, result = np.sqrt((x * x) @ (w * w).T), x @ w.T
    return {} if _is_steady(error, result) else _even(0.0, [(OWN, np.abs(error), terms)], SUMMED)


def _of_scores(case: Case, recipe: Scores, error: Array) -> Looks:
    """Of Q and K, before their product."""
    q, k = np.asarray(recipe.q[0], np.float64), np.asarray(recipe.rows[0][:, recipe.reads], np.float64)
    seen = case.run.positions[None, :] <= case.run.positions[:, None]
    right = np.where(seen, np.einsum("thd,shd->hts", q, k), 0.0)
    error = np.where(seen, error, 0.0)
    if _is_steady(error.transpose(1, 0, 2).reshape(len(seen), -1), right.transpose(1, 0, 2).reshape(len(seen), -1)):
        return {}

    def spread(block: int) -> Array:
        dq, dk = steps(q, block), steps(k, block)
        moved = np.einsum("thd,shd->hts", q * q, dk * dk) + np.einsum("thd,shd->hts", dq * dq, k * k)
        return np.where(seen, np.sqrt(moved), 0.0)

    return _even(EVEN * FOUR_BITS, ((block, np.abs(error), spread(block)) for block in BLOCKS), SUMMED)


def _of_values(recipe: Values, error: Array) -> Looks:
    """Of V, before it is weighed."""
    p, v = np.asarray(recipe.probs[0], np.float64), np.asarray(recipe.rows[0][:, recipe.reads], np.float64)
    right = np.einsum("hts,shd->thd", p, v)
    error = error.reshape(right.shape)
    if _is_steady(error.reshape(len(error), -1), right.reshape(len(right), -1)):
        return {}

    def spread(block: int) -> Array:
        return np.asarray(np.sqrt(np.einsum("hts,shd->thd", p * p, steps(v, block) ** 2)))

    return _even(EVEN * FOUR_BITS, ((block, np.abs(error), spread(block)) for block in BLOCKS), SUMMED)
