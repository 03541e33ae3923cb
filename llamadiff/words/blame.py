"""WRONG taps in words: which op, what it does instead, what proves it, and what else is wrong. Computes nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from llamadiff.judge.fact import ANSWERS, Fact
from llamadiff.judge.verdict import NOISE, WRONG, is_right
from llamadiff.result.diagnosis import Diagnosis
from llamadiff.result.message import Message
from llamadiff.result.rows import Row, is_slight, leading_row, stem
from llamadiff.trace.taps import layer_of
from llamadiff.words import diagnosis_text as say
from llamadiff.words import unjudged

_OPS = {
    "GET_ROWS": "row lookup", "RMS_NORM": "RMSNorm", "NORM": "LayerNorm", "MUL_MAT": "matrix product",
    "MUL_MAT_ID": "expert product", "ROPE": "RoPE", "SOFT_MAX": "softmax", "ADD": "addition", "SWIGLU": "SwiGLU",
    "ARGSORT": "top-k", "DIV": "division", "SET_ROWS": "cache",
}  # fmt: skip
_TAPS = {"kq": "attention scores", "kqv_out": "weighted sum of values"}
_FEW = 3  # wrong records, and other causes, that are told one by one
_FEW_TAPS = 4
# what another tap shows of what is told of the first
ALIKE, OTHER_VALUES, UNLIKE, UNREAD = "alike", "with other values", "unlike", "unread"


def blame(rows: Sequence[Row], diagnosis: Sequence[Diagnosis], whose: str, subject: str, gaps: bool) -> Message:
    """What is wrong, the leading tap first. ``whose`` trace it is; ``subject`` begins the headline, if it is not yours.

    ``gaps``: not every tap was recorded.
    """
    wrong = [row for row in rows if row.verdict == WRONG]
    first = leading_row(wrong, diagnosis)
    assert first is not None
    records = [row for row in wrong if row.misrecorded]
    others = [row for row in wrong if row is not first and row not in records]
    slight = [row for row in others if is_slight(row, diagnosis)]
    if first.misrecorded:
        return _recorded_wrongly(records, rows, whose).plus(*_slight(slight), *_the_rest(rows, gaps))
    ends = [*_slight(slight), *unjudged.other_origins(others), *unjudged.open_rest(rows), *_the_rest(rows, gaps)]
    if records:
        record = _recorded_wrongly(records, rows, whose)
        ends = [record.headline, *record.clauses, *ends]
    diagnosis = [d for d in diagnosis if not {row.tap for row in slight} >= set(d.taps)]
    dark = [row for row in wrong if row.local and not any(row.tap in d.taps for d in diagnosis if d.known)]
    dark = [row for row in dark if row is first or not (row.misrecorded or is_slight(row, diagnosis))]
    bugs, or_more = _bugs(dark, diagnosis, rows), " or more" if len({row.op for row in dark}) > 1 else ""
    if len(bugs) == 1:
        return Message(subject + bugs[0].headline, bugs[0].clauses).plus(*ends)
    said = [bug.headline for bug in bugs[:_FEW]] + ([f"{len(bugs) - _FEW} more"] if bugs[_FEW:] else [])
    proofs = [f"({number}) {'; '.join(bug.clauses)}" for number, bug in enumerate(bugs, 1)]
    return Message(f"{len(bugs)} bugs{or_more}: {subject}{'; '.join(said)}", (*proofs, *ends))


def _bugs(dark: Sequence[Row], diagnosis: Sequence[Diagnosis], rows: Sequence[Row]) -> list[Message]:
    """What is wrong, a message a bug, the largest own error first; the ``dark`` rows, which none explains, are one."""
    by_name: dict[str, list[Diagnosis]] = {}
    for d in diagnosis:
        if d.known:
            by_name.setdefault(say.names(d.causes), []).append(d)
    found = []
    for d, *more in by_name.values():
        said = Message(headline(d, rows), tuple(proof(d, rows)))
        also = (f"{other.tap} likewise: it {say.clause(other)}" for other in more)
        found.append((max(each for one in (d, *more) for each in one.right.values()), said.plus(*also)))
    if dark:
        found.append((max(row.local.nmse for row in dark if row.local), _unlisted_message(dark, diagnosis, rows)))
    return [said for _, said in sorted(found, key=lambda bug: -bug[0] if bug[0] == bug[0] else -math.inf)]


def _unlisted_message(dark: Sequence[Row], diagnosis: Sequence[Diagnosis], rows: Sequence[Row]) -> Message:
    """What is wrong that no known bug is: what its values tell, and of which layers and other ops that is true."""
    first = leading_row(dark, diagnosis)
    assert first is not None
    same = [row for row in dark if row is first or (row.layer is not None and stem(row.tap) == stem(first.tap))]
    if first.span:  # of a span, another layer's may tell more
        first = next((row for row in same if any(_facts_of(row, _why(row, diagnosis)))), first)
    why = _why(first, diagnosis)
    told = next(_facts_of(first, why), None)
    found = [(row, _likeness(told, row, _why(row, diagnosis))) for row in (*same, *(r for r in dark if r not in same))]
    varies = any(how == OTHER_VALUES for row, how in found if row in same)
    alike = [row for row, how in found if row in same and (how == ALIKE or (how == UNREAD and not varies))]
    given = told.says if told is not None else f"wrong on the inputs {'they were' if first.span else 'it was'} given"
    said = Message(f"{place(first, sorted(_layers(alike)) or None)}: {given}", tuple(_unknown(first, why)))
    return said.plus(*_where_else(found, same, alike, told))


def _likeness(told: Fact | None, row: Row, d: Diagnosis | None) -> str:
    """Whether what is told of the first tap is read in another one: in the same words, or with other numbers."""
    if told is None or not _is_read(row, d):
        return UNREAD
    facts = list(_facts_of(row, d))
    if any(_words(fact) == _words(told) for fact in facts):
        return ALIKE
    if any(fact.kind == told.kind for fact in facts):
        return OTHER_VALUES
    return UNREAD if row.span else UNLIKE  # one reading of a span does not rule out another


def _words(fact: Fact) -> str:
    """What a fact says, of whatever layer."""
    return re.sub(r"(?<=-)[0-9]+\b|(?<=blk\.)[0-9]+", "N", fact.says)


def _where_else(
    found: Sequence[tuple[Row, str]], same: Sequence[Row], alike: Sequence[Row], told: Fact | None
) -> Iterator[str]:
    """Where else the reading is true, and where it was not looked for, or is not. ``alike``: the headline's layers."""
    own = [(row, how) for row, how in found if row in same]
    read = [row for row, how in own if how == ALIKE]
    if told is not None and len(read) < len(alike):
        yield f"that was read in {say.layers_of(_layers(read))}"
    for hows, words in (
        ({OTHER_VALUES}, "likewise in {}, with other values"),
        ({UNLIKE, UNREAD}, "in {} it is wrong too"),
    ):
        some = [row for row, each in own if each in hows and row not in alike]
        if some:
            yield words.format(say.layers_of(_layers(some)))
    said = set[str]()
    for how, words in ((ALIKE, "likewise"), (OTHER_VALUES, "likewise, with other values")):
        ops = [stem(row.tap) for row, each in found if row not in same and each == how and stem(row.tap) not in said]
        said |= {*ops}
        if ops:
            yield f"{', '.join(dict.fromkeys(ops))} {words}"
    yield from _others([row for row, _ in found if row not in same and stem(row.tap) not in said])


def place(row: Row, layers: Sequence[int] | None = None, names_weight: bool = True, inside: str = "") -> str:
    """Which op, of which weight, in which layers: ``RoPE, layers 0-2``, ``LayerNorm by output_norm.weight``.

    ``inside``: the op that was found inside a span.
    """
    if row.span and inside not in _OPS:
        return f"{row.span[0]} to {row.tap}"
    own = "" if row.span else _TAPS.get(stem(row.tap)) or _OPS.get(row.op)
    op = own or _OPS.get(inside, row.op)
    weight = f" by {_without_layer(row)}" if row.weight and names_weight and not row.span else ""
    where = say.layers_of(_layers([row]) if layers is None else layers)
    return f"{op}{weight}{f', {where}' if where else ''}"


def _without_layer(row: Row) -> str:
    """A weight's name; its layer is said beside it."""
    return (row.weight or "").removeprefix(f"blk.{row.layer}.")


def headline(d: Diagnosis, rows: Sequence[Row]) -> str:
    """What an op does where, in a line; of alternatives that the model cannot tell apart, the likeliest."""
    row = next(row for row in rows if row.tap == d.tap)
    alike = len({stem(tap) for tap in d.taps}) == 1  # of several taps, no weight is that of all
    if d.known:
        outside = d.causes[0].at is not None and layer_of(d.causes[0].at) is None
        return f"{place(row, () if outside else d.layers or None, alike, d.causes[0].op)}: {say.likeliest(d)}"
    return f"{place(row)}: {'; '.join([*(fact.says for fact in d.read.get(d.tap, ())), say.nearest(d)])}"


def _facts_of(row: Row, d: Diagnosis | None) -> Iterator[Fact]:
    """What a wrong tap holds instead, or what its op did: read back, or seen in its values."""
    yield from (d.read.get(row.tap, ()) if d is not None else ())
    yield from (fact for fact in (row.local.facts if row.local is not None else ()) if fact.kind in ANSWERS)


def _is_read(row: Row, d: Diagnosis | None) -> bool:
    """Whether anybody asked what a tap holds: that takes long, and the first layers tell of the others."""
    return (d is not None and row.tap in d.read) or (row.local is not None and bool(row.local.facts))


def _layers(rows: Sequence[Row]) -> list[int]:
    return [row.layer for row in rows if row.layer is not None]


def proof(d: Diagnosis, rows: Sequence[Row]) -> Iterator[str]:
    """Which taps, how well the replay fits, and what else would fit as well."""
    yield say.where(d, [row.tap for row in rows])
    yield say.proof(d)
    yield from say.alternatives(d)


def _unknown(row: Row, why: Diagnosis | None) -> Iterator[str]:
    """By how much an op is wrong, and that no known bug is it."""
    assert row.local is not None
    if row.local.not_finite:
        yield f"{row.tap} has {unjudged.where_not_finite(row.local)}"
    else:
        yield f"{row.tap}: own error {row.local.nmse:.1e}, limit {row.local.limit:.0e}"
    if row.span:
        read = why is not None and any(why.read.get(row.tap, ()))
        yield "the taps between were not recorded" + (
            ": that is read back as if their other ops were right" if read else ""
        )
    elif why is not None:
        yield say.nearest(why).split(";")[0]


def _recorded_wrongly(records: Sequence[Row], rows: Sequence[Row], whose: str) -> Message:
    """That taps were written wrongly, what shows that they were computed rightly, and what they hold instead."""
    first, *others = [_record(row, rows, whose) for row in records[:_FEW]]
    more = [f"{len(records) - _FEW} more taps were recorded wrongly"] if len(records) > _FEW else []
    return first.plus(*(other.sentence for other in others), *more)


def _record(row: Row, rows: Sequence[Row], whose: str) -> Message:
    readers = [other.tap for other in rows if row.tap in other.span]
    facts = [fact.says for fact in row.local.facts[:1]] if row.local is not None else []
    named = f" ({', '.join(readers[:_FEW])})" if readers else ""
    said = Message(f"{row.tap}: {whose} recorded it wrongly and computed it rightly")
    return said.plus(f"what is computed from it{named} is right", *facts)


def _slight(rows: Sequence[Row]) -> Iterator[str]:
    """WRONG taps that are hardly off: they come after what matters."""
    if rows:
        named = ", ".join(row.tap for row in rows[:_FEW]) + (f" and {len(rows) - _FEW} more" if rows[_FEW:] else "")
        most = max(row.local.nmse for row in rows if row.local is not None)
        verb = "differs by" if len(rows) == 1 else "differ by at most"
        yield f"{named} {verb} an NMSE of {most:.1e}, for no known reason"


def _why(row: Row, diagnosis: Sequence[Diagnosis]) -> Diagnosis | None:
    return next((d for d in diagnosis if row.tap in d.taps), None)


def _others(rest: Sequence[Row]) -> Iterator[str]:
    """The rest of the WRONG taps, op by op."""
    others = list(dict.fromkeys(stem(row.tap) for row in rest))
    if others:
        more = " and others" if len(others) > _FEW_TAPS else ""
        yield f"{', '.join(others[:_FEW_TAPS])}{more} {'is' if len(others) == 1 else 'are'} wrong too"


def _the_rest(rows: Sequence[Row], gaps: bool) -> Iterator[str]:
    """What may be said of the other ops: only what was judged."""
    right = sum(is_right(row.verdict) for row in rows)
    if not right:
        return
    if not gaps and not any(unjudged.has_open_places(row) for row in rows):
        yield f"every other op is {quality(rows)}: {len(rows)} taps were judged"
    else:
        others = f"the other {right} recorded taps are" if right > 1 else "the other recorded tap is"
        yield f"{others} {quality(rows)}"


def quality(rows: Sequence[Row]) -> str:
    """How right those are that are not wrong."""
    return "right up to rounding" if any(row.verdict == NOISE for row in rows) else "right"
