"""On which ranks an op is wrong: a tap of parts by where its errors lie, a sum by what each rank should add to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from llamaref import Tap as Carrier
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from llamadiff.engines.model_file import Runnable
from llamadiff.ext.dumps.joining import Joined
from llamadiff.judge.fact import ANSWERS, Fact
from llamadiff.judge.study import Bench, Study
from llamadiff.result.diagnosis import Diagnosis
from llamadiff.trace.reader import Trace

Array = NDArray[Any]

SHARE = 0.01  # of the worst rank's error: what a rank has that is wrong too
FAR = 1e-4  # NMSE of a part that rounding in products does not make
ALIKE = 1e-2  # NMSE of an error that is the bias
EVERYWHERE = "each of the {} ranks adds it before the sum over ranks"


class _EnoughError(Exception):
    """Ends a pass: all that is asked has been computed."""


class _Replay(Carrier):
    """A pass over a trace, which keeps what the engine computes of some taps; ``masks``: what is left of others."""

    def __init__(self, trace: Trace, wanted: Sequence[str], masks: Mapping[str, Array]) -> None:
        self.trace, self.wanted, self.masks = trace, set(wanted), masks
        self.computed: dict[str, Array] = {}

    def __call__(self, name: str, x: Array) -> Array:
        if name in self.wanted:
            self.computed[name] = np.array(x[0], np.float64)
            if self.computed.keys() == self.wanted:
                raise _EnoughError
        if name not in self.trace:
            return x
        values = self.trace[name].reshape(x.shape)
        if name in self.trace.known:
            values = np.where(self.trace.known[name].reshape(x.shape), values, x)
        if name in self.masks:
            values = values * self.masks[name]
        return values.astype(x.dtype, copy=False)

    def is_wanted(self, name: str) -> bool:
        return True


def ranks_at_fault(bench: Bench, study: Study) -> Mapping[str, str]:
    """Wrong taps that were put together of ranks, and on which of these they are wrong, in words."""
    trace = study.assumed.trace
    joined: Mapping[str, Joined] = trace.printed.joined if trace is not None else {}
    wrong = [name for name in study.passes.wrong("candidate") if name in joined and trace is not None and name in trace]
    split = [name for name in wrong if joined[name].ranks is not None]
    sums = [name for name in wrong if joined[name].sums]
    if trace is None or not (split or sums):
        return {}
    axes = {tap.name: tap.row_axis for tap in bench.model.taps}
    return {**_of_parts(bench.model, trace, split, joined, axes), **_of_sums(bench.model, trace, sums, joined, axes)}


def _run(model: Runnable, trace: Trace, wanted: Sequence[str], masks: Mapping[str, Array]) -> Mapping[str, Array]:
    """What the engine computes of taps, from what was recorded before each."""
    tap, x, tokens = _Replay(trace, wanted, masks), None, trace.info.tokens
    step = model.engine.step(tokens, trace.info.positions, tap=tap)
    with suppress(_EnoughError), threadpool_limits(1, "blas"), np.errstate(all="ignore"):
        for part in model.parts(tokens):
            x = part.run(x, step)
    return tap.computed


def _mask(joined: Joined, rank: int | None, axis: int) -> Array:
    """Ones where a rank holds the values of a token; axes as the tap has them."""
    assert joined.ranks is not None
    return np.expand_dims(joined.ranks == rank, axis)


def _of_parts(
    model: Runnable, trace: Trace, names: Sequence[str], joined: Mapping[str, Joined], axes: Mapping[str, int]
) -> Mapping[str, str]:
    found = {}
    for name, right in _run(model, trace, names, {}).items() if names else ():
        gap, ranks = np.square(trace[name].reshape(right.shape) - right), np.unique(np.asarray(joined[name].ranks))
        errors = {int(rank): float((gap * _mask(joined[name], rank, axes[name])).sum()) for rank in ranks}
        if said := _alone(errors):
            found[name] = f"all of it in the part of {said}"
    return found


def _of_sums(
    model: Runnable, trace: Trace, names: Sequence[str], joined: Mapping[str, Joined], axes: Mapping[str, int]
) -> Mapping[str, str]:
    """By what each rank's part should be: the op of that rank's part of what it reads alone."""
    inputs = {name: [each for each in _inputs(model, name) if each in joined] for name in names}
    names = [name for name in names if any(joined[each].ranks is not None and each in trace for each in inputs[name])]
    if not names:
        return {}
    read = {each for name in names for each in inputs[name] if joined[each].ranks is not None}
    ranks = list(joined[names[0]].sums)

    def of_rank(rank: int | None) -> Mapping[str, Array]:
        return _run(model, trace, names, {each: _mask(joined[each], rank, axes[each]) for each in read})

    bias, alone = of_rank(None), {rank: of_rank(rank) for rank in ranks}
    found = {}
    for name in names:
        parts = joined[name].sums
        off = {rank: parts[rank].reshape(bias[name].shape) - (alone[rank][name] - bias[name]) for rank in ranks}
        size = {rank: float(np.square(alone[rank][name] - bias[name]).sum()) for rank in ranks}
        of_bias = float(np.square(bias[name]).sum())
        beyond = {rank: float(np.square(each - bias[name]).sum()) for rank, each in off.items()}
        if of_bias and all(each <= ALIKE * of_bias for each in beyond.values()):
            found[name] = EVERYWHERE.format(len(ranks))
            continue
        errors = {rank: min(float(np.square(off[rank]).sum()), beyond[rank]) for rank in ranks}
        if any(errors[rank] > FAR * size[rank] for rank in ranks) and (said := _alone(errors)):
            found[name] = f"all of it in what {said} adds to the sum over ranks"
    return found


def _inputs(model: Runnable, name: str) -> Iterator[str]:
    yield from (each for tap in model.taps if tap.name == name for each in model.inputs(tap))


def _alone(errors: Mapping[int, float]) -> str:
    """The ranks that have the errors, where others have none; not finite ones are none's alone."""
    worst = max(errors.values())
    off = [rank for rank, error in errors.items() if error >= SHARE * worst]
    return f"rank{'s' * (len(off) > 1)} {' and '.join(map(str, off))}" if 0 < len(off) < len(errors) else ""


def with_ranks(causes: Sequence[Diagnosis], said: Mapping[str, str], study: Study) -> tuple[Diagnosis, ...]:
    """The causes, with the ranks that have them; and for taps of which no cause is known, what their values tell."""
    found, left = [], dict(said)
    for d in causes:
        own = list(dict.fromkeys(left.pop(name) for name in d.taps if name in left))
        if not own:
            found.append(d)
        elif d.known:
            words = own[0] if len(own) == 1 else "not on all ranks alike"
            found.append(replace(d, causes=tuple(replace(each, says=f"{each.says}; {words}") for each in d.causes)))
        else:
            read = {
                name: _with_rank(said[name], d.read.get(name) or _facts(study, name)) for name in d.taps if name in said
            }
            found.append(replace(d, read={**d.read, **read}))
    for name, words in left.items():
        read = {name: _with_rank(words, _facts(study, name))}
        found.append(Diagnosis(name, {name: np.inf}, {name: _error(study, name)}, (), read=read))
    order = [finding.tap.name for finding in study.passes.findings]
    return tuple(sorted(found, key=lambda d: order.index(d.tap) if d.tap in order else len(order)))


def _facts(study: Study, name: str) -> Sequence[Fact]:
    local = next(each.local.get("candidate") for each in study.passes.findings if each.tap.name == name)
    return [fact for fact in local.facts if fact.kind in ANSWERS] if local is not None else []


def _error(study: Study, name: str) -> float:
    local = next(each.local.get("candidate") for each in study.passes.findings if each.tap.name == name)
    return local.nmse if local is not None else np.inf


def _with_rank(words: str, facts: Sequence[Fact]) -> tuple[Fact, ...]:
    """What is known of an error, the first of it with its ranks."""
    first, *more = facts or [Fact("ranks", "wrong on the inputs it was given")]
    return (replace(first, says=f"{first.says}; {words}"), *more)
