"""Legal choices that cancel: an engine may keep Q, K or a norm in another form than the file, and still be right.

A scale is folded into Q or K, heads are un-permuted at load and rotated in halves, norms' weights are folded into the
matrices behind them. Each makes several taps look wrong that are right together. A choice is suspected where a tap is
the baseline's once it is undone, and believed only where undoing it leaves fewer taps wrong, and no other ones.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.engines.model_file import Runnable
from llamadiff.engines.treatments import undone
from llamadiff.numerics import metrics
from llamadiff.numerics.arithmetic import precision
from llamadiff.result.conventions import Choice
from llamadiff.trace.reader import Trace
from llamadiff.trace.taps import Tap, parse, shape_of

Array = NDArray[Any]

Q_WORDS, K_WORDS = ("Qcur_proj", "Qcur_normed", "Qcur_rope"), ("Kcur_proj", "Kcur_normed", "Kcur_rope", "kv_k")
SCORES = "kq"
ALIKE = 0.01  # NMSE of taps that are one but for rounding and what went wrong before them
NEAR = 0.01  # how near a measured factor must be to one that is folded
PARTS = (1, 0.5, 0.25)  # of the attention scale that one side may have


def suspected(model: Runnable, baseline: Trace, candidate: Trace, wrong: Collection[str]) -> list[Choice]:
    """The choices that the first layer of a candidate may show, of those that would explain a ``wrong`` tap's word."""
    first = [tap for tap in model.taps if tap.layer in (0, None) and tap.name in baseline and tap.name in candidate
             and tap.name not in candidate.known]  # fmt: skip
    pairs = {tap.kind.word: (tap, candidate[tap.name].reshape(baseline.shape(tap.name)), baseline[tap.name])
             for tap in first if candidate[tap.name].size == baseline[tap.name].size}  # fmt: skip
    found = [*_permuted(model, pairs), *_scaled(model, pairs), *_unweighted(model, pairs)]
    return [choice for choice in found if set(choice.done) & set(wrong)]


Pairs = Mapping[str, tuple[Tap, Array, Array]]  # word -> tap, the candidate's values, the baseline's


def _is_undone(model: Runnable, pair: tuple[Tap, Array, Array], treatment: str) -> bool:
    """Whether a tap is the baseline's once a treatment is undone, and not before."""
    tap, own, right = pair
    return _same(undone(own, tap, (treatment,), model), right) and not _same(own, right)


def _is_nearer(model: Runnable, pair: tuple[Tap, Array, Array], treatment: str) -> bool:
    """Whether undoing a treatment brings a tap nearer to the baseline's, however far that has drifted."""
    tap, own, right = pair
    return metrics.nmse(undone(own, tap, (treatment,), model), right, 0) < metrics.nmse(own, right, 0)


def _same(own: Array, right: Array) -> bool:
    return metrics.nmse(own, right, 0) <= ALIKE


def _permuted(model: Runnable, pairs: Pairs) -> Iterator[Choice]:
    words = [word for word in (*Q_WORDS, *K_WORDS) if word in pairs]
    treatment, order = ("permuted", "halves") if model.rope_pairs else ("paired", "pairs")
    shown = [word for word in words if _is_undone(model, pairs[word], treatment)]
    if {"Qcur_proj", "Kcur_proj"} & set(shown):
        yield Choice(f"keeps Q and K in {order} and rotates them so", dict.fromkeys(words, treatment))


def _unweighted(model: Runnable, pairs: Pairs) -> Iterator[Choice]:
    norms = [
        word for word, (tap, own, _) in pairs.items()
        if tap.kind.op in ("RMS_NORM", "NORM") and "cur" not in word
        and model.weights.shape(model.weight_names[tap.name]) == own.shape[-1:]
    ]  # fmt: skip
    if any(_is_undone(model, pairs[word], "unweighted") for word in norms):
        folded = [word for word in norms if _is_nearer(model, pairs[word], "unweighted")]
        yield Choice("has the weights of its norms in the matrices behind them", dict.fromkeys(folded, "unweighted"))


def _scaled(model: Runnable, pairs: Pairs) -> Iterator[Choice]:
    """A part of the attention scale in Q, in K, or in both, or in the scores; for exp2, times log2(e)."""
    scale = 1 / math.sqrt(model.sizes["dim"])
    folded = [scale**part * base for part in PARTS for base in (1.0, math.log2(math.e))]
    sides = {word: _factor(pairs[word], folded) for word in (*Q_WORDS, *K_WORDS) if word in pairs}
    if SCORES in pairs:
        sides[SCORES] = _factor(pairs[SCORES], [*folded, 1 / scale])
    factors = {word: factor for word, factor in sides.items() if factor is not None}
    for before, word in (("Qcur_proj", "Qcur_rope"), ("Kcur_proj", "Kcur_rope")):  # whatever else RoPE gets wrong
        if before in factors and word in pairs and f"{word[:4]}_normed" not in pairs:
            factors.setdefault(word, factors[before])
    last = [next((factors[word] for word in reversed(words) if word in factors), 1.0) for words in (Q_WORDS, K_WORDS)]
    if SCORES in pairs and math.prod(last) != 1.0:  # scores have both sides' factors, whatever else is wrong with them
        factors[SCORES] = math.prod(last)
    done = {word: "scaled" if factor == scale else f"times {factor:.12g}" for word, factor in factors.items()}
    if not done:
        return
    if factors == {SCORES: 1 / scale}:
        yield Choice("records its scores before they are scaled", done)
        return
    where = [name for name, words in (("Q", Q_WORDS), ("K", K_WORDS)) if set(words) & set(done)] or ["the scores"]
    yield Choice(f"has the attention scale in {' and '.join(where)}", done)


def _factor(pair: tuple[Tap, Array, Array], folded: Sequence[float]) -> float | None:
    """Which of the ``folded`` factors a tap has against the baseline's; None if it has none."""
    own, right = (np.asarray(x, np.float64) for x in pair[1:])
    if pair[0].causal:
        own, right = np.tril(own), np.tril(right)
    size = float((right * right).sum())
    if not size or not np.isfinite(own).all():
        return None
    ratio = float((own * right).sum()) / size
    if not ratio > 0 or metrics.nmse(own / ratio, right, 0) > ALIKE:
        return None
    near = min(folded, key=lambda factor: abs(math.log(factor / ratio)))
    return near if abs(math.log(near / ratio)) <= NEAR else None


def without(choices: Sequence[Choice], model: Runnable, trace: Trace) -> Trace:
    """A trace with choices undone, as a map that states them would have it."""
    done = {word: treatment for choice in choices for word, treatment in choice.done.items()}
    by_name = {tap.name: tap for tap in model.taps}
    arrays, kept = dict[str, Array](), dict(trace.kept)
    for name in trace:
        tap, values = parse(name), trace[name]
        treatment = done.get(tap.kind.word) if tap is not None and name in by_name else None
        if treatment is not None:
            kept.setdefault(name, precision(values))
            values = _as_it_was(values, by_name[name], treatment, model)
        arrays[name] = values
    widened = {name: "F32" if kind == "BF16" or name in kept else kind for name, kind in trace.dtypes.items()}
    return Trace(trace.info, arrays, widened, trace.path, trace.known, kept, trace.printed)


def _as_it_was(values: Array, tap: Tap, treatment: str, model: Runnable) -> Array:
    own = shape_of(tap, values.shape[tap.row_axis], model.sizes)
    return undone(np.asarray(values, np.float32).reshape(own), tap, (treatment,), model)
