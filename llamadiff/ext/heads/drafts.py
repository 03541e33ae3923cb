"""What a head drafts, of each row: what comes of it where the trunk goes on with the same token, or not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llamadiff.ext.heads.head_reader import CHOSEN, LOGITS
from llamadiff.result.comparison import Comparison
from llamadiff.trace.reader import Trace


def accepted(trace: Trace, chosen: object) -> int | None:
    """How many greedy drafts are the token that the trunk goes on with; None where no logits were recorded."""
    if LOGITS not in trace or LOGITS in trace.known or not isinstance(chosen, list):
        return None
    drafts = np.asarray(trace[LOGITS]).argmax(axis=-1)
    return int(np.sum(drafts == np.asarray(chosen))) if drafts.shape == (len(chosen),) else None


def with_drafts(result: Comparison, baseline: Trace, candidate: Trace | None) -> Comparison:
    """The result, with how many drafts would be accepted: of llama.cpp's head, and of the candidate's."""
    chosen, n = baseline.info.producer.get(CHOSEN), len(baseline.info.tokens)
    own = accepted(baseline, chosen)
    if own is None:
        return result
    said = f"greedy drafts: the trunk goes on with {own} of the {n} tokens that llama.cpp's head drafts"
    theirs = None if candidate is None else accepted(candidate, chosen)
    if theirs is not None:
        said += f", and with {theirs} of the candidate's"
    return replace(result, proof=(*result.proof, said))
