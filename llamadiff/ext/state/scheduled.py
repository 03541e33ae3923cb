"""A random schedule in one context of llama.cpp, each token against the same one alone; one that fails, made short."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

import numpy as np
from llamaref import Weights
from numpy.typing import NDArray

from llamadiff.ext.state.history import History
from llamadiff.ext.state.inputs import ordinal
from llamadiff.ext.state.schedule import Abilities, Alone, Schedule, alone, in_company, probes, rounded_otherwise
from llamadiff.ext.state.schedule_reader import ScheduleReader
from llamadiff.ext.state.variation import STEPPER
from llamadiff.judge.verdict import of_rounding
from llamadiff.llamacpp.capture import read_run
from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.readers import Tell
from llamadiff.llamacpp.request import Request
from llamadiff.llamacpp.steps import DECODE, Step
from llamadiff.numerics import metrics, tolerances
from llamadiff.system.errors import DiedError, UserError
from llamadiff.system.progress import silent
from llamadiff.trace.taps import LOGITS

Array = NDArray[np.floating]
Asked = Callable[[Sequence[Step]], ScheduleReader]
FEW = 16  # tokens that are run once more
PATIENCE = 300.0  # seconds that a schedule may take
EXACT = tolerances.rule_for(tolerances.RULES, LOGITS, "MUL_MAT", "*").match


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
        return of_rounding(self.worst <= EXACT and not self.faults, not self.faults)


def abilities(request: Request, child: Child) -> Abilities:
    """What a model's memory is, as llama.cpp says."""
    said = child.ask(replace(request, errand="llamadiff.ext.state.memory:tell_memory", output=None), silent)
    return Abilities(*(said[name] for name in ("states", "window", "shifts", "turns")))


def read_steps(steps: Sequence[Step], request: Request, child: Child | None) -> ScheduleReader:
    """Carry out steps, and read what they come to, as far as llama.cpp does them. Raises UserError."""
    made = list[ScheduleReader]()

    def reader(request: Request, tell: Tell) -> ScheduleReader:
        made.append(ScheduleReader(request, tell))
        return made[0]

    way = replace(request.way, steps=tuple(steps), observer=STEPPER)
    try:
        read_run(replace(request, wanted=(), tokens=(0,), way=way, output=None), silent, child, reader)
    except DiedError:
        raise
    except UserError as error:
        if not made or not made[0].refuses(str(error)):
            raise
    return made[0]


def judged(
    schedule: Schedule, request: Request, vocabulary: int, child: Child | None = None, limit: float = 0.0
) -> Found:
    """Run it, and each sequence of it alone, in one go and token by token; and, unless the ``limit`` is known, some
    tokens in batches of several sizes, since how far those are apart is what batches may do. Raises UserError.
    """
    steps, history = schedule.realized()
    groups = (
        [(life,) for life in alone(history)],
        [(life,) for life in alone(history, one_by_one=True)],
        [] if limit else probes(vocabulary),
    )
    every = [life for group in groups for lives in group for life in lives]
    reader = read_steps([*steps, *(step for life in every for step in life.steps)], request, child)
    if reader.is_refused:
        return Found(reader.faults, (), 0, float("inf"), 0.0, steps)
    rows = reader.of_context(0) if history.rows else np.zeros((0, 1), np.float32)
    made = (reader.of_context(number) for number in range(1, len(every) + 1))
    right = [_placed(rows, [(life, next(made)) for (life,) in group]) for group in groups[:2]]
    noise = max((float(rows_apart(next(made), next(made)).max()) for _ in groups[2]), default=0.0)
    errors = np.minimum(*(rows_apart(rows, each) for each in right))
    limit = limit or limit_of(noise, halves_in(request.model))
    wrong = [number for number, error in enumerate(errors) if not error <= limit]
    for number, nearest, spread in _looked_again(
        history, steps, wrong, rows, schedule.abilities.turns, partial(read_steps, request=request, child=child)
    ):
        is_rounding = nearest <= max(limit, 10 * spread)
        errors[number] = min(errors[number], nearest, limit if is_rounding else nearest)
    off = _said(steps, errors, [number for number in wrong if not errors[number] <= limit], limit)
    return Found(reader.faults, tuple(off), len(errors), float(errors.max(initial=0.0)), limit, steps)


def limit_of(noise: float, halves: float) -> float:
    """How far logits may be from those of another batch, where two batches are ``noise`` apart."""
    return 10 * (EXACT + max(noise, halves))


def halves_in(model: str) -> float:
    """The NMSE of activations that are rounded to 16 bits before a product: where one falls to the other side shows in
    few tokens, and probes may meet none. 0 where all weights are F32.
    """
    weights = Weights(model)
    return tolerances.ROUNDING["f16"] if any(weights.type(name) != "F32" for name in weights) else 0.0


def _looked_again(
    history: History, steps: Sequence[Step], wrong: Sequence[int], rows: Array, turns: bool, asked: Asked
) -> Iterator[tuple[int, float, float]]:
    """Tokens, how far each is from the same one in batches of the same sizes, where what hangs on rounding, such as an
    expert's choice, is decided alike; and how far it moves alone, where all is rounded otherwise.
    """
    for number in wrong[:FEW]:
        lives = [in_company(history, steps, number), *rounded_otherwise(history, number, turns)]
        reader = asked([step for life in lives for step in life.steps])
        found = [of_own(life.steps, reader.logits[place])[life.rows.index(number)] for place, life in enumerate(lives)]
        company, *others = (each[None] for each in found)
        spread = max(float(rows_apart(one, other)[0]) for one, other in combinations(others, 2))
        yield number, float(rows_apart(rows[number][None], company)[0]), spread


def of_own(steps: Sequence[Step], logits: Sequence[Array]) -> Array:
    """The logits of a life's own tokens: those of its context's first sequence."""
    batches = (step for step in steps if step.call == DECODE)
    own = [rows[[place for place, sequence in enumerate(step.sequences) if sequence == 0]]
           for step, rows in zip(batches, logits, strict=True)]  # fmt: skip
    return np.concatenate(own)


def _placed(rows: Array, lives: Sequence[tuple[Alone, Array]]) -> Array:
    """Logits of the same tokens alone."""
    out = np.full_like(rows, np.nan)
    for life, logits in lives:
        out[list(life.rows)] = logits
    return out


def rows_apart(rows: Array, right: Array) -> Array:
    """The NMSE of each row."""
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


def run_schedule(schedule: Schedule, request: Request, vocabulary: int) -> Found:
    """The same in a process of its own, whatever becomes of it. Raises UserError for what llama.cpp refuses."""
    try:
        with Child(request.settings, PATIENCE) as child:
            return judged(schedule, request, vocabulary, child)
    except DiedError as error:
        said = str(error).removeprefix(f"{request.model}: ")
        return Found((), (), 0, float("inf"), 0.0, schedule.realized()[0], said)


class Shortening:
    """Makes a schedule that fails as short as still fails in that way, in so many ``runs``."""

    def __init__(self, request: Request, vocabulary: int, runs: int) -> None:
        self.request, self.vocabulary = request, vocabulary
        self.runs = runs
        self._open = ExitStack()
        self._child: Child | None = None

    def of(self, schedule: Schedule, found: Found) -> Schedule:
        """Without halves, quarters ... of its deeds, then with batches made one, and without single tokens."""
        self.found = found
        size = max(1, len(schedule.deeds) // 2)
        while size:
            schedule, size = self._without(schedule, size), size // 2
        while (smaller := next(filter(self._fails, schedule.smaller()), None)) is not None:
            schedule = self._without(smaller, 1)
        self.close()
        return schedule

    def _without(self, schedule: Schedule, size: int) -> Schedule:
        for start in range(len(schedule.deeds) - size, -size, -size):
            fewer = schedule.without(max(0, start), start + size)
            if self._fails(fewer):
                schedule = fewer
        return schedule

    def _fails(self, schedule: Schedule) -> bool:
        if not self.runs or not any(deed.tokens for deed in schedule.deeds):
            return False
        self.runs -= 1
        other = self._run(schedule)
        return bool(other.faults) and other.kind == self.found.kind

    def _run(self, schedule: Schedule) -> Found:
        """What came of it; of what passes are given wrongly, that alone, which needs nothing to compare with."""
        try:
            if not self.found.given or self.found.died:
                return judged(schedule, self.request, self.vocabulary, self._ready(), self.found.limit)
            faults = read_steps(schedule.realized()[0], self.request, self._ready()).faults
            return Found(faults, (), 0, 0.0, 0.0, ())
        except DiedError as error:
            self.close()
            return Found((), (), 0, 0.0, 0.0, (), str(error))
        except UserError:  # llama.cpp refuses a step: another failure, if it is one
            self.close()
            return Found((), (), 0, 0.0, 0.0, ())

    def _ready(self) -> Child:
        if self._child is None:
            self._child = self._open.enter_context(Child(self.request.settings, PATIENCE))
        return self._child

    def close(self) -> None:
        """Let llama.cpp's process go."""
        self._open.close()
        self._child = None
