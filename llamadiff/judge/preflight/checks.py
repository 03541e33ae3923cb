"""What must agree before any layer is looked at, in order: tokens, positions, hyper-parameters, weights.

A later difference means nothing when an earlier one fails, so each has a verdict of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llamaref.weights import block_sizes
from numpy.typing import NDArray

from llamadiff import plugins
from llamadiff.engines.batches import common, first_slip
from llamadiff.engines.model_file import ModelFile, Runnable, check_same_model
from llamadiff.judge.settings import stored_types
from llamadiff.judge.verdict import of_check, of_unjudged
from llamadiff.numerics.types import CACHE_TYPES
from llamadiff.system.errors import UserError
from llamadiff.trace.metadata import INPUTS, UNSURE_INPUTS, Info
from llamadiff.trace.reader import Trace
from llamadiff.trace.taps import WEIGHTS

Array = NDArray[Any]
RECORDING, RANKS = "recording", "ranks"
OTHER_TOKENS = "the candidate ran other tokens: "


@dataclass(frozen=True)
class Check:
    """One thing looked at before the layers: its verdict and what was found."""

    name: str
    verdict: str
    found: str


def preflight(model: ModelFile, baseline: Trace, candidate: Trace) -> tuple[Check, ...]:
    """The checks that a candidate gives occasion for. Tokens were the same, or it would be refused."""
    checks = [_tokens(candidate.info, baseline.info.positions)]
    checks += hyper_parameters(model, candidate.info)
    checks += weights(model, candidate)
    checks += [Check(RANKS, of_check(fault), fault) for fault in candidate.printed.faults]
    return tuple(checks)


def given_rightly(info: Info) -> tuple[Check, ...]:
    """What llama.cpp gave its passes, where that is not what was run before: no op is wrong then, and all is."""
    return tuple(
        Check(INPUTS, of_check(fault=True, is_known=is_known), str(fault))
        for where, is_known in ((INPUTS, True), (UNSURE_INPUTS, False))
        for fault in _as_list(info.producer.get(where))
    )


def _as_list(stated: object) -> list[Any]:
    return stated if isinstance(stated, list) else []


def _tokens(info: Info, right: Sequence[int]) -> Check:
    """Tokens, and the positions that the candidate states for them."""
    place, count = first_slip(info, right), len(info.tokens)
    if place is None:
        return Check("tokens", of_check(False), f"{count} token ids and positions are the baseline's")
    stated, wanted = (", ".join(map(str, side[place : place + 4])) for side in (info.positions, right))
    found = f"from token {place} on positions {stated} are stated, and {wanted} are right"
    return Check("positions", of_check(found), found)


def tokens_apart(model: ModelFile | None, b: Sequence[int], c: Sequence[int]) -> str:
    """Where the baseline's tokens and the candidate's part, and what explains it; for an error message."""
    reason = _on_from_there(b, c) or (_reason(model, b, c) if model is not None else None)
    text = f"{OTHER_TOKENS}{where_apart(model, b, c)}"
    return f"{text}; {reason}" if reason else text


def where_apart(model: ModelFile | None, b: Sequence[int], c: Sequence[int]) -> str:
    """Where the baseline's tokens and those of "it" part."""
    place = common(b, c)
    return (
        f"from token {place} on it has {_ids(model, c[place:])}, the baseline {_ids(model, b[place:])} "
        f"({len(c)} and {len(b)} in all)"
    )


def _ids(model: ModelFile | None, tokens: Sequence[int]) -> str:
    words = [f'{token} "{model.vocabulary.text(token) or ""}"' if model else str(token) for token in tokens[:5]]
    return f"[{', '.join(words)}{', ...' if len(tokens) > 5 else ''}]"


def _on_from_there(b: Sequence[int], c: Sequence[int]) -> str | None:
    """Which side goes on where the other ends."""
    if common(b, c) == len(b):
        return f"its first {len(b)} are the baseline's: if it generated the others, state n_prefill = {len(b)}"
    return f"it ends after {len(c)}, where the baseline goes on" if common(b, c) == len(c) else None


def _reason(model: ModelFile, b: Sequence[int], c: Sequence[int]) -> str | None:
    bos = model.special_id("bos")
    if bos is not None:
        if (bos, *c) == tuple(b):
            return f"the candidate lacks the beginning-of-text token {bos}"
        if (bos, *b) == tuple(c):
            return f"the candidate has the beginning-of-text token {bos} once more"
    if len(c) > len(b) + 2 and _holds(c, b[1:] if bos == b[0] else b):
        return "the baseline's tokens stand inside the candidate's: a chat template was applied there (try --chat)"
    if len(b) > len(c) + 2 and _holds(b, c[1:] if bos == c[0] else c):
        return "the candidate's tokens stand inside the baseline's: a chat template was applied here (leave out --chat)"
    if len(c) == len(b) and {token - 1 for token in c} == set(b):
        return "every id is one too large: ids count from 0"
    return None


def _holds(whole: Sequence[int], part: Sequence[int]) -> bool:
    return bool(part) and any(tuple(whole[i : i + len(part)]) == tuple(part) for i in range(len(whole) - len(part) + 1))


def hyper_parameters(model: ModelFile, info: Info) -> Iterator[Check]:
    """What the candidate says it runs with (producer.hyperparameters) against the file's metadata."""
    stated = info.producer.get("hyperparameters")
    if not isinstance(stated, Mapping):
        return
    wrong = []
    for key, value in stated.items():
        actual = model.hyper_parameter(str(key))
        if actual is None:
            wrong.append(f"{key} = {value}, which the file does not state")
        elif not _same(value, actual):
            wrong.append(f"{key} = {value}; the file says {_short(actual)}")
    yield Check("hyper-parameters", of_check(wrong), "; ".join(wrong) or f"{len(stated)} stated, all as in the file")


def _same(value: Any, actual: Any) -> bool:
    if isinstance(value, (int, float)) and isinstance(actual, (int, float)):
        return math.isclose(value, actual, rel_tol=1e-6)
    return bool(value == actual)


def _short(value: Any) -> str:
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def weights(model: ModelFile, candidate: Trace) -> Iterator[Check]:
    """Dumped weights (``weights/blk.0.attn_q.weight``) against the file's, block by block."""
    fault_of = plugins.ask_first(lambda each: each.weight_check())
    for name in candidate:
        if not name.startswith(WEIGHTS):
            continue
        if fault_of is None:
            yield Check(name, of_unjudged(), "the slice that knows how weights are stored is missing")
            continue
        tensor = name.removeprefix(WEIGHTS)
        if tensor not in model.weights:
            yield Check(name, of_unjudged(), "the file has no such tensor")
            continue
        fault = fault_of(model, tensor, np.asarray(candidate[name], np.float32))
        yield Check(name, of_check(fault), fault or f"{model.weights.type(tensor)}, every block right")


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
    if b.positions != c.positions and first_slip(c, b.positions) is None:
        raise UserError(f"the candidate ran other positions: {_few(c.positions)}, the baseline {_few(b.positions)}")
    named = b.model.get("sha256")
    if named is not None:
        check_same_model(c.model, str(named), "the candidate")


def _few(numbers: Sequence[int]) -> str:
    return str(list(numbers[:6]))[:-1] + (", ...]" if len(numbers) > 6 else "]")
