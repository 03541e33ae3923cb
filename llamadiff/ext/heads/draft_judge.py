"""Is a speculative run right: its text is that without drafts, its drafts are the head's alone, it counts right.

Text and drafts are held against logits of trunk and head in contexts of their own, in which nothing was taken back. Two
such runs in other batches show what rounding does; a token that is another within that is a tie.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from llamadiff.ext.heads.draft_mistakes import Behind, mistakes, right_rows
from llamadiff.ext.heads.speculation import ALL, Array, Asked, Round, Speculation, head_alone, trunk_alone
from llamadiff.ext.state.inputs import ordinal
from llamadiff.ext.state.scheduled import EXACT, limit_of, rows_apart
from llamadiff.judge.verdict import of_rounding
from llamadiff.system.errors import UserError

TEXT, STEPS, ONES = "text", "steps", "ones"  # all tokens together; the prompt, then one by one; one by one


@dataclass(frozen=True)
class Drafts:
    """What is said of a run: how many drafts were ``accepted`` by its own count; what is wrong; ``ties``: tokens that
    rounding decides; the ``worst`` error of ``judged`` rows of logits.
    """

    drafted: int
    accepted: int
    faults: tuple[str, ...]
    ties: tuple[str, ...]
    worst: float
    judged: int

    @property
    def verdict(self) -> str:
        return of_rounding(self.worst <= EXACT and not self.faults, not self.faults)


@dataclass
class Judge:
    """Of one run; ``rounding``: what that of weights' activations and of caches comes to."""

    run: Speculation
    rounding: float
    faults: list[str] = field(default_factory=list)
    ties: list[str] = field(default_factory=list)
    worst: float = 0.0
    judged: int = 0
    alone: dict[tuple[int, int], Array] = field(default_factory=dict)  # round, draft -> its logits by the head alone

    def questions(self) -> Asked:
        """Ask for logits of trunk and head alone -> Drafts."""
        run = self.run
        self.faults += [*_of_record(run), *([f"{run.refused}, as it goes on"] if run.refused else [])]
        if run.logits is not None:
            yield from self._judge_text()
            yield from self._judge_drafts()
            if not (run.refused or self.faults or self.ties):
                self._count()
        return Drafts(run.drafted, run.accepted, tuple(self.faults), tuple(self.ties), self.worst, self.judged)

    def _judge_text(self) -> Asked:
        """The logits that each token of the text was chosen by, up to the first that are wrong."""
        text, start, own = self.run.text, len(self.run.prompt), self.run.rows()
        whole = yield from _asked(trunk_alone(text, start - 1, TEXT))
        steps = yield from _asked(trunk_alone(text, start - 1, STEPS, start))
        for number in range(len(own)):
            place = start + number - 1
            row, *sides = (each[number : number + 1] for each in (own, whole, steps))
            error, limit = self._error_and_limit(row, sides)
            if not error <= limit:
                ones = yield from _asked(trunk_alone(text[: place + 1], place, ONES, 0))
                error, limit = _looked_again(row, sides, ones, error, limit)
            self._note(error)
            if not error <= limit:
                self.faults.append(
                    f"the trunk's logits behind position {place} are {error:.1e} from those without drafts, and "
                    f"rounding explains {limit:.1e}"
                )
                return
            self._look_for_tie(f"the text goes on with {text[place + 1]} at position {place + 1}", row, sides[0])

    def _judge_drafts(self) -> Asked:
        """The logits of each draft, up to the first that are wrong."""
        for n, made in enumerate(self.run.rounds):
            for i in range(len(made.drafts)):
                sides = [(yield from self._of_head(n, i, TEXT)), (yield from self._of_head(n, i, STEPS))]
                row = made.logits[i : i + 1]
                error, limit = self._error_and_limit(row, sides)
                if not error <= limit:
                    ones = yield from self._one_by_one(n, i)
                    error, limit = _looked_again(row, sides, ones, error, limit)
                self._note(error)
                if not error <= limit:
                    self.faults.append(f"{_name(made, i)} {(yield from self._cause(n, i, error, limit))}")
                    return
                self.alone[n, i] = sides[0][0]
                self._look_for_tie(f"{_name(made, i)} is {made.drafts[i]}", row, sides[0])

    def _one_by_one(self, n: int, i: int) -> Asked:
        """A draft by the head alone, where every token went in by itself, into the trunk, too."""
        yield from _asked(trunk_alone(self.run.text, len(self.run.text) - 1, ONES, 0))
        for before in range(i):
            yield from self._of_head(n, before, ONES)
        return (yield from self._of_head(n, i, ONES))

    def _of_head(self, n: int, i: int, side: str) -> Asked:
        """A draft by the head alone. Its last row is a batch by itself: of several some heads give the first one's
        hidden state.
        """
        rows = right_rows(self.run, n, i, side)
        together = {TEXT: ALL, STEPS: len(self.run.prompt), ONES: 0}[side]
        return (yield from _asked(head_alone(rows, self._part(i), f"{side}/{n}/{i}", min(together, len(rows) - 1))))

    def _part(self, i: int) -> int:
        """The head that a draft is by."""
        return min(i, self.run.heads - 1)

    def _cause(self, n: int, i: int, error: float, limit: float) -> Asked:
        """Which mistake gives the logits of a draft that is wrong; else how far they are off."""
        run, behind = self.run, Behind(self.run, n, i)
        for made in behind.branches:
            tokens = [*run.text[: made.position + 1], *made.drafts]
            yield from _asked(trunk_alone(tokens, len(tokens) - 1, behind.branch(made)))
        for mistake in mistakes(behind):
            part = self._part(i) if mistake.part is None else mistake.part
            mistaken = yield head_alone(mistake.rows, part, "mistaken")
            own, most = run.rounds[n].logits[i : i + 1], max(limit, 1e-3 * error)
            if len(mistaken) and float(rows_apart(own, mistaken)[0]) <= most:
                return mistake.says
        return f"has logits that are {error:.1e} from those of the head alone, and rounding explains {limit:.1e}"

    def _error_and_limit(self, row: Array, sides: Sequence[Array]) -> tuple[float, float]:
        """How far logits are from the nearest of two others that are right, and how far they may be."""
        noise = float(rows_apart(*sides)[0])
        return min(float(rows_apart(row, side)[0]) for side in sides), limit_of(noise, self.rounding)

    def _count(self) -> None:
        """What is accepted by the text and the head alone, against what was counted."""
        run = self.run
        right = sum(self._accepted(n, made) for n, made in enumerate(run.rounds))
        drafted = sum(len(made.drafts) for made in run.rounds)
        if (run.accepted, run.drafted) != (right, drafted):
            self.faults.append(
                f"it counts {run.accepted} of {run.drafted} drafts as accepted; by the text and the head alone "
                f"{right} of {drafted} are"
            )

    def _accepted(self, n: int, made: Round) -> int:
        """How many drafts of a round are the text's next tokens."""
        following = self.run.text[made.position + 1 : made.position + 2 + made.accepted]
        drafts = [int(self.alone[n, i].argmax()) for i in range(len(made.drafts))]
        return next(
            (i for i, pair in enumerate(zip(drafts, following, strict=False)) if pair[0] != pair[1]), len(drafts)
        )

    def _note(self, error: float) -> None:
        self.judged, self.worst = self.judged + 1, max(self.worst, error)

    def _look_for_tie(self, says: str, row: Array, right: Array) -> None:
        """Logits that are right, and of which another one is the largest."""
        own, best = int(row.argmax()), int(right.argmax())
        if own != best:
            self.ties.append(f"{says}; alone it would be {best}: their logits are equal within rounding")


def _asked(question: dict[str, Any]) -> Asked:
    """The answer to a question about what is right. Raises UserError where llama.cpp refuses it."""
    rows = yield question
    if not len(rows):
        raise UserError("llama.cpp runs drafts, and refuses to run the same tokens alone, so nothing is known of them")
    return rows


def _looked_again(
    row: Array, sides: Sequence[Array], ones: Array, error: float, limit: float
) -> tuple[float, float]:  # fmt: skip
    """The same in view of what is right once more, where what hangs on rounding, such as an expert's choice, may be
    another.
    """
    spread = max(float(rows_apart(side, ones)[0]) for side in sides)
    return min(error, float(rows_apart(row, ones)[0])), max(limit, 10 * spread)


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
        yield (
            f"of the drafts behind position {made.position} {made.accepted} are accepted, and the trunk goes on with "
            f"{right}"
        )
    end = made.position + made.accepted
    wanted_ends, names = (made.position - 1, end, end), ("the head's", "the trunk's", "the head's")
    for name, found, wanted in zip(names, made.ends, wanted_ends, strict=True):
        if found != wanted:
            why = "drafts are not taken out" if found > wanted else "tokens are lost"
            yield f"{name} cache ends at position {found}, where {wanted} is right: {why}"


def _of_chosen(made: Round) -> Iterator[str]:
    """A token that the trunk is said to go on with, and does not: of those that count."""
    continued: Sequence[int] = made.chosen[: made.accepted + 1]
    for i, (token, logits) in enumerate(zip(continued, made.verified, strict=False)):
        if token != int(logits.argmax()):
            yield (
                f"the text goes on with {token} at position {made.position + i + 1}, and the trunk's logits say "
                f"{int(logits.argmax())}"
            )
