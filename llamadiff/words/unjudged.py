"""What was not judged, in words: parts that do not reach the logits, names of no tap, NaN and Inf. Computes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from llamadiff.judge.finding import Local
from llamadiff.judge.measurement import UNKNOWN_SUMS
from llamadiff.judge.verdict import UNCHECKED, is_right
from llamadiff.result.coverage import Coverage
from llamadiff.result.message import Message
from llamadiff.result.oddity import Oddity
from llamadiff.result.rows import Row
from llamadiff.trace.taps import LOGITS

FEW = 4
ATTENTION = ("kq", "kqv")  # how taps begin that are computed from a cache


def ignored_lines(coverage: Coverage, n_rows: int, by_value: bool) -> Iterator[str]:
    """How many tensors stand for nothing, the first of them, and what they may be meant as; ``by_value``: whatever they
    are called, no tap is told by their values.
    """
    count, first = coverage.ignored.count, coverage.ignored.first
    if not count:
        return
    named = ", ".join(name if near is None else f"{name} ({near}?)" for name, near in first)
    more = f" and {count - len(first)} more" if count > len(first) else ""
    verb, whose = ("was", "that name") if count == 1 else ("were", "their names")
    why = "their values are those of no tap, or of several" if by_value else f"no tap has {whose}"
    yield f"{count} of its {count + n_rows} tensors {verb} ignored, {why}: {named}{more}"


def name_unjudged(rows: Sequence[Row], coverage: Coverage) -> str:
    """That a run was not judged to its end."""
    end = f"the logits ({coverage.end})" if coverage.end == LOGITS else coverage.end
    if any(row.tap == coverage.end for row in rows):
        return f"of {end} the last token's row is missing"
    return f"{end} {'are' if coverage.end == LOGITS else 'is'} not among them"


def steps_when_lacking(coverage: Coverage) -> tuple[str, ...]:
    """What to write, where less was judged than is needed."""
    steps: tuple[str, ...] = ()
    if coverage.ignored.count and (not coverage.is_enough or any(near for _, near in coverage.ignored.first)):
        listed = "rename the tensors that were ignored (llamadiff taps MODEL lists the names)"
        steps += (f"{listed}, or give a --map: auto finds one",)
    if not coverage.is_enough:
        end = coverage.end
        steps += (
            f"write {end} too, or the last token's row of it ({end}@-1): every op before it counts there",
            "or give --partial, if this part is all that you want to have judged",
        )
    return steps


def has_open_places(row: Row) -> bool:
    """Whether NaN or Inf among what a tap is computed from leave it unjudged, in part at least."""
    return row.verdict == UNCHECKED and row.local is not None and row.local.opened > 0


def where_not_finite(local: Local) -> str:
    """The first value of a wrong tap that is not finite, and how many more there are."""
    place = ", ".join(map(str, local.index))
    more = f", and {local.not_finite - 1} more such values" if local.not_finite > 1 else ""
    return f"{_value(local.recorded)} at [{place}], where {local.expected:.3g} is right{more}"


def other_origins(wrong: Sequence[Row]) -> Iterator[str]:
    """The first of several wrong taps that also turns to NaN or Inf."""
    found = [row for row in wrong if row.local is not None and row.local.not_finite]
    if found and found[0].local:
        yield f"{found[0].tap} has {where_not_finite(found[0].local)}"


def open_rest(rows: Sequence[Row]) -> Iterator[str]:
    """The taps that could not be judged, after a wrong one."""
    taps = [row.tap for row in rows if has_open_places(row)]
    if len(taps) == 1:
        yield f"{taps[0]} is computed from NaN or Inf and could not be judged"
    elif taps:
        yield f"{len(taps)} taps, from {taps[0]} on, are computed from NaN or Inf and could not be judged"


def unjudgeable(whose: str, baseline: str, rows: Sequence[Row], origin: Oddity | None) -> Message:
    """That no finite values are right somewhere, though nothing is wrong: whence they are, and what is left open."""
    first, *after = [row for row in rows if has_open_places(row)]
    assert first.local is not None
    others = f", nor can {_count_taps(len(after))} after it" if after else ""
    right = sum(is_right(row.verdict) for row in rows)
    both = whose != baseline and first.baseline is not None and (first.baseline.nan or first.baseline.inf)
    said = Message(
        f"{first.tap} cannot be judged{_in_tokens(first.local)}{others}: even the right op gives NaN or Inf there",
        (f"this is on the inputs that {whose} recorded",),
    )
    said = said if origin is None else said.with_headline(f"{origin.where}: {origin.says}")
    if right:
        said = said.plus(f"the other {right} taps are right" if right > 1 else "the other tap is right")
    return said.plus(f"{baseline}'s own run has NaN or Inf there too") if both else said


def step_when_unjudgeable(rows: Sequence[Row], origin: Oddity | None) -> tuple[str, ...]:
    """Where to look for the first NaN or Inf."""
    if origin is not None:
        return (f"mend {origin.where} in the file: llamadiff weights FILE lists what is wrong with it",)
    first = next((row for row in rows if has_open_places(row)), None)
    if first is None or first.local is None:
        return ()
    return (
        f"look at what {first.tap} is computed from{_in_tokens(first.local)}: values there overflow float32, or are "
        "NaN in the file itself; on another prompt they may not",
    )


def unclear(whose: str, rows: Sequence[Row]) -> Message:
    """That a span is off by as much as a rounding that cannot be seen may leave."""
    first = rows[0]
    assert first.local is not None
    if not first.span:
        in_half = any(reason.evidence == UNKNOWN_SUMS for reason in first.local.reasons)
        does = "adds float16's numbers" if in_half else "rounds to eight bits"
        return Message(
            f"{first.tap} cannot be judged: how {whose} {does} is not known",
            (f"its ggml gave no answer that is known, and {first.tap} is off by an NMSE of {first.local.nmse:.1e}",),
        )
    where = f"{first.span[0]} to {first.span[-1]}"
    attends = any(name.startswith(ATTENTION) for name in (*first.span, first.tap))
    may = "rounding to 8 or 16 bits, or a cache of 4 bits," if attends else "rounding to 8 or 16 bits"
    return Message(
        f"{first.tap} cannot be judged: what was not recorded before it is off, as much as rounding may leave",
        (
            f"{where} were not recorded, and {first.tap} is off by an NMSE of {first.local.nmse:.1e}",
            f"{may} may leave as much, and nothing shows that {whose} rounds so much",
        ),
    )


def _in_tokens(local: Local) -> str:
    """Which rows are concerned, if not all are."""
    tokens, count = local.open_tokens, len(local.per_token)
    if len(tokens) == count:
        return ""
    if len(tokens) <= FEW:
        return f" in token{'s' if len(tokens) > 1 else ''} {', '.join(map(str, tokens))}"
    return f" in {len(tokens)} of {count} tokens, from {tokens[0]} on"


def _count_taps(count: int) -> str:
    return f"{count} tap{'s' if count > 1 else ''}"


def _value(value: float) -> str:
    return "NaN" if math.isnan(value) else "Inf" if value > 0 else "-Inf"
