"""How to spend bytes: for each tensor a finer type, or none, so that most of the KL is recovered.

A type recovers of a tensor's loss what its own rounding leaves out (the loss goes with the square of the error). Steps
are taken in the order of what a byte recovers; steps that cost more a byte than the next one are merged with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from llamaref.weights import block_sizes

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.file.cost import TYPICAL
from llamadiff.ext.file.statistics import PLAIN
from llamadiff.ext.loss.result import OWN, Contribution

LADDER = ("Q2_K", "Q3_K", "Q4_0", "Q4_K", "Q5_0", "Q5_K", "Q6_K", "Q8_0")
_NEXT_TO_NOTHING = 1e-7  # the NMSE of F16


@dataclass(frozen=True)
class Upgrade:
    """One tensor from a type to a finer one: what that recovers in nats, and the bytes that it takes."""

    name: str
    kind: str
    gain: float
    cost: int

    @property
    def worth(self) -> float:
        """Nats a byte."""
        return self.gain / self.cost


def choose(good: ModelFile, tensors: Sequence[Contribution], budget: int) -> tuple[dict[str, str], int, float]:
    """The types that recover most within ``budget`` bytes, the bytes they take, and the nats that they should recover.

    A type of "" is the good file's own.
    """
    steps = sorted((step for one in tensors for step in _steps(good, one)), key=lambda step: -step.worth)
    chosen: dict[str, str] = {}
    spent, gained, stuck = 0, 0.0, set[str]()
    for step in steps:
        if step.name in stuck:
            continue
        if spent + step.cost > budget:
            stuck.add(step.name)  # a later step of this tensor builds on this one
            continue
        chosen[step.name], spent, gained = step.kind, spent + step.cost, gained + step.gain
    return chosen, spent, gained


def _steps(good: ModelFile, one: Contribution) -> Iterator[Upgrade]:
    """A tensor's types, each from the one before, with ever less gained a byte."""
    kept = list[Upgrade]()
    at_bytes, at_gain = 0, 0.0
    for kind, more, gain in _options(good, one):
        if gain <= at_gain or more <= at_bytes:
            continue
        step = Upgrade(one.name, kind, gain - at_gain, more - at_bytes)
        while kept and kept[-1].worth < step.worth:
            last = kept.pop()
            step = Upgrade(one.name, kind, step.gain + last.gain, step.cost + last.cost)
        kept.append(step)
        at_bytes, at_gain = more, gain
    yield from kept


def _options(good: ModelFile, one: Contribution) -> Iterator[tuple[str, int, float]]:
    """Finer types with the bytes that each takes more, and what it recovers."""
    shape, now = good.weights.shape(one.name), _error(one.kind)
    values, present = prod(shape), good.weights.read_raw(one.name).nbytes - one.more
    for kind in LADDER:
        per_block, size = block_sizes(kind)
        more = values // per_block * size - present
        if shape[-1] % per_block == 0 and 0 < more < one.more and _error(kind) < now:
            yield kind, more, one.value * (1 - _error(kind) / now)
    if one.more > 0 and one.value > 0:
        yield OWN, one.more, one.value


def _error(kind: str) -> float:
    """The NMSE that a type leaves on usual values."""
    errors: Mapping[str, float] = {**TYPICAL, **dict.fromkeys(PLAIN, 0.0)}
    return errors.get(kind, _NEXT_TO_NOTHING)
