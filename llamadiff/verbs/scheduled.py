"""A random schedule in one context of llama.cpp, each token against the same one alone; one that fails, made short."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from llamaref.history import History
from numpy.typing import NDArray

from llamadiff.llamacpp.capture import read_run
from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.inputs import ordinal
from llamadiff.llamacpp.request import Request
from llamadiff.llamacpp.schedule import Abilities, Alone, Schedule, alone, in_company, probes
from llamadiff.llamacpp.schedule_reader import ScheduleReader
from llamadiff.llamacpp.steps import DECODE, Step
from llamadiff.numerics import metrics, tolerances
from llamadiff.system.errors import DiedError
from llamadiff.system.progress import silent
from llamadiff.trace.taps import LOGITS

Array = NDArray[np.floating]
FEW = 8  # tokens that are run once more
PATIENCE = 300.0  # seconds that a schedule may take


@dataclass(frozen=True)
class Found:
    """What came of a schedule: what its passes were ``given`` wrongly, and which logits are ``off``, in words; of
    ``judged`` tokens the ``worst`` error, and the ``limit`` of what batches alone come to. ``died``: how it ended.
    """

    given: tuple[str, ...]
    off: tuple[str, ...]
    judged: int
    worst: float
    limit: float
    steps: tuple[Step, ...]
    died: str = ""

    @property
    def faults(self) -> tuple[str, ...]:
        """All that is wrong, the cause first."""
        return (*((self.died,) if self.died else ()), *self.given, *self.off)

    @property
    def kind(self) -> tuple[bool, bool]:
        """What tells one failure from another, roughly."""
        return bool(self.died), bool(self.given)

    @property
    def verdict(self) -> str:
        if self.faults:
            return tolerances.WRONG
        return (
            tolerances.MATCH
            if self.worst <= tolerances.rule_for(tolerances.RULES, LOGITS, "MUL_MAT", "*").match
            else tolerances.NOISE
        )


def abilities(request: Request, child: Child) -> Abilities:
    """What a model's memory is, as llama.cpp says."""
    said = child.ask(replace(request, errand="memory", output=None), silent)
    return Abilities(*(said[name] for name in ("states", "window", "shifts", "turns")))


def judged(schedule: Schedule, request: Request, vocabulary: int, child: Child | None = None) -> Found:
    """Run it, and each sequence of it alone, in one go and token by token; and some tokens in batches of several sizes,
    since how far those are apart is what batches may do. Raises UserError.
    """
    steps, history = schedule.realized()
    lives, others = alone(history), alone(history, one_by_one=True)
    tried = probes(vocabulary, schedule.abilities)
    every = (*steps, *(step for life in (*lives, *others, *tried) for step in life.steps))
    request = replace(request, wanted=(), tokens=(0,), way=replace(request.way, steps=every), output=None)
    reader = read_run(request, silent, child, ScheduleReader)
    assert isinstance(reader, ScheduleReader)
    rows = reader.of_context(0) if history.rows else np.zeros((0, 1), np.float32)
    right = [_placed(reader, group, rows, 1 + first) for first, group in ((0, lives), (len(lives), others))]
    several = [reader.of_context(1 + len(lives) + len(others) + number) for number in range(len(tried))]
    noise = max((float(_apart(one, several[0]).max()) for one in several), default=0.0)
    errors = np.minimum(_apart(rows, right[0]), _apart(rows, right[1]))
    rule = tolerances.rule_for(tolerances.RULES, LOGITS, "MUL_MAT", "*")
    limit = 10 * (rule.match + max(noise, float(_apart(right[1], right[0]).max(initial=0.0))))
    wrong = [number for number, error in enumerate(errors) if not error <= limit]
    for number, error in _in_company(history, steps, wrong, rows, request, child).items():
        errors[number] = min(errors[number], error)
    wrong = [number for number in wrong if not errors[number] <= limit]
    return Found(
        reader.faults,
        tuple(_said(steps, errors, wrong, limit)),
        len(errors),
        float(errors.max(initial=0.0)),
        limit,
        steps,
    )


def _in_company(
    history: History, steps: Sequence[Step], wrong: Sequence[int], rows: Array, request: Request, child: Child | None
) -> dict[int, float]:
    """How far tokens are from the same ones in batches of the same sizes: what rounding decides, such as an expert's
    choice, is decided alike. Some of them are enough.
    """
    lives = [in_company(history, steps, number) for number in wrong[:FEW]]
    if not lives:
        return {}
    every = tuple(step for life in lives for step in life.steps)
    reader = read_run(replace(request, way=replace(request.way, steps=every)), silent, child, ScheduleReader)
    assert isinstance(reader, ScheduleReader)
    batches = (of_own(life.steps, reader.logits[number]) for number, life in enumerate(lives))
    return {number: float(_apart(rows[number][None], own[life.rows.index(number)][None])[0])
            for number, life, own in zip(wrong, lives, batches, strict=False)}  # fmt: skip


def of_own(steps: Sequence[Step], logits: Sequence[Array]) -> Array:
    """The logits of a life's own tokens: those of its context's first sequence."""
    batches = (step for step in steps if step.call == DECODE)
    own = [rows[[place for place, sequence in enumerate(step.sequences) if sequence == 0]]
           for step, rows in zip(batches, logits, strict=True)]  # fmt: skip
    return np.concatenate(own)


def _placed(reader: ScheduleReader, group: Sequence[Alone], rows: Array, first: int) -> Array:
    """Logits of the same tokens alone."""
    out = np.full_like(rows, np.nan)
    for number, life in enumerate(group):
        out[list(life.rows)] = reader.of_context(first + number)
    return out


def _apart(rows: Array, right: Array) -> Array:
    return np.array(metrics.difference(rows, right, 0).per_token) if len(rows) else np.zeros(0)


def _said(steps: Sequence[Step], errors: Array, wrong: Sequence[int], limit: float) -> Iterator[str]:
    """Of each batch the first token that is wrong."""
    batches = [step for step in steps if step.call == DECODE]
    first = 0
    for number, step in enumerate(batches):
        here = [row for row in wrong if first <= row < first + len(step.tokens)]
        if here:
            place = here[0] - first
            before = sum(sequence == step.sequences[place] for sequence in step.sequences[:place])
            token = f"token {before} of sequence {step.sequences[place]}"
            yield (
                f"in the {ordinal(number + 1)} batch {token} has logits that are "
                f"{errors[here[0]]:.1e} from those of the same tokens alone, and rounding explains {limit:.1e}"
            )
        first += len(step.tokens)


def shortened(schedule: Schedule, fails: Callable[[Schedule], bool], seconds: float) -> Schedule:
    """As short as still fails: without halves, quarters ... of its deeds, then without single tokens."""
    ends = time.monotonic() + seconds
    size = max(1, len(schedule.deeds) // 2)
    while size and time.monotonic() < ends:
        start = len(schedule.deeds) - size
        while start > -size and time.monotonic() < ends:
            fewer = schedule.without(max(0, start), start + size)
            if fewer.deeds and fails(fewer):
                schedule = fewer
            start -= size
        size = size // 2 if size > 1 else 0
    again = True
    while again and time.monotonic() < ends:
        smaller = next((each for each in schedule.smaller() if time.monotonic() < ends and fails(each)), None)
        again = smaller is not None
        schedule = smaller or schedule
    return schedule


def run_schedule(schedule: Schedule, request: Request, vocabulary: int) -> Found:
    """The same in a process of its own, whatever becomes of it. Raises UserError for what llama.cpp refuses."""
    try:
        with Child(request.settings, PATIENCE) as child:
            return judged(schedule, request, vocabulary, child)
    except DiedError as error:
        said = str(error).removeprefix(f"{request.model}: ")
        return Found((), (), 0, float("inf"), 0.0, schedule.realized()[0], said)


def fails_as(found: Found, request: Request, vocabulary: int) -> Callable[[Schedule], bool]:
    """Whether another schedule fails in that way."""

    def asked(schedule: Schedule) -> bool:
        if not any(deed.tokens for deed in schedule.deeds):
            return False
        other = run_schedule(schedule, request, vocabulary)
        return bool(other.faults) and other.kind == found.kind

    return asked
