"""The ways of a server: what is done to a context so that a run's tokens go through it among others, step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count, cycle, islice, zip_longest

from llamadiff.ext.state.history import END, History
from llamadiff.llamacpp.steps import CLEAR, COPY, DECODE, GET, LOAD, NEW, REMOVE, SAVE, SET, SHIFT, Step

ALL = (0, END)  # positions of a sequence
CELLS = 256  # a context has room for a multiple of it
Part = tuple[int, Sequence[int]]  # a sequence, and its next tokens


class Plan:
    """Steps, so far. ``tokens`` are the run's own; ``done``: how many of them were decoded.

    What is beside them is of other tokens, where there are any below the largest id.
    """

    def __init__(self, tokens: Sequence[int], ubatch: int = 0) -> None:
        self.tokens, self.ubatch, self.done = tuple(tokens), ubatch, 0
        self.steps: list[Step] = []
        self.history = History()
        own = set(tokens)
        self._other = cycle([token for token in range(max(own) + 1) if token not in own] or tokens[::-1])

    def others(self, number: int) -> list[int]:
        """Tokens of somebody else."""
        return list(islice(self._other, number))

    def own(self, number: int) -> list[int]:
        """So many of the run's tokens that come next; a batch has them as its own."""
        return list(self.tokens[self.done : self.done + number])

    @property
    def left(self) -> int:
        return len(self.tokens) - self.done

    def batch(self, *parts: Part, own: int = -1, draft: int = 0, in_turns: bool = True) -> None:
        """A batch of next tokens of sequences, ``in_turns`` or one after the other.

        Those of ``own`` are recorded, but for the last ones, a ``draft``.
        """
        queues = [[(sequence, token) for token in tokens] for sequence, tokens in parts]
        mixed = zip_longest(*queues) if in_turns else queues
        given = [each for turn in mixed for each in turn if each is not None]
        if not given:
            return
        ends = {sequence: count(self.history.end(sequence)) for sequence, _ in given}
        sequences, tokens = zip(*given, strict=True)
        positions = tuple(next(ends[sequence]) for sequence in sequences)
        self.history.decode(tokens, positions, sequences)
        places = [place for place, sequence in enumerate(sequences) if sequence == own]
        places = places[: len(places) - draft]
        self.steps.append(Step(DECODE, (), tokens, positions, sequences, tuple(places), self.done))
        self.done += len(places)

    def remove(self, sequence: int, start: int, stop: int) -> None:
        self.history.remove(sequence, start, stop)
        self.steps.append(Step(REMOVE, (sequence, start, stop)))

    def copy(self, source: int, target: int) -> None:
        self.history.copy(source, target, *ALL)
        self.steps.append(Step(COPY, (source, target, -1, -1)))

    def move(self, source: int, target: int, get: str = GET, put: str = SET) -> None:
        """The state of a sequence into another; the first one ends."""
        self.history.restore(self.history.of(source), target)
        self.steps.append(Step(get, (source, 0)))
        self.remove(source, *ALL)
        self.steps.append(Step(put, (target, 0)))

    def shift(self, sequence: int, by: int) -> None:
        self.history.shift(sequence, *ALL, by)
        self.steps.append(Step(SHIFT, (sequence, 0, END, by)))

    def clear(self) -> None:
        self.history.clear()
        self.steps.append(Step(CLEAR))

    @property
    def is_moved(self) -> bool:
        """Whether rows are seen elsewhere than where they were run, so that taps do not tell what was seen."""
        return any(step.call == SHIFT for step in self.steps)

    def finished(self) -> tuple[Step, ...]:
        """The steps, in a context that has room for all of them."""
        decoded = sum(len(step.tokens) for step in self.steps)
        many = 1 + max(sequence for step in self.steps for sequence in (*step.sequences, *step.of[: step.call == COPY]))
        many = max(many, 1 + max((step.of[1] for step in self.steps if step.call == COPY), default=0))
        return Step(NEW, (-(-decoded // CELLS) * CELLS, many, self.ubatch)), *self.steps


def used(plan: Plan, batches: Sequence[int]) -> None:
    """The context has run something else before, and was cleared; what that left in memory stays."""
    plan.batch((0, plan.tokens[::-1]))
    plan.clear()
    for size in batches or (len(plan.tokens),):
        plan.batch((0, plan.own(size)), own=0)


def sequences(plan: Plan, many: int) -> None:
    """One batch of several sequences: the tokens are the second one, while the others have them reversed."""
    own = min(1, many - 1)
    parts = [(number, plan.tokens if number == own else plan.tokens[::-1]) for number in range(many)]
    plan.batch(*parts, own=own, in_turns=False)


def interleaved(plan: Plan, many: int) -> None:
    """Prompts of different lengths, decoded in one batch in turns; some end, and others begin in their slots."""
    own, rest = 1, [number for number in range(many) if number != 1]
    plan.batch(*((each, plan.others(2 + each)) for each in rest), (own, plan.own(max(1, plan.left // 2))), own=own)
    for turn in count(1):
        if not plan.left:
            return
        ends = rest[turn % len(rest)]
        plan.remove(ends, *ALL)
        parts = [(each, plan.others(3 if each == ends else 1)) for each in rest]
        plan.batch(*parts[turn % 2 :], (own, plan.own(1 + turn % 2)), *parts[: turn % 2], own=own)


def freed(plan: Plan) -> None:
    """A range of another sequence is removed, and then all of it: the tokens go on in the cells that were freed."""
    third = max(1, plan.left // 3)
    plan.batch((0, plan.own(third)), (1, plan.others(2 * third + 4)), own=0)
    plan.remove(1, 1, third + 2)
    plan.batch((1, plan.others(1)), (0, plan.own(third)), own=0)
    plan.remove(1, *ALL)
    plan.batch((0, plan.own(plan.left)), own=0)


def forked(plan: Plan) -> None:
    """Two sequences get what a third one has, which is then their common beginning; that one goes on, and ends."""
    plan.batch((0, plan.own(max(1, plan.left // 2))), own=0)
    plan.copy(0, 1)
    plan.copy(0, 2)
    plan.batch((0, plan.others(2)), (2, plan.others(1)), (1, plan.own(2)), own=1)
    plan.remove(0, *ALL)
    plan.batch((2, plan.others(2)), (1, plan.own(plan.left)), own=1)


def restored(plan: Plan) -> None:
    """The sequence's state goes to another slot, in memory, and to a third, by a file; others are beside it."""
    third = max(1, plan.left // 3)
    plan.batch((1, plan.others(3)), (0, plan.own(third)), own=0)
    plan.move(0, 2)
    plan.batch((0, plan.others(3)), (2, plan.own(third)), own=2)
    plan.move(2, 3, SAVE, LOAD)
    plan.batch((2, plan.others(1)), (3, plan.own(plan.left)), own=3)


def shifted(plan: Plan) -> None:
    """What came first was decoded at later positions, and moved: the rest goes on behind it, as if it had not."""
    half, by = max(1, plan.left // 2), 5
    first = plan.own(half)
    plan.batch((1, first), own=1)  # recorded where it is alone, at the positions that result
    plan.history.decode(first, range(by, by + half), [0] * half)
    plan.steps.append(Step(DECODE, (), tuple(first), tuple(range(by, by + half)), (0,) * half))
    plan.shift(0, -by)
    plan.batch((0, plan.own(plan.left)), own=0)


def chunked(plan: Plan, size: int) -> None:
    """Batches that do not end where a ubatch of ``size`` tokens does."""
    plan.ubatch = size
    sizes = cycle((size + 1, max(1, size - 1), 1, 2 * size))
    while plan.left:
        plan.batch((0, plan.own(next(sizes))), own=0)


def drafted(plan: Plan, size: int) -> None:
    """After each token come ``size`` that a draft proposed, of which some are accepted, and the others taken back."""
    plan.batch((0, plan.own(max(1, plan.left // 3))), own=0)
    for turn in count():
        if not plan.left:
            return
        right = plan.own(1 + turn % (size + 1))
        wrong = plan.others(size + 1 - len(right))
        end = plan.history.end(0) + len(right)
        plan.batch((0, [*right, *wrong]), own=0, draft=len(wrong))
        if wrong:
            plan.remove(0, end, END)


ALONE: Mapping[str, Callable[[Plan], None]] = {
    "freed": freed, "forked": forked, "shifted": shifted, "restored": restored,
}  # fmt: skip
SIZED: Mapping[str, Callable[[Plan, int], None]] = {
    "sequences": sequences, "interleaved": interleaved, "chunked": chunked, "drafted": drafted,
}  # fmt: skip
