"""Is a speculative run right: its text is that without drafts, its drafts are the head's alone, it counts right.

Text and drafts are held against logits of trunk and head in contexts of their own, in which nothing was taken back. Two
such runs in other batches show what rounding does; a token that is another within that is a tie.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from llamadiff.ext.heads.draft_mistakes import Behind, mistakes, right_rows
from llamadiff.ext.heads.speculation import ALL, Array, Asked, Round, Speculation, head_alone, trunk_alone
from llamadiff.ext.state.inputs import ordinal
from llamadiff.ext.state.scheduled import MATCH, limit_of, rows_apart
from llamadiff.judge.verdict import of_rounding

SIDES = ("text", "steps", "ones")  # all tokens together; the prompt, then one by one; one by one


@dataclass(frozen=True)
class Drafts:
    """What is said of a run: how many drafts were ``accepted`` by its own count, how many are; what is wrong; ``ties``:
    tokens that rounding decides; the ``worst`` error of ``judged`` rows of logits.
    """

    drafted: int
    accepted: int
    faults: tuple[str, ...]
    ties: tuple[str, ...]
    worst: float
    judged: int

    @property
    def verdict(self) -> str:
        return of_rounding(self.worst <= MATCH and not self.faults, not self.faults)


@dataclass
class Judge:
    """Of one run; ``halves``: what rounding to 16 bits comes to in this model (state/scheduled.py)."""

    run: Speculation
    halves: float
    faults: list[str] = field(default_factory=list)
    ties: list[str] = field(default_factory=list)
    worst: float = 0.0
    judged: int = 0

    def questions(self) -> Asked:
        """Ask for logits of trunk and head alone -> Drafts."""
        run = self.run
        self.faults += [*_of_record(run), *([f"{run.refused}, as it goes on"] if run.refused else [])]
        if run.logits is not None:
            self.limits = yield from self._judge_text()
            yield from self._judge_drafts()
            if not run.refused:
                self._count()
        return Drafts(run.drafted, run.accepted, tuple(self.faults), tuple(self.ties), self.worst, self.judged)

    def _judge_text(self) -> Asked:
        """The logits that each token of the text was chosen by."""
        text, start = self.run.text, len(self.run.prompt)
        whole = yield trunk_alone(text, start - 1, SIDES[0])
        steps = yield trunk_alone(text, start - 1, SIDES[1], start)
        assert whole is not None
        assert steps is not None
        self.whole = whole
        own = self.run.rows()
        errors, noise = rows_apart(own, whole[:-1]), rows_apart(steps, whole)
        errors = errors.clip(max=rows_apart(own, steps[:-1]))
        for number, error in enumerate(errors):
            limit = limit_of(float(noise[number]), self.halves)
            place = start + number - 1
            if not error <= limit:
                ones = yield trunk_alone(text[: place + 1], place, SIDES[2], 0)
                limit = max(limit, 10 * float(max(rows_apart(each, ones)[0] for each in _one(number, whole, steps))))
                error = min(float(error), float(rows_apart(own[number : number + 1], ones)[0]))
            self._note(error)
            if not error <= limit:
                self.faults.append(
                    f"the trunk's logits behind position {place} are {error:.1e} from those without drafts, and rounding "
                    f"explains {limit:.1e}"
                )
                return
            best = int(whole[number].argmax())
            if best != text[place + 1] and int(own[number].argmax()) == text[place + 1]:
                self._tie(f"the text goes on with {text[place + 1]} at position {place + 1}", whole[number], best)

    def _judge_drafts(self) -> Asked:
        """The logits of each draft, up to the first that is wrong."""
        self.alone: dict[tuple[int, int], Array] = {}
        start = len(self.run.prompt)
        for n, made in enumerate(self.run.rounds):
            for i in range(len(made.drafts)):
                sides = [(yield self._ask(n, i, 0)), (yield self._ask(n, i, 1, start))]
                own, noise = made.logits[i : i + 1], float(rows_apart(*sides)[0])
                error = min(float(rows_apart(own, side)[0]) for side in sides)
                limit = limit_of(noise, self.halves)
                if not error <= limit:
                    if (n, i) == (0, 0) or SIDES[2] not in self._ran:
                        yield trunk_alone(self.run.text, len(self.run.text) - 1, SIDES[2], 0)
                        self._ran.add(SIDES[2])
                    for each in range(i + 1):
                        ones = yield self._ask(n, each, 2, 0)
                    limit = max(limit, 10 * max(float(rows_apart(ones, side)[0]) for side in sides))
                    error = min(error, float(rows_apart(own, ones)[0]))
                self._note(error)
                if not error <= limit:
                    yield from self._explain(n, i, error, limit)
                    return
                self.alone[n, i] = sides[0][0]
                best = int(sides[0].argmax())
                if best != made.drafts[i] == int(own.argmax()):
                    self._tie(f"{_name(made, i)} is {made.drafts[i]}", sides[0][0], best)

    _ran: set[str] = field(default_factory=set)

    def _ask(self, n: int, i: int, side: int, alone: int = ALL) -> dict[str, object]:
        """A draft by the head alone. Its last row is a batch by itself: of several some llama.cpp give the first one's
        hidden state.
        """
        part, rows = min(i, self.run.heads - 1), right_rows(self.run, n, i, SIDES[side])
        return head_alone(rows, part, f"{SIDES[side]}/{n}/{i}", min(alone, len(rows) - 1))

    def _explain(self, n: int, i: int, error: float, limit: float) -> Asked:
        """Which mistake gives the logits of a draft that is wrong."""
        made, behind = self.run.rounds[n], Behind(self.run, n, i)
        for before in behind.branches:
            yield trunk_alone([*self.run.text[: before.position + 1], *before.drafts], before.position, behind.branch(before))
        for mistake in mistakes(behind):
            part = min(i, self.run.heads - 1) if mistake.part is None else mistake.part
            told = yield head_alone(mistake.rows, part, "mistaken")
            if told is not None and float(rows_apart(made.logits[i : i + 1], told)[0]) <= max(limit, 1e-3 * error):
                self.faults.append(f"{_name(made, i)} {mistake.says}")
                return
        self.faults.append(
            f"{_name(made, i)} has logits that are {error:.1e} from those of the head alone, and rounding explains "
            f"{limit:.1e}"
        )

    def _count(self) -> None:
        """What is accepted by the text and the head alone."""
        run = self.run
        rounds = run.rounds if not self.faults else ()
        right = sum(self._accepted(n, made) for n, made in enumerate(rounds))
        drafted = sum(len(made.drafts) for made in rounds)
        if rounds and not self.ties and (run.accepted, run.drafted) != (right, drafted):
            self.faults.append(
                f"it counts {run.accepted} of {run.drafted} drafts as accepted; by the text and the head alone "
                f"{right} of {drafted} are"
            )

    def _accepted(self, n: int, made: Round) -> int:
        text, right = self.run.text[made.position + 1 :], 0
        while right < len(made.drafts) and (n, right) in self.alone and right <= made.accepted:
            if int(self.alone[n, right].argmax()) != text[right]:
                break
            right += 1
        return right

    def _note(self, error: float) -> None:
        self.judged, self.worst = self.judged + 1, max(self.worst, float(error))

    def _tie(self, says: str, logits: Array, best: int) -> None:
        self.ties.append(f"{says}, alone with {best}: their logits are equal within rounding")


def _one(number: int, *sides: Array) -> list[Array]:
    return [side[number : number + 1] for side in sides]


def _name(made: Round, i: int) -> str:
    return f"the {ordinal(i + 1)} draft behind position {made.position}"


def _of_record(run: Speculation) -> Iterator[str]:
    """What is wrong with what a run says of itself: tokens that are not its logits' largest, caches that go on."""
    if run.logits is None:
        return
    if int(run.logits[0].argmax()) != run.first:
        yield f"the trunk goes on with {run.first} behind the prompt, and its logits say {int(run.logits[0].argmax())}"
    position = len(run.prompt)
    for made in run.rounds:
        if made.position != position:
            yield f"a round begins at position {made.position}, and the last token is at {position}"
        yield from _of_round(made)
        position = made.position + made.accepted + 1


def _of_round(made: Round) -> Iterator[str]:
    for i, (token, logits) in enumerate(zip(made.drafts, made.logits, strict=True)):
        if token != int(logits.argmax()):
            yield f"{_name(made, i)} is {token}, and the head's logits say {int(logits.argmax())}"
    yield from _of_chosen(made)
    agreed = next((i for i, pair in enumerate(zip(made.drafts, made.chosen, strict=False)) if pair[0] != pair[1]), None)
    right = len(made.drafts) if agreed is None else agreed
    if made.accepted != right:
        yield f"of the drafts behind position {made.position} {made.accepted} are accepted, and the trunk goes on with {right}"
    end = made.position + made.accepted
    for name, found, wanted in zip(
        ("the head's", "the trunk's", "the head's"), made.ends, (made.position - 1, end, end), strict=True
    ):
        if found != wanted:
            why = "drafts are not taken out" if found > wanted else "tokens are lost"
            yield f"{name} cache ends at position {found}, where {wanted} is right: {why}"


def _of_chosen(made: Round) -> Iterator[str]:
    """A token that the trunk is said to go on with, and does not: of those that count."""
    told: Sequence[int] = made.chosen[: made.accepted + 1]
    for i, (token, logits) in enumerate(zip(told, made.verified, strict=False)):
        if token != int(logits.argmax()):
            yield (
                f"the text goes on with {token} at position {made.position + i + 1}, and the trunk's logits say "
                f"{int(logits.argmax())}"
            )
