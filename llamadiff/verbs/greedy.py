"""Where greedy decoding parts: the step at which both sides take different tokens, and what made them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.result.comparison import Comparison, Parting, Taken
from llamadiff.result.logits import logit_rows
from llamadiff.trace.reader import Trace

Array = NDArray[Any]
LOGITS, RIGHT = "result_output", ("match", "noise")
Texts = Callable[[int], str | None]


def find_parting(baseline: Trace, candidate: Trace, n_prompt: int, generated: bool, text_of: Texts) -> Parting | None:
    """The first token of those that a candidate ran after the prompt that llama.cpp would not have taken.

    ``generated``: the candidate is known to have chosen them. Where it is not, they may be a text that it was given,
    and count as its choices only if each has its largest logit.
    """
    if LOGITS not in baseline:
        return None
    theirs, ran = logit_rows(baseline[LOGITS]), candidate.info.tokens
    own = _own_logits(candidate)
    places = range(n_prompt - 1, min(len(theirs), len(ran) - 1))
    if not generated and (own is None or any(_first_of(own[i]) != ran[i + 1] for i in places)):
        return None
    for step, place in enumerate(places, 1):
        took, taken = _first_of(theirs[place]), ran[place + 1]
        if took is not None and took != taken and taken < theirs.shape[1]:
            row = None if own is None or place >= len(own) else own[place]
            best = None if row is None else _first_of(row)
            wanted = None if best is None or best == taken else _taken_token(best, text_of, theirs[place], row)
            both = [_taken_token(token, text_of, theirs[place], row) for token in (took, taken)]
            return Parting(step, place + 1, both[0], both[1], wanted, best is not None)
    return None


def _own_logits(candidate: Trace) -> Array | None:
    """The candidate's logits, NaN where they were not recorded."""
    if LOGITS not in candidate:
        return None
    logits = logit_rows(candidate[LOGITS])
    mask = candidate.known.get(LOGITS)
    return logits if mask is None else np.where(logit_rows(mask), logits, np.nan)


def _first_of(row: Array) -> int | None:
    """The token with the largest logit; None where a logit is NaN or Inf, or was not recorded."""
    return int(row.argmax()) if np.isfinite(row).all() else None


def _taken_token(token: int, text_of: Texts, theirs: Array, own: Array | None) -> Taken:
    logit = None if own is None or not np.isfinite(own[token]) else float(own[token])
    return Taken(token, text_of(token), float(theirs[token]), logit)


def with_parting(result: Comparison, found: Parting | None) -> Comparison:
    """The comparison that says where greedy choices part."""
    if found is None:
        return result
    return replace(result, parting=found, proof=(*result.proof, in_words(found, result)))


def in_words(found: Parting, result: Comparison) -> str:
    """Where greedy choices part, and why."""
    names = str(result.baseline.get("name")), "yours"
    took, taken = found.baseline, found.candidate
    text = (
        f"at the {_ordinal(found.step)} generated token {names[0]} takes {_quote(took)} ({took.baseline:.2f}), "
        f"{names[1]} {_quote(taken)}"
    )
    if taken.candidate is not None:
        text += f" ({taken.candidate:.2f})"
    if found.wanted is not None:
        best = found.wanted
        return (
            f"{text}, though its own largest logit is that of {_quote(best)} ({best.candidate:.2f}): "
            "its sampling is to blame for that, not its ops"
        )
    own = ", its own largest" if found.checked else ""
    if result.wrong:
        return text + own
    gap = f"{names[0]}'s logits of the two are {took.baseline - taken.baseline:.2g} apart"
    return f"{text}{own}: {gap}{', which rounding decides' if result.verdict in RIGHT and found.checked else ''}"


def _quote(taken: Taken) -> str:
    return f"'{taken.text}'" if taken.text is not None else f"token {taken.id}"


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number}{ending}"
