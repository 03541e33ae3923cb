"""The next-token distributions of both sides, compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.numerics import metrics

Array = NDArray[Any]

TOP = 10


@dataclass(frozen=True)
class TopToken:
    """One token of the baseline's first ten: both sides' logits, and its rank with the candidate (1 is first)."""

    rank: int
    id: int
    text: str | None
    baseline: float
    candidate: float
    candidate_rank: int


@dataclass(frozen=True)
class Position:
    """The distributions after one token: KL(baseline || candidate) in nats, and both sides' first tokens, id and text.

    ``agrees`` is None where a side has none, ``kl`` NaN where not all logits are there.
    """

    kl: float
    agrees: bool | None
    baseline: tuple[int, str | None]
    candidate: tuple[int, str | None]


@dataclass(frozen=True)
class Logits:
    """The next-token distributions after the last token that both sides ran.

    ``kl`` is KL(baseline || candidate) in nats, ``margin`` the baseline's logit lead of its first token over
    its second, ``agreeing`` how many of all rows have the same first token;
    ``partial``: not all of the candidate's logits were recorded; ``after`` so many tokens. ``not_finite`` are the sides
    ("baseline", "candidate") whose logits hold NaN or Inf: there is no KL then, and nothing is known to agree (None;
    nor where the baseline's first token is not among what was recorded). ``expected`` are the tokens that were asked
    for; ``positions`` every row, where a page is to show them: the last is after token ``after``.
    """

    kl: float
    top1_agree: bool | None
    margin: float
    agreeing: int
    rows: int
    top: tuple[TopToken, ...]
    candidate_top: tuple[TopToken, ...]
    partial: bool = False
    after: int = 0
    not_finite: tuple[str, ...] = ()
    expected: tuple[TopToken, ...] = ()
    positions: tuple[Position, ...] = ()


def compare_logits(
    baseline: Array,
    candidate: Array,
    text_of: Any,
    known: Array | None = None,
    expect: Sequence[int] = (),
    each: bool = False,
) -> Logits:
    """Compare logits [token, vocab]; the last row in full.

    ``known`` marks the candidate's values that are there: ranks are among these, and KL is NaN where the last row lacks
    some. ``expect`` are tokens to be told of, whatever their ranks; ``each``: every row is told of.
    """
    whole = known is None or bool(known[-1].all())
    if known is not None:
        candidate = np.where(known, candidate, -np.inf)
    b, c = np.asarray(baseline[-1], np.float64), np.asarray(candidate[-1], np.float64)
    b_order, c_order = np.argsort(-b, kind="stable"), np.argsort(-c, kind="stable")
    b_rank, c_rank = np.empty(len(b), int), np.empty(len(c), int)
    b_rank[b_order] = c_rank[c_order] = np.arange(1, len(b) + 1)

    def entry(token: int) -> TopToken:
        value = float(c[token]) if known is None or known[-1][token] else float("nan")
        return TopToken(int(b_rank[token]), token, text_of(token), float(b[token]), value, int(c_rank[token]))

    rows = np.ones(len(baseline), bool) if known is None else known.any(axis=-1)
    ranked = {"baseline": _can_be_ranked(baseline), "candidate": _can_be_ranked(candidate)}
    agree = (np.argmax(baseline, -1) == np.argmax(candidate, -1)) & ranked["baseline"] & ranked["candidate"]
    if known is not None:  # nobody knows whether a token has the largest logit whose logit is not there
        rows &= known[np.arange(len(known)), np.argmax(baseline, -1)]
    hidden = known is not None and not known[-1][b_order[0]]
    not_finite = tuple(side for side, sound in ranked.items() if not sound[-1])
    margin = float(b[b_order[0]] - b[b_order[1]]) if len(b) > 1 else 0.0  # NaN where there is no first token
    return Logits(
        kl=metrics.kl_divergence(b, c) if whole else float("nan"),
        top1_agree=None if not_finite or hidden else bool(b_order[0] == c_order[0]),
        margin=margin, agreeing=int(agree[rows].sum()), rows=int(rows.sum()),
        top=() if "baseline" in not_finite else tuple(entry(int(token)) for token in b_order[:TOP]),
        candidate_top=tuple(entry(int(token)) for token in c_order[:TOP] if np.isfinite(c[token])),
        partial=not whole,
        after=len(baseline),
        not_finite=not_finite,
        expected=() if "baseline" in not_finite else tuple(entry(token) for token in expect),
        positions=_positions(baseline, candidate, text_of, known) if each else (),
    )  # fmt: skip


def _positions(baseline: Array, candidate: Array, text_of: Any, known: Array | None) -> tuple[Position, ...]:
    """Both sides after each token."""
    ranked: Array = _can_be_ranked(baseline) & _can_be_ranked(candidate)
    firsts = (np.argmax(baseline, -1), np.argmax(candidate, -1))
    found = []
    for row, (b, c) in enumerate(zip(*firsts, strict=True)):
        sides = [(int(token), text_of(int(token))) for token in (b, c)]
        sure = bool(ranked[row]) and (known is None or bool(known[row][b]))
        whole = known is None or bool(known[row].all())
        kl = metrics.kl_divergence(baseline[row], candidate[row]) if whole else float("nan")
        found.append(Position(kl, bool(b == c) if sure else None, sides[0], sides[1]))
    return tuple(found)


def _can_be_ranked(logits: Array) -> Array:
    """Which rows have a first token: those without NaN and Inf; -Inf may be a token that is ruled out."""
    return np.asarray(~(np.isnan(logits) | np.isposinf(logits)).any(axis=-1))


def logit_rows(logits: Array) -> Array:
    """[token, vocab], however a trace nests it."""
    return logits.reshape(len(logits), -1)


@dataclass(frozen=True)
class Positions:
    """``count`` positions: KL(baseline || candidate) in nats, and the regret of the candidate's first token.

    ``regret`` is what the baseline's log-probability loses where the candidate's first token is taken instead of its
    own: 0 where both agree, and next to nothing where two tokens are equally good. ``worst_at``: the token after which
    the KL is largest.
    """

    count: int
    kl_mean: float
    kl_p99: float
    kl_worst: float
    worst_at: int
    regret_mean: float
    regret_worst: float
    agreeing: int
