"""Random schedules: what is done to a context, whatever positions that comes to; and what each sequence is alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby, pairwise
from random import Random

from llamadiff.ext.state.history import END, REMOVED, ROW, SHIFTED, Event, History, Kept, Row
from llamadiff.llamacpp.steps import CLEAR, COPY, DECODE, GET, IN_F16, IN_F32, LOAD, NEW, REMOVE, SAVE, SET, SHIFT, Step

ALL = (0, END)
FEED, BACK, CUT, OVER, FORK, MOVE, KEEP, BRING, WIPE = (
    "feed", "take back", "cut", "end", "fork", "move", "keep", "bring", "wipe"
)  # fmt: skip
SEQUENCES, STATES = 4, 2
LONGEST, MOST = 96, 12  # positions of a sequence; tokens of a batch
UBATCHES = (0, 8, 5)
FURTHER = (1, 3, 7, 13, 29, 47)
PROBE, PROBE_BATCHES = 48, (48, 1, 2, 3, 5, 12)  # tokens, and how many of them at a time
# how often each is done; what a memory cannot do is left out
_OFTEN: Mapping[str, int] = {FEED: 60, BACK: 8, CUT: 4, OVER: 5, FORK: 7, MOVE: 4, KEEP: 5, BRING: 6, WIPE: 1}


@dataclass(frozen=True)
class Abilities:
    """What a model's memory is. ``states``: it has recurrent states, of which no part can be taken back; ``window``:
    how far some layers reach back (0: all do to the beginning); ``shifts``: rows can move; ``turns``: positions are
    RoPE's.
    """

    states: bool = False
    window: int = 0
    shifts: bool = True
    turns: bool = True


@dataclass(frozen=True)
class Deed:
    """One thing that is done to a ``sequence``: with an ``other`` one, or a state; ``count`` tokens of it, or where.

    ``tokens`` of sequences are fed together. ``by_file``: a state goes through a file.
    """

    what: str
    sequence: int = 0
    other: int = 0
    count: int = 0
    tokens: tuple[tuple[int, int], ...] = ()
    by_file: bool = False


@dataclass(frozen=True)
class Schedule:
    """Deeds, in a context with so many ``cells`` that runs so many tokens at a time (``ubatch``; 0: all of a batch)."""

    deeds: tuple[Deed, ...]
    abilities: Abilities
    cells: int
    ubatch: int = 0

    def realized(self) -> tuple[tuple[Step, ...], History]:
        """Its steps, without what a context as it is then cannot do, and what they come to."""
        made = _Realized(self)
        for deed in self.deeds:
            made.do(deed)
        return (Step(NEW, (self.cells, SEQUENCES, self.ubatch)), *made.steps), made.history

    def without(self, start: int, stop: int) -> Schedule:
        """All but some of its deeds."""
        return replace(self, deeds=self.deeds[:start] + self.deeds[stop:])

    def smaller(self) -> Iterator[Schedule]:
        """With two batches made one, with one token less, or in one go."""
        if self.ubatch:
            yield replace(self, ubatch=0)
        for place, (deed, after) in enumerate(pairwise(self.deeds)):
            if deed.what == after.what == FEED and len(deed.tokens) + len(after.tokens) <= MOST:
                both = replace(deed, tokens=(*deed.tokens, *after.tokens))
                yield replace(self, deeds=(*self.deeds[:place], both, *self.deeds[place + 2 :]))
        for place, deed in enumerate(self.deeds):
            for number in range(len(deed.tokens)):
                fewer = replace(deed, tokens=deed.tokens[:number] + deed.tokens[number + 1 :])
                yield replace(self, deeds=(*self.deeds[:place], fewer, *self.deeds[place + 1 :]))


def at_random(number: int, seed: int, vocabulary: int, abilities: Abilities, cells: int = 512) -> Schedule:
    """So many steps, from a seed."""
    random = Random(seed)  # noqa: S311
    deeds = list[Deed]()
    schedule = Schedule((), abilities, cells, random.choice(UBATCHES))
    made = _Realized(schedule)
    while len(made.steps) < number:
        [what] = random.choices([*_OFTEN], [*_OFTEN.values()])
        deed = _made_up(what, random, vocabulary)
        if made.do(deed):
            deeds.append(deed)
    return replace(schedule, deeds=tuple(deeds))


def _made_up(what: str, random: Random, vocabulary: int) -> Deed:
    one, other = random.sample(range(SEQUENCES), 2)
    if what == FEED:
        size = random.choice((1, 1, 1, 2, 3, 5, MOST))
        some = random.sample(range(SEQUENCES), random.randint(1, SEQUENCES))
        chosen = [random.choice(some) for _ in range(size)]
        return Deed(FEED, tokens=tuple((each, _token_of(each, random, vocabulary)) for each in chosen))
    state = random.randrange(STATES)
    return Deed(what, one, state if what in (KEEP, BRING) else other, random.randint(1, 6), (), random.random() < 0.3)


def _token_of(sequence: int, random: Random, vocabulary: int) -> int:
    """A token that no other sequence has: so it is told which ones llama.cpp runs together."""
    return random.randrange(max(1, vocabulary // SEQUENCES)) * SEQUENCES % vocabulary + sequence % vocabulary


class _Realized:
    """Steps that deeds come to, one after the other."""

    def __init__(self, schedule: Schedule) -> None:
        self.can, self.cells, self.ubatch = schedule.abilities, schedule.cells, schedule.ubatch
        self.history, self.steps = History(), list[Step]()
        self.kept: dict[int, tuple[bool, Kept]] = {}  # state -> whether it is in a file, and what it is
        self.sure: dict[int, int] = {}  # sequence -> the end behind which nothing that is hidden was written over
        self._does: Mapping[str, Callable[[Deed], bool]] = {
            FEED: self._feed, BACK: self._back, CUT: self._cut, OVER: self._over, FORK: self._fork, MOVE: self._move,
            KEEP: self._keep, BRING: self._bring, WIPE: self._wipe,
        }  # fmt: skip

    def do(self, deed: Deed) -> bool:
        """Whether it could be done."""
        return self._does[deed.what](deed)

    def _length(self, sequence: int) -> int:
        return self.history.end(sequence)

    def _held(self) -> int:
        """How many cells are taken, at most."""
        return sum(len(self.history.of(sequence).rows) for sequence in range(SEQUENCES))

    def _say(self, call: str, *of: int) -> bool:
        self.steps.append(Step(call, of))
        return True

    def _feed(self, deed: Deed) -> bool:
        ends = {sequence: self._length(sequence) for sequence in range(SEQUENCES)}
        held = self._held()
        given: list[tuple[int, int, int]] = []
        for sequence, token in deed.tokens:
            if ends[sequence] < LONGEST and held + len(given) < self.cells - MOST:
                given.append((token, ends[sequence], sequence))
                ends[sequence] += 1
        if not given:
            return False
        tokens, positions, sequences = zip(*given, strict=True)
        whole = not self.ubatch or len(given) <= self.ubatch
        self.sure = {sequence: self._length(sequence) if whole else LONGEST for sequence in range(SEQUENCES)}
        self.history.decode(tokens, positions, sequences)
        self.steps.append(Step(DECODE, (), tokens, positions, sequences))
        return True

    def _back(self, deed: Deed) -> bool:
        """The last tokens are taken back, as of a draft; where a window was written over, those of the last batch."""
        end = self._length(deed.sequence) - deed.count
        if end <= 0 or self.can.states or (self.can.window and end < self.sure.get(deed.sequence, 0)):
            return False
        self.history.remove(deed.sequence, end, END)
        return self._say(REMOVE, deed.sequence, end, END)

    def _cut(self, deed: Deed) -> bool:
        """What lies after the first token is removed, and the rest goes on."""
        stop = 1 + deed.count
        if self.can.states or self._length(deed.sequence) <= stop + 1:
            return False
        self.history.remove(deed.sequence, 1, stop)
        return self._say(REMOVE, deed.sequence, 1, stop)

    def _move(self, deed: Deed) -> bool:
        """All rows move on, or back as far as they can; no other sequence has any of them."""
        held = self.history.of(deed.sequence).rows
        others = {row for sequence in range(SEQUENCES) if sequence != deed.sequence
                  for row in self.history.of(sequence).rows}  # fmt: skip
        by = -min(held.values(), default=0) or deed.count
        if not (self.can.shifts and held) or not others.isdisjoint(held) or self._length(deed.sequence) + by > LONGEST:
            return False
        self.history.shift(deed.sequence, *ALL, by)
        self.sure[deed.sequence] = LONGEST
        return self._say(SHIFT, deed.sequence, *ALL, by)

    def _over(self, deed: Deed) -> bool:
        if not self._length(deed.sequence):
            return False
        self.history.remove(deed.sequence, *ALL)
        return self._say(REMOVE, deed.sequence, *ALL)

    def _fork(self, deed: Deed) -> bool:
        if not self._length(deed.sequence):
            return False
        self._over(replace(deed, sequence=deed.other))
        self.history.copy(deed.sequence, deed.other, *ALL)
        self.sure[deed.other] = self.sure.get(deed.sequence, LONGEST)
        return self._say(COPY, deed.sequence, deed.other, *ALL)

    def _keep(self, deed: Deed) -> bool:
        if not self._length(deed.sequence):
            return False
        self.kept[deed.other] = deed.by_file, self.history.of(deed.sequence)
        return self._say(SAVE if deed.by_file else GET, deed.sequence, deed.other)

    def _bring(self, deed: Deed) -> bool:
        if deed.other not in self.kept:
            return False
        by_file, kept = self.kept[deed.other]
        if len(kept.rows) + self._held() > self.cells - MOST:
            return False
        self.history.restore(kept, deed.sequence)
        self.sure[deed.sequence] = LONGEST
        return self._say(LOAD if by_file else SET, deed.sequence, deed.other)

    def _wipe(self, deed: Deed) -> bool:
        if not self.steps:
            return False
        self.history.clear()
        return self._say(CLEAR)


# -- what is right: each sequence alone --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alone:
    """A sequence's life in a context of its own: its steps, and the row of the history that each token is."""

    steps: tuple[Step, ...]
    rows: tuple[int, ...]


def alone(history: History, one_by_one: bool = False) -> list[Alone]:
    """The lives that all others begin as; ``one_by_one``: each token is a batch."""
    lives = sorted({row.life for row in history.rows})
    last = {life[:length] for life in lives for length in range(len(life))}
    return [_alone(history.rows, life, one_by_one) for life in lives if life not in last]


def in_company(history: History, steps: Sequence[Step], row: int) -> Alone:
    """A token's life in the same batches, where strangers stand in for all others: kernels go by the size of a batch,
    and by the places in it.
    """
    events = {numbers[0]: number for number, (what, numbers) in enumerate(history.rows[row].life) if what == ROW}
    life, done, first = history.rows[row].life, 0, 0
    out, numbers = [Step(NEW, (steps[0].of[0], 2, steps[0].of[2]))], list[int]()
    for step in (step for step in steps if step.call == DECODE):
        mine = {number - first: number for number in range(first, first + len(step.tokens)) if number in events}
        first += len(step.tokens)
        if not mine:
            continue
        upto = events[max(mine.values())] + 1
        out += [Step({REMOVED: REMOVE, SHIFTED: SHIFT}[what], (0, *of)) for what, of in life[done:upto] if what != ROW]
        done, stranger = upto, count()
        numbers += [*mine.values()]
        places = tuple(step.positions[place] if place in mine else next(stranger) for place in range(len(step.tokens)))
        out.append(Step(DECODE, (), step.tokens, places, tuple(int(place not in mine) for place in range(len(places)))))
        out.append(Step(REMOVE, (1, *ALL)))
    return Alone(tuple(out), tuple(numbers))


def rounded_otherwise(history: History, row: int, turns: bool) -> list[Alone]:
    """A token's life alone where each rounds otherwise: with other caches, and, where positions are RoPE's, of which
    the distances alone count (``turns``), further on.
    """
    life = _alone(history.rows, history.rows[row].life, one_by_one=False)
    caches = [_beginning(life, (*life.steps[0].of[:3], cache)) for cache in (IN_F32, IN_F16)]
    return [*caches, *(_further(life, by) for by in FURTHER if turns)]


def _beginning(life: Alone, of: tuple[int, ...]) -> Alone:
    return replace(life, steps=(replace(life.steps[0], of=of), *life.steps[1:]))


def _further(life: Alone, by: int) -> Alone:
    """All at later positions."""
    steps = [life.steps[0]]
    for step in life.steps[1:]:
        sequence, *of = step.of or (0,)
        moved = (*(place + by if place > 0 else place for place in of[:2]), *of[2:])
        places = tuple(place + by for place in step.positions)
        steps.append(replace(step, of=(sequence, *moved) if step.of else (), positions=places))
    return replace(life, steps=tuple(steps))


def probes(vocabulary: int) -> list[tuple[Alone, Alone]]:
    """The same tokens, twice in each: in batches of two sizes, and with caches that round otherwise. How far those are
    apart is what rounding alone may do to logits.
    """
    random = Random(0)  # noqa: S311
    tokens = [random.randrange(vocabulary) for _ in range(PROBE)]
    whole, *others = (_probe(tokens, size) for size in PROBE_BATCHES)
    return [*((other, whole) for other in others), (_probe(tokens, PROBE, IN_F16), _probe(tokens, PROBE, IN_F32))]


def _probe(tokens: Sequence[int], size: int, cache: int = 0) -> Alone:
    steps = [Step(NEW, (256, 1, 0, cache))]
    for start in range(0, len(tokens), size):
        some = tuple(tokens[start : start + size])
        steps.append(Step(DECODE, (), some, tuple(range(start, start + len(some))), (0,) * len(some)))
    return Alone(tuple(steps), tuple(range(len(tokens))))


def _alone(rows: Sequence[Row], life: Sequence[Event], one_by_one: bool) -> Alone:
    steps, numbers, turn = list[Step](), list[int](), count()
    for what, events in groupby(life, key=lambda event: (event[0], next(turn) if one_by_one else 0)):
        some = [of for _, of in events]
        if what[0] == ROW:
            mine = [rows[number] for (number,) in some]
            numbers += [row.number for row in mine]
            tokens, places = tuple(row.token for row in mine), tuple(row.position for row in mine)
            steps.append(Step(DECODE, (), tokens, places, (0,) * len(mine)))
        else:
            call = {REMOVED: REMOVE, SHIFTED: SHIFT}[what[0]]
            steps += [Step(call, (0, *of)) for of in some]
    cells = -(-max(1, len(numbers)) // 256) * 256
    return Alone((Step(NEW, (cells, 1, 0)), *steps), tuple(numbers))
