"""Reads a wrong op back from what it gave: facts that hold for every value that they speak about."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from llamadiff.diagnose.case import Case, NotRecordedError
from llamadiff.diagnose.read_back.activation import activation
from llamadiff.diagnose.read_back.attention import attention
from llamadiff.diagnose.read_back.general import added_up, in_steps
from llamadiff.diagnose.read_back.lookup import lookup
from llamadiff.diagnose.read_back.norm import norm
from llamadiff.diagnose.read_back.observed import Array, Facts, Observed, first_told
from llamadiff.diagnose.read_back.product import product
from llamadiff.diagnose.read_back.rope import rope
from llamadiff.diagnose.read_back.router import choice, mixture, share
from llamadiff.diagnose.read_back.scores import scores
from llamadiff.diagnose.read_back.softmax import softmax
from llamadiff.diagnose.read_back.sums import sums
from llamadiff.judge.pattern.deviation import Fact

Reader = Callable[[Observed], Facts]
BY_WORD: Mapping[str, Reader] = {
    "attn_norm": norm, "ffn_norm": norm, "result_norm": norm,
    "kq": scores, "kqv_out": attention, "embd": lookup, "ffn_moe_topk": choice, "ffn_moe_weights_norm": share,
}  # fmt: skip
BY_OP: Mapping[str, Reader] = {
    "RMS_NORM": norm, "NORM": norm, "ROPE": rope, "SOFT_MAX": softmax, "SWIGLU": activation, "GEGLU": activation,
    "ADD": sums, "MUL_MAT": product,
}  # fmt: skip


def read_back(case: Case, in_graph: Case, shown: Callable[[Array], float] | None = None) -> tuple[Fact, ...]:
    """What a case's op did instead of the right thing; nothing where that is not told by its values.

    ``in_graph``: the same case in llama.cpp's graph, which tells the right values; ``shown``: of a tap that was not
    recorded, what of the error any values in its place leave.
    """
    reader = _reader(case)
    try:
        with np.errstate(all="ignore"):
            observed = Observed.of(case, in_graph, shown)
            return tuple(first_told((in_steps, reader, added_up), observed)) if observed is not None else ()
    except (NotRecordedError, np.linalg.LinAlgError):
        return ()


def _reader(case: Case) -> Reader:
    """What reads a tap's op."""
    kind = case.tap.kind
    if kind.word == "ffn_out" and case.weight is not None and case.weight.endswith("_exps.weight"):
        return mixture
    return BY_WORD.get(kind.word) or BY_OP.get(kind.op) or (lambda o: iter(()))
