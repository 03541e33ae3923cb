"""A program's values that were nowhere in its memory: where it goes wrong, or what it never stores."""

from __future__ import annotations

from collections.abc import Sequence

from llamadiff.ext.record.candidate import NOWHERE, TAKEN, VARIABLES, other_ids
from llamadiff.judge.preflight.checks import RECORDING, Check
from llamadiff.judge.study import Study
from llamadiff.judge.verdict import of_unjudged
from llamadiff.trace.reader import Trace


def lost_values(study: Study, given: Trace) -> Check | None:
    """The first of them, where nothing that was found is wrong: a match would say more than was seen."""
    first, taken = (given.info.producer.get(key) for key in (NOWHERE, TAKEN))
    if not isinstance(first, str) or study.passes.wrong("candidate"):
        return None
    if isinstance(taken, Sequence) and (its := other_ids(given.info.tokens, [*taken])):
        says = f"{first}: by the program's tokenizer or its prompt {its}"
        return Check(RECORDING, of_unjudged(), says)
    more = (
        "give each op's result a name" if VARIABLES in given.info.producer else "record another build (-O1 shows most)"
    )
    says = (
        f"{first}: the first that was never right in its memory, and nothing that follows from it was: it may go wrong "
        f"there, or in what it stores nowhere before it; {more}, or write the taps"
    )
    return Check(RECORDING, of_unjudged(), says)
