"""Perplexity and KL over a text with standard errors, under the names that llama-perplexity prints.

The method is llama-perplexity's (llama.cpp, tools/perplexity): means over positions, each with the standard error of a
mean of independent values, carried on to first order; both sides' errors are correlated, and that is counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.loss.result import Estimate, Statistic
from llamadiff.ext.loss.trials import Trial

Array = NDArray[Any]
FEWEST = 10  # positions, below which a standard error says nothing
_TAILS = (0.999, 0.99, 0.95, 0.9)


def mean_of(values: Array) -> Estimate:
    """The mean of values, and its standard error."""
    count = len(values)
    if not count:
        return Estimate(math.nan)
    return Estimate(float(values.mean()), math.sqrt(values.var() / (count - 1)) if count > FEWEST else math.nan)


def share_of(flags: Array) -> Estimate:
    """A share of positions, with the error of a binomial's."""
    share, count = float(flags.mean()), len(flags)
    return Estimate(share, math.sqrt(share * (1 - share) / (count - 1)) if count > FEWEST else math.nan)


def statistics(base: Trial, other: Trial) -> tuple[Statistic, ...]:
    """All of them, in llama-perplexity's order. Positions without a next token count in the KL alone."""
    known = ~np.isnan(other.nll)
    of_text = _perplexities(base.nll[known], other.nll[known]) if known.any() else ()
    of_tokens = _probabilities(base.nll[known], other.nll[known]) if known.any() else ()
    return (*of_text, *_divergences(other.kl), *of_tokens, Statistic("Same top p", share_of(other.same), True))


def _perplexities(base: Array, other: Array) -> Iterator[Statistic]:
    """From each side's negative log-likelihoods."""
    q, b, log_ratio = mean_of(other), mean_of(base), mean_of(other - base)
    q_ppl, b_ppl, ratio = (_exponential(log) for log in (q, b, log_ratio))
    yield Statistic("Mean PPL(Q)", q_ppl)
    yield Statistic("Mean PPL(base)", b_ppl)
    yield Statistic("Cor(ln(PPL(Q)), ln(PPL(base)))", Estimate(_correlation(base, other)), True)
    yield Statistic("Mean ln(PPL(Q)/PPL(base))", log_ratio)
    yield Statistic("Mean PPL(Q)/PPL(base)", ratio)
    gap = q_ppl.value * other - b_ppl.value * base  # to first order, whose spread is that of the difference
    yield Statistic("Mean PPL(Q)-PPL(base)", Estimate(q_ppl.value - b_ppl.value, mean_of(gap).error))


def _exponential(log: Estimate) -> Estimate:
    value = math.exp(log.value) if log.value < math.log(np.finfo(float).max) else math.inf
    return Estimate(value, value * log.error)


def _correlation(a: Array, b: Array) -> float:
    spread = math.sqrt(a.var() * b.var())
    return float(((a - a.mean()) * (b - b.mean())).mean() / spread) if spread > 0 else math.nan


def _divergences(kl: Array) -> Iterator[Statistic]:
    yield Statistic("Mean    KLD", mean_of(kl))
    yield Statistic("Maximum KLD", Estimate(float(kl.max(initial=0.0))))
    yield from _tails("KLD", kl)
    yield Statistic("Minimum KLD", Estimate(float(kl.min(initial=0.0))))


def _probabilities(base: Array, other: Array) -> Iterator[Statistic]:
    """Of the probability that each side gives the token that came."""
    gap = np.exp(-other) - np.exp(-base)
    square = mean_of(gap * gap)
    yield Statistic("Mean    Δp", mean_of(gap), True)
    yield Statistic("Maximum Δp", Estimate(float(gap.max())), True)
    yield from _tails("Δp", gap, True)
    yield Statistic("Minimum Δp", Estimate(float(gap.min())), True)
    rms = math.sqrt(square.value)
    yield Statistic("RMS Δp", Estimate(rms, 0.5 / rms * square.error if rms > 0 else math.nan), True)


def _tails(word: str, values: Array, percent: bool = False) -> Iterator[Statistic]:
    quarters = (0.75,) * percent
    shares = (*_TAILS, *quarters, 0.5, *(1 - share for share in (*quarters, *reversed(_TAILS))))
    for share in shares:
        name = "Median " if share == 0.5 else f"{100 * share:4.1f}%  "
        yield Statistic(f"{name} {word}", Estimate(float(np.quantile(values, share))), percent)
