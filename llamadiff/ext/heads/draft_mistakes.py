"""Mistakes of speculative decoding, each as what a head is then given: its logits show which one was made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from llamadiff.ext.heads.speculation import Round, Row, Speculation

AT_ONCE = 512  # tokens of a prompt that are run together (drafting.py)
ROUNDED = {"i8": "8 bits", "bf16": "bfloat16", "f16": "float16"}
CHAIN = "text"  # the name under which hidden states of drafts alone are kept: text/2/0


@dataclass(frozen=True)
class Mistake:
    """What a head is given, and what to say of that; ``part``: the head that is run, if it is another."""

    says: str
    rows: Sequence[Row]
    part: int | None = None


@dataclass(frozen=True)
class Behind:
    """A draft of a run: number ``i`` of round ``n``."""

    run: Speculation
    n: int
    i: int

    @property
    def now(self) -> Round:
        return self.run.rounds[self.n]

    @property
    def before(self) -> tuple[Round, ...]:
        """The rounds before."""
        return self.run.rounds[: self.n]

    @property
    def branches(self) -> tuple[Round, ...]:
        """Rounds whose refused drafts the trunk has run: hidden states of these are asked for."""
        return tuple(made for made in self.before if made.accepted < len(made.drafts))

    def branch(self, made: Round) -> str:
        """The name under which the trunk's hidden states of a round's text and drafts are kept."""
        return f"branch/{made.position}"


def right_rows(run: Speculation, n: int, i: int, text: str = CHAIN) -> list[Row]:
    """What a head is given for a draft: every token of the text, with the trunk's hidden state of the token before (the
    first one with zeros); then the drafts before it, each with the head's own of the row before.
    """
    made, tokens = run.rounds[n], run.text
    rows = [Row(tokens[0], 0), *(Row(tokens[k], k, text, k - 1) for k in range(1, made.position + 1))]
    return rows + [Row(made.drafts[t], made.position + t + 1, f"{text}/{n}/{t}") for t in range(i)]


def mistakes(behind: Behind) -> Iterator[Mistake]:
    """What may have been done in the place of what is right, the likely ones first."""
    rows = right_rows(behind.run, behind.n, behind.i)
    yield from _stale(behind, rows)
    yield from _hidden(behind, rows)
    yield from _chained(behind, rows)
    yield from _placed(behind, rows)
    yield from _tokens(behind, rows)
    yield from _lost(behind, rows)
    yield from _all_rows(rows)


def _with(rows: Sequence[Row], kept: Sequence[Row]) -> list[Row]:
    """Rows, and before those at the same positions what stayed in the cache."""
    return sorted([*kept, *rows], key=lambda row: row.position)


def _stale(behind: Behind, rows: Sequence[Row]) -> Iterator[Mistake]:
    """Keys that stay in the head's cache: of drafts that were refused; of all that was drafted."""
    last = rows[-1].position
    for made in reversed(behind.branches):
        if kept := _seen(_refused(behind, made), last):
            for some in (kept, kept[:1], kept[-1:]):
                yield Mistake(f"sees {_keys(some)} refused in an earlier round", _with(rows, some))
        made_anew = list(rows)
        made_anew[made.position] = replace(rows[made.position], name=behind.branch(made), number=_last(made))
        yield Mistake(
            f"sees the key at position {made.position} as it is made with the hidden state of the last draft that was "
            "refused: what was before is not put back",
            made_anew,
        )
    if behind.n:
        yield Mistake(
            "sees keys of the round before twice: as they were when it drafted, and as they are since then",
            _with(rows, _seen(_drafted(behind, behind.n - 1), last)),
        )


def _seen(kept: Sequence[Row], last: int) -> list[Row]:
    return [row for row in kept if row.position <= last]


def _keys(kept: Sequence[Row]) -> str:
    each = ", ".join(f"{row.token} at position {row.position}" for row in kept)
    return f"the key of draft {each}," if len(kept) == 1 else f"the keys of drafts {each},"


def _last(made: Round) -> int:
    """The number of the last draft's row, of those that the trunk ran in a round."""
    return made.position + len(made.drafts)


def _refused(behind: Behind, made: Round) -> list[Row]:
    """What the head was given of refused drafts when they were verified."""
    name = behind.branch(made)
    places = range(made.accepted, len(made.drafts))
    return [Row(made.drafts[t], made.position + t + 1, name, made.position + t) for t in places]


def _drafted(behind: Behind, n: int) -> list[Row]:
    """What the head was given when a round drafted."""
    made = behind.run.rounds[n]
    return right_rows(behind.run, n, len(made.drafts) - 1)[made.position :]


def _hidden(behind: Behind, rows: Sequence[Row]) -> Iterator[Mistake]:
    """The last token goes in with another hidden state."""
    place = behind.now.position
    last = rows[place]

    def rows_with(name: str, number: int = 0) -> list[Row]:
        return [*rows[:place], replace(last, name=name, number=number), *rows[place + 1 :]]

    if behind.before:
        made = behind.before[-1]
        if made in behind.branches:
            yield Mistake(
                "goes out from the hidden state of the last draft that was refused, not of the last token that stays",
                rows_with(behind.branch(made), _last(made)),
            )
        if made.accepted:
            yield Mistake(
                "goes out from the hidden state of the first token of the verified batch, not of the last that stays",
                rows_with(CHAIN, made.position),
            )
        own = min(made.accepted, len(made.drafts) - 1)
        yield Mistake(
            "goes out from the head's own hidden state, not from the trunk's",
            rows_with(f"{CHAIN}/{behind.n - 1}/{own}"),
        )
    if place > 1:
        yield Mistake("goes out from the hidden state of the token two before", rows_with(CHAIN, place - 2))
    yield Mistake("goes out from the hidden state of the token itself", rows_with(CHAIN, place))
    yield Mistake("goes out from a hidden state of zeros", rows_with(""))


def _chained(behind: Behind, rows: Sequence[Row]) -> Iterator[Mistake]:
    """Drafts behind the first one go in with another hidden state; accepted ones stayed as they were drafted."""
    place = behind.now.position
    first, drafts = rows[place], rows[place + 1 :]
    if drafts:
        for says, name, number in (
            ("the trunk's hidden state of the token before all drafts again", first.name, first.number),
            ("the hidden state of the first draft again", drafts[0].name, 0),
            ("a hidden state of zeros", "", 0),
        ):
            changed = [replace(row, name=name, number=number) for row in drafts]
            yield Mistake(
                f"is made with {says}, not with the head's own of the row before", [*rows[: place + 1], *changed]
            )
    kept = list(rows)
    for n, made in enumerate(behind.before):
        for t in range(made.accepted):
            if t < len(made.drafts) - 1:
                kept[made.position + t + 1] = right_rows(behind.run, n, t + 1)[-1]
    if kept != list(rows):
        yield Mistake(
            "sees keys of accepted drafts as they were drafted: with the head's own hidden states, not the trunk's",
            kept,
        )


def _placed(behind: Behind, rows: Sequence[Row]) -> Iterator[Mistake]:
    """Drafts are at other positions."""
    place = behind.now.position
    text, drafts = rows[: place + 1], rows[place + 1 :]
    if drafts:
        yield Mistake(
            f"is at position {place}, as the first one is: positions do not go on from draft to draft",
            [*text, *(replace(row, position=place) for row in drafts)],
        )
    for by in (-1, 1):
        moved = [replace(row, position=row.position + by) for row in rows[place:]]
        yield Mistake(
            f"is at position {rows[-1].position + by}, where {rows[-1].position} is right", [*rows[:place], *moved]
        )


def _tokens(behind: Behind, rows: Sequence[Row]) -> Iterator[Mistake]:
    """Another token's embedding."""
    if len(rows) > 1:
        before = [replace(row, token=rows[max(0, at - 1)].token) for at, row in enumerate(rows)]
        yield Mistake("is made with the embedding of the token before", [*rows[:-1], before[-1]])


def _lost(behind: Behind, rows: Sequence[Row]) -> Iterator[Mistake]:
    """Keys that are not there, or another head that is run."""
    yield Mistake("sees no key of the text before the last token", rows[behind.now.position :])
    for part in range(behind.run.heads):
        if part != min(behind.i, behind.run.heads - 1):
            yield Mistake(f"is made by head {part + 1} of {behind.run.heads}, and is another's", rows, part)


def _all_rows(rows: Sequence[Row]) -> Iterator[Mistake]:
    """Every token's hidden state is rounded, or that of the first token of each part of a prompt is none."""
    for kind, called in ROUNDED.items():
        changed = [replace(row, name=f"{row.name}@{kind}") if row.name == CHAIN else row for row in rows]
        yield Mistake(f"is made with the trunk's hidden states rounded to {called}", changed)
    if len(rows) > AT_ONCE:
        changed = [replace(row, name="", number=0) if at % AT_ONCE == 0 else row for at, row in enumerate(rows)]
        yield Mistake(f"is made as if each {AT_ONCE} tokens began anew: the first of them has no hidden state", changed)
