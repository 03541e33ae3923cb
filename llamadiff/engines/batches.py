"""A run's schedule, taken from the side under test: which ids, from which position, in which batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from llamadiff.llamacpp.request import Request
from llamadiff.trace.metadata import Info
from llamadiff.trace.reader import Trace


def as_stated(request: Request, stated: Info | None) -> Request:
    """The request with the batches and positions that a candidate states of the same tokens."""
    if stated is None or request.n_predict or request.tokens != stated.tokens:
        return request
    first = stated.positions[0] if _count_on(stated) else 0
    return replace(request, n_prefill=stated.n_prefill, batches=stated.batches, first=first)


def as_it_ran(request: Request, baseline: Info, candidate: Info) -> Request | None:
    """The request that makes llama.cpp run what a candidate ran, if that is another run after the same prompt.

    None if it is the same run, or nothing that the candidate can have meant as an answer to the prompt.
    """
    stated = _in_steps(candidate, baseline.n_prefill)
    if baseline.tokens == stated.tokens:
        again = not _is_whole(stated) and baseline.edges != stated.edges
    else:
        again = goes_on(baseline, candidate, bool(request.n_predict))
    return as_stated(replace(request, tokens=stated.tokens, n_predict=0), stated) if again else None


def goes_on(baseline: Info, candidate: Info, generated: bool) -> bool:
    """Whether a candidate ran the baseline's prompt and, after it, tokens of its own.

    ``generated``: it was asked to generate some; else it has to say where its prompt ends.
    """
    n = baseline.n_prefill
    says = generated if _is_whole(candidate) else candidate.n_prefill <= n
    return says and len(candidate.tokens) > n and candidate.tokens[:n] == baseline.tokens[:n]


def answers_otherwise(baseline: Info, candidate: Info) -> bool:
    """Whether both generated tokens after one prompt, and not the same."""
    parted = baseline.tokens != candidate.tokens and not _is_whole(baseline)
    return parted and goes_on(baseline, candidate, generated=True)


def in_batches_of(baseline: Trace, candidate: Trace | None) -> Trace:
    """The baseline as if it had been run in the candidate's batches, where that says more than all in one go."""
    if candidate is None or _is_whole(candidate.info) or candidate.info.tokens != baseline.info.tokens:
        return baseline
    info = candidate.info
    baseline.wait()
    return baseline.saying(replace(baseline.info, n_prefill=info.n_prefill, batches=info.batches))


def batches_of(info: Info) -> tuple[int, ...]:
    """How many tokens each batch has."""
    return tuple(stop - start for start, stop in pairwise(info.edges))


def common(b: Sequence[int], c: Sequence[int]) -> int:
    """How many tokens two runs begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(b, c, strict=False)) if x != y), min(len(b), len(c)))


def first_slip(info: Info, right: Sequence[int]) -> int | None:
    """The first token whose stated position is wrong, if that is after a first batch whose positions are right."""
    first = info.edges[1]
    if info.positions[:first] != tuple(right[:first]):
        return None
    return next((i for i, (own, other) in enumerate(zip(info.positions, right, strict=False)) if own != other), None)


def _is_whole(info: Info) -> bool:
    """Whether all was run in one go, or nothing is known of steps."""
    return len(info.edges) <= 2


def _count_on(info: Info) -> bool:
    """Whether positions count on by one, from wherever they begin."""
    first = info.positions[0]
    return info.positions == tuple(range(first, first + len(info.positions)))


def _in_steps(info: Info, n_prompt: int) -> Info:
    """What a candidate says; where it says nothing of batches, the prompt in one go, and steps."""
    return replace(info, n_prefill=n_prompt) if _is_whole(info) else info
