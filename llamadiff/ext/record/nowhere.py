"""A program's values that were nowhere in its memory: where it goes wrong, or what it never stores."""

from __future__ import annotations

from llamadiff.ext.record.candidate import NOWHERE
from llamadiff.judge.preflight.checks import RECORDING, Check
from llamadiff.judge.study import Study
from llamadiff.judge.verdict import of_unjudged
from llamadiff.trace.reader import Trace


def lost_values(study: Study, given: Trace) -> Check | None:
    """The first of them, where nothing that was found is wrong: a match would say more than was seen."""
    first = given.info.producer.get(NOWHERE)
    if not isinstance(first, str) or study.passes.wrong("candidate"):
        return None
    if first.startswith("embd,"):
        says = f"{first}: its embedding was never in memory: the program took other ids, by its tokenizer or its prompt"
        return Check(RECORDING, of_unjudged(), says)
    says = (
        f"{first}: the right values were never in its memory, nor anything that follows from them; it goes wrong "
        f"there, or in what it does not store before it; record a build without optimization, or write the taps"
    )
    return Check(RECORDING, of_unjudged(), says)
