"""What an engine's arithmetic rounds, read back from what it recorded.

A product with at least as many outputs as inputs tells how far its inputs must have been moved to give its outputs:
W d = error, least squares for each token. Rounding moves each value by a part of a step, evenly; a bug moves some by a
thousand. What is read this way is described, and sets the noise that the engine's other ops of this kind may have.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff import limits
from llamadiff.arithmetic import EIGHT_BITS, ROUNDINGS, precision
from llamadiff.carrier import Carrier
from llamadiff.diagnose.activations import Gated
from llamadiff.diagnose.attention import Scores, Values
from llamadiff.diagnose.case import Case, NotRecordedError
from llamadiff.diagnose.diagnosis import Scene, case_of
from llamadiff.diagnose.known import recipe_of
from llamadiff.diagnose.products import Product
from llamadiff.diagnose.rope import Rope
from llamadiff.diagnose.search import VARIES, Clock, search
from llamadiff.diagnose.softmax import Softmax
from llamadiff.judging import Finding, Local
from llamadiff.lanes import F32, rounding_type, shaken
from llamadiff.model import Runnable
from llamadiff.rounding import BLOCKS, LEVELS, OWN, TENSOR, UNIFORM, Rounding, steps
from llamadiff.taps import Tap

Array = NDArray[Any]
Looks = dict[int, tuple[float, float]]  # what shares a step -> the kurtosis of movements in steps, and their rms

EVEN = 8.0  # the largest movement over their rms: sqrt(3) of a rounding, up to this where roundings add up
STEPS_OF_8 = 1.25  # steps of 8 bits that activations may be moved by at most: 1 where values are cut off
STEPS_OF_4 = LEVELS / 7 * STEPS_OF_8  # the same of a cache, which may have 4
USUAL = 1.5 * UNIFORM * LEVELS / 7  # the rms of 4 bits, in steps of 8, with some room
USUAL_OF_8 = 0.75  # the rms of 8 bits, in steps: 0.58 where values are cut off
FLOATING = 2.0**-6  # of a value: sums and values of 16 bits are moved by less
SUMMED = EVEN * 2.0**-7  # the same where an error is a sum of many
CRUDE = 2.0**-7  # of a value (an angle, an exponent), that a table or a polynomial of 16 bits is off by at most
SMALLEST = 2.0**-14  # float16's smallest normal: below it values have no 16 bits
LEFT = 0.05  # of the error, that the movement of inputs may leave unexplained
STEADY = 0.8  # of the movement, that one factor or one vector may explain: more is no rounding
MOST_WORK = 3e10  # multiplications of one least squares
LARGE = 1 << 22  # weights, or results, that are looked at of one product
RIDGE = 1e-14  # of the squares' trace: keeps what is not determined small
READ = 6  # taps of a kind that are read
CLEAR = 3.0  # how far below the limit of noise a tap is that 16 bits alone explain
NEAR = 0.1  # of float32's error, that another arithmetic leaves where the engine's is a variant of it
APART = 1.03  # kurtoses of two kinds of steps that differ by less do not tell them apart
EQUAL = 1.25  # errors of two known roundings that differ by less do not tell them apart
FLIPS = 4.0  # how many times what is rounded the other way, in a sample of it, may be left
F32_BASE = "F32"
ALIKE = 6.0  # how many times the movement of the median token one may have
UNEVEN = 100.0  # where what is rounded has hardly anything to lose: probabilities near one
AGREE = 5.0  # sizes of one rounding, read at several taps, differ by less
CACHED = {"kq": "cache_k", "kqv_out": "cache_v"}  # products of attention -> what they read
BY_TABLE = ("ROPE", "SOFT_MAX", "SWIGLU")  # ops that engines look up or approximate
KEPT = {"kv_k": "kept_k", "kv_v": "kept_v"}  # caches -> their rows on the way into them
OTHERS = {"Q8_0": 32, "Q8_K": 256, **dict.fromkeys(EIGHT_BITS, 1)}  # known roundings -> what rows must be multiples of
MOSTLY = 0.6  # of the taps of a kind must show it


def _like_rounding(d: Array, x: Array, most: float = STEPS_OF_8, step: Callable[[Array, int], Array] = steps) -> Looks:
    """The roundings that a movement d of values x [token, ..., n] looks like: bounded, even, no factor, no vector."""
    if not np.isfinite(d).all() or not d.any() or _is_steady(d, x):
        return {}
    blocks = [block for block in BLOCKS if block <= 0 or x.shape[-1] % block == 0]
    return _even(most, ((block, np.abs(d), step(x, block)) for block in blocks))


def _even(
    most: float,
    movements: Iterable[tuple[int, Array, Array]],
    own: float = FLOATING,
    even: float = EVEN,
    usual: float = np.inf,
) -> Looks:
    """Of movements [token, ...] in several steps (block, movement, its steps), those that rounding may make.

    They are even over all values, in every token as in the others, and no larger than it. ``most``: how many steps
    rounding may move a value by; ``own``: the part of a value, where that is its own step; ``even``: how many times the
    rms one value may be moved by; ``usual``: the largest rms, in steps.
    """
    found: Looks = {}
    for block, moved, step in movements:
        in_steps = np.divide(moved, step, out=np.zeros_like(moved), where=step > 0).reshape(len(moved), -1)
        counts = (step > 0).reshape(len(moved), -1).sum(axis=1)
        tokens = np.sqrt((in_steps**2).sum(axis=1) / np.maximum(counts, 1))[counts > 0]
        size, peak = float(np.sqrt((in_steps**2).sum() / max(1, counts.sum()))), float(in_steps.max())
        alike = even >= UNEVEN or not len(tokens) or tokens.max() <= ALIKE * np.median(tokens)
        if 0 < peak <= min(own if block == OWN else most, even * size) and size <= usual and alike:
            fourth = float((in_steps**4).sum() / max(1, counts.sum()))
            found[block] = fourth / size**4, size
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

    @property
    def is_determined(self) -> bool:
        """Whether its outputs, being no fewer and in float32, tell its inputs."""
        out, n = self.shape
        enough = self.case.weight is not None and _is_enough(out, n, self.case)
        return enough and precision(np.asarray(self.case.recorded)) == F32

    @property
    def looked_at(self) -> Case:
        """The case on as many outputs as show how even errors are; on all, if they tell the inputs."""
        width = self.case.run.shapes[self.case.tap.name][-1]
        most = LARGE // max(1, self.shape[1], len(self.case.run.positions))
        if self.case.weight is None or self.is_determined or width <= most:
            return self.case
        return self.case.at(np.unique(np.linspace(0, width - 1, most).astype(int)))

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        weight = self.case.weight
        *_, out, n = self.case.engine.w.shape(weight) if weight is not None else (0, 0)
        return out, n


def read(scene: Scene, findings: Sequence[Finding]) -> tuple[dict[str, Rounding], dict[str, Rounding]]:
    """The roundings of an engine by kind of operand: its own, and those with ggml's that it has elsewhere.

    Both are empty where all that it recorded has ggml's, or shows none. Kinds are a weight type (``Q4_K``;
    ``Q4_K:512`` where rows of that width have another), ``cache_k`` and ``cache_v``, ``kept_k`` and ``kept_v``, and
    ops.
    """
    fitting, beyond = _sorted(scene, findings)
    found: dict[str, Rounding] = {}
    ggmls = {kind: Rounding(counts.most_common(1)[0][0]) for kind, counts in fitting.items()}
    for kind in dict.fromkeys(each.kind for each in beyond):
        own = [each for each in beyond if each.kind == kind]
        widths = _by_width(own)
        for key, taps in ({kind: own} if _are_most(own, fitting[kind]) else widths).items():
            agreed = _rounding_of(taps, scene.clock) if _are_most(taps, fitting[key]) else None
            found |= {key: agreed} if agreed is not None else {}
        for key in [key for key, taps in widths.items() if _are_most(taps, fitting[key])]:
            ggmls.pop(key, None)
    return found, ggmls | found if found else {}


def _are_most(own: Sequence[Beyond], fitting: Counter[str]) -> bool:
    """Whether taps that fit nothing are most of their kind."""
    return len(own) >= MOSTLY * (len(own) + fitting.total())


def _by_width(own: Sequence[Beyond]) -> dict[str, list[Beyond]]:
    """Products by the width of their inputs."""
    out: dict[str, list[Beyond]] = {}
    for each in own:
        if each.case.weight is not None:
            out.setdefault(f"{each.kind}:{each.shape[1]}", []).append(each)
    return out


def _sorted(scene: Scene, findings: Sequence[Finding]) -> tuple[defaultdict[str, Counter[str]], list[Beyond]]:
    """Of each kind, and each width of it, how many taps fit which known arithmetic; and the taps that fit none.

    16 bits are noise of their own. Where some taps of a kind are beyond it, those that come near its limit fit nothing.
    """
    fitting: defaultdict[str, Counter[str]] = defaultdict(Counter)
    beyond: list[Beyond] = []
    judged = list(_judged(scene, findings))
    wrong = {kind for kind, _, local in judged if local.verdict == limits.WRONG}
    for kind, tap, local in judged:
        near = kind in wrong and local.nmse * CLEAR > local.noise_limit
        is_noise = local.verdict == limits.NOISE and scene.source.precision != F32
        if local.verdict == limits.MATCH or (is_noise and not near):
            weight = scene.run.model.weight_names.get(tap.name)
            widths = [f"{kind}:{scene.run.model.weights.shape(weight)[-1]}"] if weight is not None else []
            for key in (kind, *widths):
                fitting[key][local.arithmetic or F32_BASE] += 1
        elif local.verdict == limits.WRONG or is_noise:
            beyond.append(Beyond(case_of(scene.run, scene.source, tap, local), local, kind))
    return fitting, beyond


def _judged(scene: Scene, findings: Sequence[Finding]) -> Iterator[tuple[str, Tap, Local]]:
    """The taps that may show a rounding, each with its kind: no span, no sum of other taps, nothing infinite."""
    for finding in findings:
        local, tap = finding.local.get(scene.source.name), finding.tap
        kind = kind_of(tap, scene.run.model)
        summed = tap.kind.op.startswith("MUL_MAT") and not scene.source.multiplies(tap)
        if local is not None and kind is not None and not (local.span or summed) and np.isfinite(local.nmse):
            yield kind, tap, local


def _chosen(own: Sequence[Beyond]) -> list[Beyond]:
    """The taps of a kind that are read: of each word one first, those that determine their inputs before others."""
    ordered = sorted(own, key=lambda each: not each.is_determined)
    firsts = {each.case.tap.kind.word: each for each in reversed(ordered)}.values()
    return [*(each for each in ordered if each in firsts), *(each for each in ordered if each not in firsts)][:READ]


def _rounding_of(taps: Sequence[Beyond], clock: Clock) -> Rounding | None:
    """The rounding that most of some taps show, but for those that a known bug explains."""
    while taps:
        chosen = _chosen(taps)
        found = _shown(chosen)
        explained = set[str]() if found is None or _is_listed(found) else _explained(chosen, clock)
        if not explained:
            return found
        taps = [each for each in taps if each.case.tap.kind.word not in explained]
    return None


def _is_listed(found: Rounding) -> bool:
    """Whether it is a known one, with nothing left of it."""
    return found.base in OTHERS and not found.size


def _shown(chosen: Sequence[Beyond]) -> Rounding | None:
    """A known rounding, and what is left of it in the steps that make it even."""
    read = [(case, found) for case in (each.looked_at for each in chosen) if (found := _errors(case))]
    if not read:
        return None
    nearest, distance, alone = _nearest([found for _, found in read])
    if nearest in OTHERS and all(_is_all(case, nearest, found) for case, found in read):
        return Rounding(nearest, sure=alone and distance <= VARIES)
    base = nearest if distance <= NEAR else F32_BASE
    looks = [_looks(case, found[base]) for case, found in read]
    return _agreed(base, looks, AGREE if chosen[0].case.weight is not None else UNEVEN)


def _is_all(case: Case, base: str, errors: Mapping[str, Array]) -> bool:
    """Whether a known rounding is all that a product does: next to nothing is left of its error.

    Where inputs were kept in 16 bits, some of them are rounded the other way: as much as that may be left.
    """
    left, whole = (float(np.square(errors[way]).sum()) for way in (base, F32_BASE))
    if left <= VARIES * whole:
        return True
    product = recipe_of(case)
    assert isinstance(product, Product)
    kept = precision(product.x)
    if kept == F32 or not np.isfinite(left):
        return False
    moved = np.asarray(shaken(product.x[0], kept), product.x.dtype)
    flipped = _by_others(case, replace(product, x=moved[None]))[base] - _by_others(case, product)[base]
    return left <= FLIPS * float(np.square(np.asarray(flipped, np.float64)).sum())


def _agreed(base: str, looks: Sequence[Looks], agree: float) -> Rounding | None:
    """What most taps look like, in the steps in which that is evenest."""
    blocks = Counter(block for each in looks for block in each)
    shown = sum(map(bool, looks))  # the others are wrong, or of another kind
    likely = [block for block, count in blocks.items() if count >= max(MOSTLY * shown, len(looks) / 2)]
    if not likely:
        return None
    alike = {block: [each[block] for each in looks if block in each] for block in likely}
    spread = {block: float(np.mean([kurtosis for kurtosis, _ in alike[block]])) for block in likely}
    best = min(spread, key=lambda block: spread[block])
    sizes = [size for _, size in alike[best]]
    sure = all(block == best or spread[block] > APART * spread[best] for block in spread)
    return Rounding(base, best, max(sizes), sure) if max(sizes) <= agree * min(sizes) else None


def _explained(chosen: Sequence[Beyond], clock: Clock) -> set[str]:
    """The words of taps that a known bug explains, of the first of each width; all, where another known way does."""
    found: set[str] = set()
    for each in {each.shape[1]: each for each in reversed(chosen)}.values():
        for fit in search(each.case, each.local.least, clock, pairs=False).fits:
            if fit.harmless and fit.causes != ("activations-rounded",):
                return {each.case.tap.kind.word for each in chosen}
            found |= set() if fit.harmless else {each.case.tap.kind.word}
    return found


def _nearest(errors: Sequence[Mapping[str, Array]]) -> tuple[str, float, bool]:
    """The known rounding nearest at all taps together, what it leaves of float32's error, and whether it is alone.

    Of equals ggml's own comes first.
    """
    common = [base for base in errors[0] if all(base in each for each in errors)]

    def distance(base: str) -> float:
        sums = [float(np.square(each[base]).sum() / max(np.square(each[F32_BASE]).sum(), 1e-300)) for each in errors]
        return float(np.exp(np.mean(np.log(np.maximum(np.nan_to_num(sums, nan=np.inf), 1e-12)))))

    distances = {base: distance(base) for base in common}
    least = min(distances.values())
    equals = [base for base, found in distances.items() if found <= EQUAL * least]
    return equals[0], distances[equals[0]], len(equals) == 1


def _errors(case: Case) -> dict[str, Array]:
    """What each known rounding of operands leaves of a tap [token, ...]; empty where its op is not laid open."""
    try:
        recipe = recipe_of(case)
        results = dict(zip(_names(case), recipe.compute(case), strict=False))
    except NotRecordedError:
        return {}
    if isinstance(recipe, Product):
        results |= _by_others(case, recipe)
    recorded = np.asarray(case.recorded, np.float64)
    if case.channels is not None:
        recorded = recorded[..., case.channels]
    return {base: recorded.reshape(y.shape) - np.asarray(y, np.float64) for base, y in results.items()}


def _names(case: Case) -> list[str]:
    """The roundings of a case's arithmetics, in their order."""
    kind = kind_of(case.tap, case.run.model) or "F32"
    return [rounding_type(policy, kind, stored) for policy, stored in case.carrier.ways]


def _by_others(case: Case, product: Product) -> dict[str, Array]:
    """A product as other engines round its activations, all in one pass over the weights."""
    ways = {way: ROUNDINGS[way] for way in OTHERS if product.x.shape[-1] % OTHERS[way] == 0}
    x = np.stack([rounding(product.x[0]) for rounding in ways.values()])
    plain = replace(case, run=replace(case.run, carrier=Carrier([(F32, {})] * len(ways))))
    return dict(zip(ways, replace(product, x=x).compute(plain), strict=True))


def kind_of(tap: Tap, model: Runnable) -> str | None:
    """What a tap's op multiplies by, or keeps, or else the op itself where its numbers may be another's; or None."""
    if not tap.kind.op.startswith("MUL_MAT"):
        return KEPT.get(tap.kind.word, tap.kind.op if tap.kind.op in BY_TABLE else None)
    return CACHED.get(tap.kind.word) or model.weight_types.get(tap.name)


def _looks(case: Case, error: Array) -> Looks:
    """The roundings of operands that an error looks like."""
    recipe = recipe_of(case)
    if isinstance(recipe, Product):
        return _of_product(case, recipe, error)
    if isinstance(recipe, Scores):
        return _of_scores(case, recipe, error)
    if isinstance(recipe, Values):
        return _of_values(recipe, error)
    if case.tap.kind.op in BY_TABLE:
        return _of_value(case, recipe, error)
    kept = np.asarray(recipe.compute(case)[0], np.float64) if case.tap.kind.word in KEPT else None
    return {} if kept is None else _like_rounding(error, kept, STEPS_OF_4)


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
    if _is_steady(error, _each(matrices, x)):
        return {}

    def spread(block: int) -> Array:
        """What moving every input by a step makes of the sums."""
        moved = np.square(_steps_of(case, x, block))
        return np.asarray(np.sqrt(_each([replace(one, w=np.square(one.w)) for one in matrices], moved)))

    terms = _even(0.0, [(OWN, np.abs(error), spread(OWN))], SUMMED, 2 * EVEN)
    out, n = matrices[0].w.shape
    if case.channels is None and _is_enough(out, n, case) and precision(np.asarray(case.recorded)) == F32:
        return _of_inputs(case, matrices, x, error) or terms
    blocks = ((block, np.abs(error), spread(block)) for block in BLOCKS if block != OWN)
    return terms | _even(np.inf, blocks, SUMMED, EVEN, USUAL_OF_8)


def _is_enough(out: int, n: int, case: Case) -> bool:
    """Whether so many outputs tell so many inputs, with no more work and memory than that is worth."""
    experts = case.engine.w.shape(str(case.weight))[:-2]
    return (
        out >= n and int(np.prod(experts)) * out * n * n <= MOST_WORK and int(np.prod(experts)) * out * n <= 4 * LARGE
    )


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
    stored = case.engine.w.stored(product.name)
    rows: Any = slice(None) if product.rows is None else product.rows
    if case.channels is not None:
        rows = case.channels if product.rows is None else rows[case.channels]
    experts = [None] if product.chosen is None else [int(expert) for expert in np.unique(product.chosen)]
    for expert in experts:
        data = (stored if expert is None else stored[expert])[rows]
        w = np.asarray(case.engine.w.decoded(product.name, data), np.float64)
        if product.scale is not None:
            w = w * (product.scale if expert is None else product.scale[expert])
        yield _Matrix(w, slice(None) if product.chosen is None else product.chosen[0] == expert)


def _each(matrices: Sequence[_Matrix], x: Array) -> Array:
    """Every input x [..., in] by its matrix: [..., out]."""
    result = np.empty((*x.shape[:-1], len(matrices[0].w)))
    for one in matrices:
        result[one.rows] = x[one.rows] @ one.w.T
    return result


def _of_value(case: Case, recipe: Any, error: Array) -> Looks:
    """Of each value by itself, where sines, exponentials and the like are approximate.

    An angle's error moves a pair by a part of its length; a score's, a probability by a part of itself for each unit.
    """
    right = np.asarray(recipe.compute(case)[0], np.float64)
    size = np.abs(right)
    if isinstance(recipe, Rope):
        size = _lengths_of_pairs(right, recipe)
    elif isinstance(recipe, Softmax):
        scores = np.where(recipe.hidden, 0.0, np.asarray(recipe.scores[0], np.float64) * recipe.scale)
        size = right * (1 + np.abs(scores).max(axis=-1, keepdims=True)) + SMALLEST
        error, right, size = (x.swapaxes(0, 1) for x in (error, right, size))
    elif isinstance(recipe, Gated):
        gate, up = (np.abs(np.asarray(x[0], np.float64)) for x in (recipe.gate, recipe.up))
        size = up * (gate + SMALLEST)
    there = np.isfinite(error).reshape(len(error), -1).all(axis=1)
    error, right, size = (x[there] for x in (error, right, size))
    rows = error.reshape(len(error), -1), right.reshape(len(right), -1)
    if _is_steady(*rows):
        return {}
    looks = _even(0.0, [(OWN, np.abs(error), size)], CRUDE)
    whole = float(np.sqrt((error**2).sum() / (right**2).sum()))
    return {block: (kurtosis, whole) for block, (kurtosis, _) in looks.items()}


def _lengths_of_pairs(x: Array, recipe: Rope) -> Array:
    """The length of the pair that each value [..., dim] was rotated in."""
    n, size = recipe.rope.n_rot, np.abs(x)
    shape, axis = ((-1, 2), -1) if recipe.pairs else ((2, -1), -2)
    pairs = x[..., :n].reshape(*x.shape[:-1], *shape)
    length = np.sqrt((pairs**2).sum(axis=axis, keepdims=True))
    size[..., :n] = np.broadcast_to(length, pairs.shape).reshape(*x.shape[:-1], n)
    return size


def _of_scores(case: Case, recipe: Scores, error: Array) -> Looks:
    """Of Q and K, before their product."""
    q, k = np.asarray(recipe.q[0], np.float64), np.asarray(recipe.rows[0][:, recipe.reads], np.float64)
    seen = case.run.positions[None, :] <= case.run.positions[:, None]
    right = np.einsum("thd,shd->ths", q, k) * seen[:, None]
    error = error.swapaxes(0, 1) * seen[:, None]  # [token, head, key]
    if _is_steady(error.reshape(len(seen), -1), right.reshape(len(seen), -1)):
        return {}

    def spread(block: int) -> Array:
        dq, dk = steps(q, block), steps(k, block)
        moved = np.einsum("thd,shd->ths", q * q, dk * dk) + np.einsum("thd,shd->ths", dq * dq, k * k)
        return np.asarray(np.sqrt(moved) * seen[:, None])

    return _even(np.inf, ((block, np.abs(error), spread(block)) for block in BLOCKS), SUMMED, EVEN, USUAL)


def _of_values(recipe: Values, error: Array) -> Looks:
    """Of V before it is weighed, or of its weights."""
    p, v = np.asarray(recipe.probs[0], np.float64), np.asarray(recipe.rows[0][:, recipe.reads], np.float64)
    right = np.einsum("hts,shd->thd", p, v)
    error = error.reshape(right.shape)

    def spread(block: int) -> Array:
        return np.asarray(np.sqrt(np.einsum("hts,shd->thd", p * p, steps(v, block) ** 2)))

    looks: Looks = {}
    if not _is_steady(error.reshape(len(error), -1), right.reshape(len(right), -1)):
        looks = _even(np.inf, ((block, np.abs(error), spread(block)) for block in BLOCKS), SUMMED, EVEN, USUAL)
    terms = np.einsum("hts,shd->thd", p, np.abs(v))  # of one weight near one, rounding is a factor
    return looks or _even(0.0, [(OWN, np.abs(error), terms)], CRUDE / 2, UNEVEN)
