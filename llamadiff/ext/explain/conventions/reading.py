"""What an engine's arithmetic rounds, read back from what it recorded.

Of each kind of operand some taps that fit no known arithmetic are looked at (``looks.py``). What most of them show is
described, and sets the noise that the engine's other ops of this kind may have.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.engines.model_file import Runnable
from llamadiff.ext.explain.case import Case, NotRecordedError
from llamadiff.ext.explain.conventions.evenness import UNEVEN, Looks
from llamadiff.ext.explain.conventions.looks import BY_TABLE, KEPT, LARGE, determines, looks_of
from llamadiff.ext.explain.conventions.recipes import Product, recipe_of
from llamadiff.ext.explain.diagnose import Scene, case_of
from llamadiff.ext.explain.search import VARIES, Fit, replayed, search
from llamadiff.judge.finding import Finding, Local
from llamadiff.judge.verdict import MATCH, NOISE, WRONG
from llamadiff.numerics.arithmetic import COMPUTES, EIGHT_BIT_WAYS, fits_blocks, precision, round_to
from llamadiff.numerics.policies import CACHES, F32, operand_kind, perturb, rounding_type
from llamadiff.numerics.rounding import Rounding
from llamadiff.numerics.rounding_tap import Carrier
from llamadiff.trace.taps import Tap

Array = NDArray[Any]

READ = 6  # taps of a kind that are read, or one of each word where there are more words
CLEAR = 3.0  # how far below the limit of noise a tap is that 16 bits alone explain
NEAR = 0.1  # of float32's error, that another arithmetic leaves where the engine's is a variant of it
APART = 1.03  # kurtoses of two kinds of steps that differ by less do not tell them apart
EQUAL = 1.25  # errors of two known roundings that differ by less do not tell them apart
FLIPS = 4.0  # how many times what is rounded the other way, in a sample of it, may be left
PLAIN = "F32"  # the rounding that is none: ggml's type of float32
AGREE = 5.0  # sizes of one rounding, read at several taps, differ by less
PARTLY = 0.25  # of an error, that a bug may leave to rounding
CLOSED = ("kqv",)  # products that no recipe lays open
MOSTLY = 0.6  # of the taps of a kind must show it
LEAST = dict.fromkeys(BY_TABLE, 8) | dict.fromkeys((*CACHES, *KEPT.values()), 4)  # bits: what is coarser is a mistake
LEAST_OF_PRODUCTS = 5
STILL = 1e-3  # of the median row's movement: a row that is moved less is not rounded
FEW_STILL = 0.1  # of the rows may be so: a first token is not turned, and a sum of one key has nothing to lose

Explaining = Callable[[], Scene | None]


@dataclass(frozen=True)
class Beyond:
    """A tap that is beyond every known arithmetic, ready to be read; ``kind``: what its op multiplies by."""

    case: Case
    local: Local
    kind: str

    @property
    def looked_at(self) -> Case:
        """The case on as many outputs as show how even errors are; on all, if they tell the inputs."""
        width = self.case.run.shape(self.case.tap.name)[-1]
        most = LARGE // max(1, self.shape[1], len(self.case.run.positions))
        if self.case.weight is None or determines(self.case) or width <= most:
            return self.case
        return self.case.at(np.unique(np.linspace(0, width - 1, most).astype(int)))

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        weight = self.case.weight
        *_, out, n = self.case.engine.w.shape(weight) if weight is not None else (0, 0)
        return out, n


def read(
    scene: Scene, findings: Sequence[Finding], explaining: Explaining
) -> tuple[dict[str, Rounding], dict[str, Rounding]]:
    """The roundings of an engine by kind of operand: its own, and those with ggml's that it has elsewhere.

    Both are empty where all that it recorded has ggml's, or shows none. Kinds are a weight type (``Q4_K``;
    ``Q4_K:512`` where rows of that width have another), ``cache_k`` and ``cache_v``, ``kept_k`` and ``kept_v``, and
    ops. ``explaining``: the same scene in llama.cpp's graph, where bugs are known.
    """
    fitting, beyond = _sorted(scene, findings)
    found, tied = dict[str, Rounding](), set[str]()
    ggmls = {kind: Rounding(counts.most_common(1)[0][0]) for kind, counts in fitting.items()}
    for kind in dict.fromkeys(each.kind for each in beyond):
        own = [each for each in beyond if each.kind == kind]
        widths = _by_width(own)
        whole = _agreed_by(own, fitting[kind], explaining)
        agreed = (
            {kind: whole}
            if whole is not None
            else {key: _agreed_by(taps, fitting[key], explaining) for key, taps in widths.items()}
        )
        if not any(agreed.values()):  # a few taps, off by values that may be rounded either way
            agreed = {kind: _with_ties(own)}
            tied |= {kind} if agreed[kind] is not None else set()
        found |= {key: rounding for key, rounding in agreed.items() if rounding is not None}
        for key, taps in widths.items():  # where most do not show ggml's, some have it by chance
            if _are_most(taps, fitting[key]) or (whole is not None and len(taps) >= fitting[key].total()):
                ggmls.pop(key, None)
    its_own = {kind: rounding for kind, rounding in found.items() if kind not in tied}
    return its_own, ggmls | found if found else {}


def _agreed_by(taps: Sequence[Beyond], fitting: Counter[str], explaining: Explaining) -> Rounding | None:
    """The rounding that some taps show, if they are most of their kind."""
    return _rounding_of(taps, explaining) if _are_most(taps, fitting) else None


def _with_ties(taps: Sequence[Beyond]) -> Rounding | None:
    """The known rounding to 8 bits that some taps have but for a few values, which may lie between two of its steps."""
    found = _shown(_chosen(taps)) if all(each.case.weight is not None for each in taps) else None
    return found if found is not None and _is_listed(found) else None


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
    wrong = {kind for kind, _, local in judged if local.verdict == WRONG}
    for kind, tap, local in judged:
        near = kind in wrong and local.nmse * CLEAR > local.noise_limit
        is_noise = local.verdict == NOISE and scene.source.precision != F32
        if local.verdict == MATCH or (is_noise and not near):
            weight = scene.run.model.weight_names.get(tap.name)
            widths = [f"{kind}:{scene.run.model.weights.shape(weight)[-1]}"] if weight is not None else []
            for key in (kind, *widths):
                fitting[key][local.arithmetic or PLAIN] += 1
        elif local.verdict == WRONG or is_noise:
            beyond.append(Beyond(case_of(scene.run, scene.source, tap, local), local, kind))
    return fitting, beyond


def _judged(scene: Scene, findings: Sequence[Finding]) -> Iterator[tuple[str, Tap, Local]]:
    """The taps that may show a rounding, each with its kind: no span, no sum of other taps, nothing infinite.

    Nor a softmax over single values, which is one in any arithmetic.
    """
    for finding in findings:
        local, tap = finding.local.get(scene.source.name), finding.tap
        kind = kind_of(tap, scene.run.model)
        summed = tap.kind.op.startswith("MUL_MAT") and not scene.source.multiplies(tap)
        if local is None or kind is None or local.span or summed or not np.isfinite(local.nmse):
            continue
        if tap.kind.op != "SOFT_MAX" or not np.isin(scene.source.trace[tap.name], (0, 1)).all():
            yield kind, tap, local


def _chosen(own: Sequence[Beyond]) -> list[Beyond]:
    """The taps of a kind that are read: of each word one first, those that determine their inputs before others."""
    ordered = sorted(own, key=lambda each: not determines(each.case))
    firsts = {each.case.tap.kind.word: each for each in reversed(ordered)}.values()
    others = [each for each in ordered if each not in firsts]
    return [*(each for each in ordered if each in firsts), *others[: max(0, READ - len(firsts))]]


def _rounding_of(taps: Sequence[Beyond], explaining: Explaining) -> Rounding | None:
    """The rounding that most of some taps show, but for those that a known bug explains."""
    while taps:
        chosen = _chosen(taps)
        found = _shown(chosen)
        found = found if found is not None and found.bits >= LEAST.get(chosen[0].kind, LEAST_OF_PRODUCTS) else None
        explained = set[str]() if found is None or _is_listed(found) else _explained(chosen, explaining)
        if not explained:
            return found
        taps = [each for each in taps if each.case.tap.kind.word not in explained]
    return None


def _is_listed(found: Rounding) -> bool:
    """Whether it is a known one, with nothing left of it."""
    return found.base in EIGHT_BIT_WAYS and not found.size


def _shown(chosen: Sequence[Beyond]) -> Rounding | None:
    """A known rounding, and what is left of it in the steps that make it even."""
    read = [(case, found) for case in (each.looked_at for each in chosen) if (found := _errors(case))]
    if not read:
        return None
    nearest, distance, alone = _nearest([found for _, found in read])
    if nearest in EIGHT_BIT_WAYS and all(_is_all(case, nearest, found) for case, found in read):
        return Rounding(nearest, sure=alone and distance <= VARIES)
    base = nearest if distance <= NEAR else PLAIN
    more = [(case, found) for case, found in read if base not in EIGHT_BIT_WAYS or not _is_all(case, base, found)]
    looks = [looks_of(case, found[base]) if _moves_all(case, found[base], base) else {} for case, found in more]
    return _agreed(base, looks, AGREE if chosen[0].case.weight is not None else UNEVEN)


def _moves_all(case: Case, error: Array, base: str) -> bool:
    """Whether hardly a row is exact: what rounds one token rounds the others. Of a known rounding many may be."""
    seen = np.moveaxis(case.compared(error), case.tap.row_axis, 0)
    rows = seen.reshape(len(seen), -1)
    moved = np.sqrt(np.square(np.nan_to_num(rows)).sum(axis=1))
    still = int((moved < STILL * np.median(moved)).sum())
    return base != PLAIN or still <= max(1, FEW_STILL * len(moved))


def _is_all(case: Case, base: str, errors: Mapping[str, Array]) -> bool:
    """Whether a known rounding is all that a product does: next to nothing is left of its error.

    Where inputs were kept in 16 bits, some of them are rounded the other way: as much as that may be left.
    """
    left, whole = (float(np.square(errors[way]).sum()) for way in (base, PLAIN))
    if left <= VARIES * whole:
        return True
    product = recipe_of(case)
    assert isinstance(product, Product)
    kept = precision(product.x)
    if kept == F32 or not np.isfinite(left):
        return False
    moved = np.asarray(perturb(product.x[0], kept), product.x.dtype)
    flipped = _by_others(replace(product, x=moved[None]))[base] - _by_others(product)[base]
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


def _explained(chosen: Sequence[Beyond], explaining: Explaining) -> set[str]:
    """The words of taps that a known bug explains, of the first of each width; all, where another known way does.

    A bug that leaves little of an error explains it too: what is left is the rounding.
    """
    scene, found = explaining(), set[str]()
    if scene is None:
        return found
    chosen = [replace(each, case=case_of(scene.run, scene.source, each.case.tap, each.local)) for each in chosen]
    for each in {each.shape[1]: each for each in reversed(chosen)}.values():
        others = [other for other in chosen if other is not each]
        outcome = search(each.case, each.local.least, scene.budget, pairs=False)
        for fit in outcome.fits:
            if fit.causes != ("activations-rounded",) and _holds(fit, others):
                if fit.harmless:
                    return {each.case.tap.kind.word for each in chosen}
                found.add(each.case.tap.kind.word)
        alike = [other for other in others if other.case.tap.kind.word == each.case.tap.kind.word]
        if alike and any(_is_mostly(fit, [each, *alike]) for fit in outcome.nearest):
            found.add(each.case.tap.kind.word)
    return found


def _is_mostly(fit: Fit, taps: Sequence[Beyond]) -> bool:
    """Whether a bug makes most of the errors of some taps of one kind."""
    return all(replayed(tap.case, tap.local.least, fit.key, fit.values, PARTLY) is not None for tap in taps)


def _holds(fit: Fit, others: Sequence[Beyond]) -> bool:
    """Whether a way, or a bug's constant, found at one tap explains the others: one of few values fits by chance."""
    if not fit.harmless and all(value is None for value in fit.values):
        return True
    again = (replayed(other.case, other.local.least, fit.key, fit.values) for other in others)
    return all(found is not None and found.values == fit.values for found in again)


def _nearest(errors: Sequence[Mapping[str, Array]]) -> tuple[str, float, bool]:
    """The known rounding nearest at all taps together, what it leaves of float32's error, and whether it is alone.

    Of equals ggml's own comes first.
    """
    common = [base for base in errors[0] if all(base in each for each in errors)]

    def distance(base: str) -> float:
        sums = [float(np.square(each[base]).sum() / max(np.square(each[PLAIN]).sum(), 1e-300)) for each in errors]
        return float(np.exp(np.mean(np.log(np.maximum(np.nan_to_num(sums, nan=np.inf), 1e-12)))))

    distances = {base: distance(base) for base in common}
    least = min(distances.values())
    equals = [base for base, found in distances.items() if found <= EQUAL * least]
    alone = len({base.replace("float16 ", "").replace("float32 ", "") for base in equals}) == 1
    return equals[0], distances[equals[0]], alone


def _errors(case: Case) -> dict[str, Array]:
    """What each known rounding of operands leaves of a tap [token, ...]; empty where its op is not laid open."""
    try:
        recipe = recipe_of(case)
        results = dict(zip(_names(case), recipe.compute(case.carrier), strict=False))
    except NotRecordedError:
        return {}
    if isinstance(recipe, Product):
        results |= _by_others(recipe)
    recorded = np.asarray(case.recorded, np.float64)
    if case.channels is not None:
        recorded = recorded[..., case.channels]
    return {base: recorded.reshape(y.shape) - np.asarray(y, np.float64) for base, y in results.items()}


def _names(case: Case) -> list[str]:
    """The roundings of a case's arithmetics, in their order."""
    kind = kind_of(case.tap, case.run.model) or "F32"
    return [rounding_type(policy, kind, stored) for policy, stored in case.carrier.ways]


def _by_others(product: Product) -> dict[str, Array]:
    """A product as other engines round its activations, all in one pass over the weights."""
    ways = eight_bit_ways(product.x.shape[-1])
    x = np.stack([round_to(product.x[0], way, product.case.run.edges) for way in ways])
    return dict(zip(ways, replace(product, x=x).compute(Carrier([(F32, {})] * len(ways))), strict=True))


def kind_of(tap: Tap, model: Runnable) -> str | None:
    """What a tap's op multiplies by, or keeps, or else the op itself where its numbers may be another's; or None."""
    if not tap.kind.op.startswith("MUL_MAT"):
        return KEPT.get(tap.kind.word, tap.kind.op if tap.kind.op in BY_TABLE else None)
    if tap.kind.word in CLOSED:
        return None
    return operand_kind(tap.kind.word, tap.kind.op, model.weight_types.get(tap.name))


def eight_bit_ways(width: int) -> dict[str, Callable[[Array], Array]]:
    """Those that rows of a width can have: ggml's are of whole blocks."""
    return {way: to for way, to in EIGHT_BIT_WAYS.items() if way in COMPUTES or fits_blocks(width, way)}
