"""Which traces may be compared at all: runs of the same tokens, of one model, that the engine can go through."""

from __future__ import annotations

from collections.abc import Sequence

from llamaref.weights import block_sizes

from llamadiff.engines.batches import slipped
from llamadiff.engines.model_file import Runnable, check_same_model
from llamadiff.judge.settings import stored_types
from llamadiff.numerics.types import CACHE_TYPES
from llamadiff.preflight.checks import tokens_apart
from llamadiff.system.errors import UserError
from llamadiff.trace.reader import Trace


def check_runnable(model: Runnable, trace: Trace, whose: str) -> None:
    """Raise UserError if the engine cannot go through a trace: more tokens than the context, an unknown cache type."""
    count, limit = len(trace.info.tokens), model.n_ctx_train
    if count > limit:
        raise UserError(f"{whose} has {count} tokens, more than the model's context of {limit}")
    for side, kind in stored_types(trace).items():
        if kind not in CACHE_TYPES:
            raise UserError(
                f"{whose} was recorded with a {side} of type {kind[:40]}; known are {', '.join(CACHE_TYPES)}"
            )
        size, block = model.sizes.get("cached", model.sizes["dim"]), block_sizes(kind)[0]
        if size % block:
            raise UserError(f"{whose} was recorded with a {side} of type {kind}, which heads of "
                            f"{size} values cannot have: its blocks are of {block}")  # fmt: skip


def check_same_run(baseline: Trace, candidate: Trace, model: Runnable | None = None) -> None:
    """Raise UserError, with both values, if two traces are of other tokens, positions or models."""
    b, c = baseline.info, candidate.info
    if b.tokens != c.tokens:
        raise UserError(tokens_apart(model, b.tokens, c.tokens))
    if b.positions != c.positions and slipped(c, b.positions) is None:
        raise UserError(f"the candidate ran other positions: {_few(c.positions)}, the baseline {_few(b.positions)}")
    named = b.model.get("sha256")
    if named is not None:
        check_same_model(c.model, str(named), "the candidate")


def _few(numbers: Sequence[int]) -> str:
    return str(list(numbers[:6]))[:-1] + (", ...]" if len(numbers) > 6 else "]")
