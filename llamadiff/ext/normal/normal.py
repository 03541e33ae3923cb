"""Is it normal? How the layers' outputs grow, drift and stand out: alike on both sides, or not, and since which layer.

What both sides have is the model's own. What they do not share comes of the code where an op is wrong, and of rounding
where each op is right on its own inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llamadiff.judge.verdict import WRONG
from llamadiff.numerics.metrics import Stats
from llamadiff.result.comparison import EXACT, Comparison
from llamadiff.result.normal import Answer, Normal, Usual
from llamadiff.result.rows import SLIGHT, Row, stem
from llamadiff.trace.taps import RESIDUAL

MASSIVE, MASSIVE_TIMES = 100.0, 1000.0  # what Sun et al. call so: magnitude, and times the median one
_TINY = 1e-30
_STEADY = 2.0  # growth that is worth no word
_RMS, _MEAN, _PEAK, _KURTOSIS = 0.02, 0.02, 0.05, 0.2  # up to which two sides are alike, as shares


Value = Callable[[Stats], float]


USUAL = (
    Usual(
        "the residual's norm grows exponentially over the layers: 1.045 times a layer in GPT2-XL (48 layers, 8 times)",
        "S. Heimersheim, A. Turner: Residual stream norms grow exponentially over the forward pass, 2023",
    ),
    Usual(
        "a few values are up to 100,000 times the others, at fixed channels, whatever the input: in LLaMA2-7B at "
        "channels 1415 and 2533 of the first token and of the first full stop or line break",
        "M. Sun, X. Chen, J. Z. Kolter, Z. Liu: Massive Activations in Large Language Models, COLM 2024, "
        "arXiv:2402.17762",
    ),
    Usual(
        "models with and without gated feed-forwards have such values, and not in all does it harm to suppress them",
        "L. Owen, N. R. Chowdhury, A. Kumar, F. Güra: A Refined Analysis of Massive Activations in LLMs, 2025, "
        "arXiv:2503.22329",
    ),
    Usual(
        "channels of outsize magnitude appear in the usual training of pre-norm transformers; kurtosis measures it",
        "B. He, L. Noci, D. Paliotta, I. Schlag, T. Hofmann: Understanding and Minimising Outlier Features in "
        "Transformer Training, NeurIPS 2024, arXiv:2405.19279",
    ),
)


def normal_of(c: Comparison) -> Normal | None:
    """The answers for a comparison; None where the layers' outputs were not recorded.

    Nothing of a graph that is judged alone: each node was computed from the other side's inputs.
    """
    if c.is_engine and not any(row.drift for row in c.rows):
        return None
    candidate = EXACT if c.is_engine else str(c.candidate.get("name") or "the candidate")
    answers = is_it_normal(c.rows, str(c.baseline.get("name") or "the baseline"), candidate)
    return Normal(answers, USUAL) if answers else None


def is_it_normal(rows: Sequence[Row], baseline: str, candidate: str) -> tuple[Answer, ...]:
    """A sentence for each statistic of the layers' outputs; none where those were not recorded.

    ``baseline`` and ``candidate`` are the sides' names.
    """
    outputs = [
        (row.layer, row.baseline, row.candidate)
        for row in rows
        if stem(row.tap) == RESIDUAL and row.layer is not None and row.baseline and row.candidate
    ]
    if len(outputs) < 2 or not all(b.rms > 0 for _, b, _ in outputs):
        return ()
    study = _Layers(rows, outputs, baseline, candidate)
    whole = all(side.extremes is not None for _, *sides in outputs for side in sides)
    return _rms(study), _mean(study), *((_peak(study), _kurtosis(study)) if whole else ())


@dataclass(frozen=True)
class _Layers:
    """The layers' outputs with both sides' statistics, all rows beside them, and the sides' names."""

    rows: Sequence[Row]
    outputs: Sequence[tuple[int, Stats, Stats]]
    baseline: str
    candidate: str

    @property
    def first(self) -> Stats:
        return self.outputs[0][1]

    @property
    def last(self) -> Stats:
        return self.outputs[-1][1]

    @property
    def span(self) -> str:
        return f"from layer {self.outputs[0][0]} to layer {self.outputs[-1][0]}"

    def answer(self, word: str, alike: str, value: Value, allowed: Value) -> Answer:
        """The sentence: ``alike`` on both sides, or what the candidate has from the layer on where they part.

        ``allowed`` is how far a ``value`` may be from the baseline's.
        """
        parted = next(
            (each for each in self.outputs if not abs(value(each[2]) - value(each[1])) <= allowed(each[1])), None
        )
        if parted is None:
            return Answer(word, f"{alike}, on both sides: {self._normal()}")
        layer, b, c = parted
        other = (
            f"that of {self.candidate} is another from layer {layer} on, {value(c):.3g} there and not {value(b):.3g}"
        )
        wrong = self._first_wrong()
        if wrong is None:
            return Answer(word, f"{alike}; {other}: {self._rounding()}", layer)
        since = min(layer, wrong.layer if wrong.layer is not None else 0)
        return Answer(word, f"{alike}; {other}: it is the code, since layer {since}", since, True)

    def _judged(self) -> bool:
        return any(row.local is not None or row.baseline_local is not None for row in self.rows)

    def _first_wrong(self) -> Row | None:
        """The first op that is wrong, and more than slightly if any is."""
        wrong = [row for row in self.rows if row.verdict == WRONG and row.local is not None]
        grave = [row for row in wrong if row.local is not None and not row.local.nmse <= SLIGHT]
        return next(iter([*grave, *wrong]), None)

    def _rounding(self) -> str:
        judged = self._judged()
        return "no op is wrong, so that it is rounding" if judged else "which is right was not judged"

    def _normal(self) -> str:
        """What may be said of what both sides have; nothing, where nobody judged either."""
        if not self._judged():
            return "whether that is right was not judged"
        if any(row.baseline_local is not None and row.baseline_local.verdict == WRONG for row in self.rows):
            return "but the baseline is wrong itself"
        if any(row.verdict == WRONG for row in self.rows):
            return "it is the model; what is wrong does not show in it"
        return "it is the model, and no sign of a fault"


def _rms(of: _Layers) -> Answer:
    ratio = of.last.rms / of.first.rms
    alike = f"rms of {of.baseline} {_change(ratio, of.first.rms, of.last.rms)} {of.span}"
    return of.answer("rms", alike, lambda side: side.rms, lambda b: _RMS * b.rms)


def _change(ratio: float, first: float, last: float) -> str:
    sizes = f"({first:.3g} to {last:.3g})"
    if 1 / _STEADY < ratio < _STEADY:
        return f"keeps its size {sizes}"
    return f"grows {ratio:.3g} times {sizes}" if ratio > 1 else f"shrinks to a {1 / max(ratio, _TINY):.3g}th {sizes}"


def _mean(of: _Layers) -> Answer:
    first, last = of.first.mean, of.last.mean
    share = f"{100 * abs(last) / max(of.last.rms, _TINY):.2g}% of the rms"
    alike = f"mean of {of.baseline} goes from {first:.2g} to {last:.2g} ({share}) {of.span}"
    return of.answer("mean", alike, lambda side: side.mean, lambda b: _MEAN * max(abs(b.mean), b.rms / 2))


def _peak(of: _Layers) -> Answer:
    """The largest value, with its channel and token: a massive activation, where it is one."""
    layer, found = max(((layer, b.extremes) for layer, b, _ in of.outputs if b.extremes), key=lambda each: each[1].size)
    massive = found.size >= MASSIVE and found.times >= MASSIVE_TIMES
    name = "massive activation" if massive else "largest value"
    place = f"channel {found.channel} of token {found.token} in layer {layer}"
    alike = f"{name} of {of.baseline} is {found.peak:.4g}, {found.times:.3g} times the token's median, at {place}"
    size = _of_extremes("size")
    return of.answer("max", alike, size, lambda b: _PEAK * size(b))


def _kurtosis(of: _Layers) -> Answer:
    value = _of_extremes("kurtosis")
    sizes = [value(b) for _, b, _ in of.outputs]
    alike = f"kurtosis of {of.baseline} is {min(sizes):.3g} to {max(sizes):.3g} (a normal distribution's is 3)"
    return of.answer("kurtosis", alike, value, lambda b: _KURTOSIS * value(b))


def _of_extremes(name: str) -> Value:
    return lambda side: float(getattr(side.extremes, name)) if side.extremes is not None else math.nan
