"""Reads a wrong op back from what it gave: facts that hold for every value that they speak about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from llamadiff.ext.explain.case import Case, NotRecordedError
from llamadiff.ext.explain.pattern.deviation import finite_facts, numbered
from llamadiff.ext.explain.read_back.activation import activation
from llamadiff.ext.explain.read_back.attention import attention
from llamadiff.ext.explain.read_back.experts import experts
from llamadiff.ext.explain.read_back.inputs import by_inputs
from llamadiff.ext.explain.read_back.kept import kept
from llamadiff.ext.explain.read_back.lookup import lookup
from llamadiff.ext.explain.read_back.norm import norm
from llamadiff.ext.explain.read_back.observed import Array, Facts, Observed, first_told
from llamadiff.ext.explain.read_back.product import product
from llamadiff.ext.explain.read_back.rope import rope
from llamadiff.ext.explain.read_back.router import choice, mixture, share
from llamadiff.ext.explain.read_back.scores import scores
from llamadiff.ext.explain.read_back.softmax import softmax
from llamadiff.ext.explain.read_back.sums import sums
from llamadiff.judge.fact import Fact

Reader = Callable[[Observed], Facts]
BY_WORD: Mapping[str, Reader] = {
    "attn_norm": norm, "ffn_norm": norm, "result_norm": norm,
    "kq": scores, "kqv_out": attention, "kv_k": kept, "kv_v": kept, "embd": lookup, "ffn_moe_topk": choice,
    "ffn_moe_weights_norm": share,
}  # fmt: skip
BY_OP: Mapping[str, Reader] = {
    "RMS_NORM": norm, "NORM": norm, "ROPE": rope, "SOFT_MAX": softmax, "SWIGLU": activation, "GEGLU": activation,
    "ADD": sums, "MUL_MAT": product,
}  # fmt: skip
FEWEST = 8  # steps that the largest value has, of those that are looked for, and different values that there are
STEPS = (1 / 15, 1 / 31, 1 / 63, 1 / 127, 1 / 255, *(2.0**-k for k in range(2, 17)))
AWAY, NEXT = 1e-3, 1.02  # steps that a value may be from a multiple of one, and from the right one
EXPERTS = ("ffn_moe_gate", "ffn_moe_up", "ffn_moe_down")
HEADS = ("kq", "kq_soft_max")  # taps whose first axis are heads


def read_back(case: Case, in_graph: Case, shown: Callable[[Array], float] | None = None) -> tuple[Fact, ...]:
    """What a case's op did instead of the right thing; nothing where that is not told by its values.

    ``in_graph``: the same case in llama.cpp's graph, which tells the right values; ``shown``: of a tap that was not
    recorded, what of the error any values in its place leave.
    """
    reader = _reader(case)
    try:
        with np.errstate(all="ignore"):
            observed = Observed.of(case, in_graph, shown)
            if observed is None or not observed.recorded.any():  # of zeros, nothing tells how they came about
                return ()
            facts = finite_facts(first_told((in_steps, reader, added_up), observed))
            part = observed.wrong_part() if not facts else None
            if part is not None and part.part is not None:
                some = finite_facts(first_told((in_steps, reader), part))
                facts = tuple(replace(fact, says=f"{fact.says}, {part.part.words}") for fact in some)
            return facts or (tuple(by_inputs(in_graph)) if shown is None else ())
    except (NotRecordedError, np.linalg.LinAlgError):
        return ()


def _reader(case: Case) -> Reader:
    """What reads a tap's op."""
    kind = case.tap.kind
    if kind.word in EXPERTS:
        return experts
    if kind.word == "ffn_out" and case.weight is not None and case.weight.endswith("_exps.weight"):
        return mixture
    return BY_WORD.get(kind.word) or BY_OP.get(kind.op) or (lambda o: iter(()))


def in_steps(o: Observed) -> Facts:
    """Every value is a multiple of one step, next to the right one; beyond some size they may begin anew."""
    if o.shown is not None:  # solving leaves no steps
        return
    largest = float(np.abs(o.recorded).max())
    for step in STEPS:
        multiples = o.recorded / step
        if largest < FEWEST * step or np.abs(multiples - np.rint(multiples)).max() > AWAY:
            continue
        if len(np.unique(np.rint(multiples))) < FEWEST:
            return
        said = f"1/{round(1 / step)}"
        if np.abs(o.error).max() <= NEXT * step:
            yield Fact("in steps", f"its values are multiples of {said}", (step,))
            return
        size = step * 2.0 ** np.ceil(np.log2(largest / step))
        apart = np.mod(o.error + size, 2 * size) - size
        if np.abs(apart).max() <= NEXT * step:
            says = f"its values are multiples of {said}, and begin anew beyond -{size:g} and {size:g}"
            yield Fact("in steps", says, (step, float(size)))
        return


def added_up(o: Observed) -> Facts:
    """Each token's values, or each head's, are added to those of all before it, in all channels or in some."""
    if o.case.tap.kind.word in HEADS:
        if o.fits(np.cumsum(o.expected, axis=0)):
            yield Fact("accumulated", "each head's values are added to those of all heads before it", ())
        return
    bad, total = o.is_bad.any(axis=0), np.cumsum(o.expected, axis=0)
    if bad.ndim != 1 or not o.fits(np.where(bad, total, o.expected)):
        return
    channels = [int(channel) for channel in np.flatnonzero(bad)]
    where = "" if bad.all() else f"in channels {numbered(channels)} "
    yield Fact("accumulated", f"{where}each token's output is added to those of all tokens before it", tuple(channels))
