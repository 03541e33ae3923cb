"""What to mend, as data: for programs that repair engines, for annotations, for a list of failures in CI."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llamadiff.result.comparison import Comparison
from llamadiff.result.diagnosis import Diagnosis
from llamadiff.result.rows import Row
from llamadiff.trace import taps
from llamadiff.words import diagnosis_text
from llamadiff.words.blame import headline

# How sure a cause is: replaying it gives the recorded values; so do several, which this model cannot tell apart; it was
# read back from the values; it comes nearest of all and does not fit; nothing is known but the place.
REPLAYED, ONE_OF, READ_BACK, NEAREST, PLACE = "replayed", "one of several", "read back", "nearest", "place only"


@dataclass(frozen=True)
class Place:
    """Where in the maths a cause is: the first wrong tap, its op of ggml, what it computes and from which taps.

    ``code`` is the file of the reference engine that computes it rightly; None where llama.cpp's graph judged.
    ``unrecorded`` taps lie before it: the cause may be at any of them.
    """

    tap: str
    layers: tuple[int, ...]
    op: str
    what: str
    weight: str | None
    inputs: tuple[str, ...]
    code: str | None
    unrecorded: tuple[str, ...]


@dataclass(frozen=True)
class Settling:
    """A command that would settle what is open, and what it would show."""

    command: tuple[str, ...]
    shows: str


@dataclass(frozen=True)
class Repair:
    """One cause: what is said of it, the known bug that it is (``ids``: all that it may be), and what to do.

    ``explain``: the command that prints the bug's page. ``settle``: None where nothing is open, or no command helps.
    """

    tap: str
    taps: tuple[str, ...]
    id: str | None
    ids: tuple[str, ...]
    confidence: str
    nmse: float | None
    says: str
    fix: str | None
    place: Place
    explain: tuple[str, ...] | None = None
    settle: Settling | None = None


def repairs_of(c: Comparison, command: Sequence[str] = ()) -> tuple[Repair, ...]:
    """One repair for each cause, in graph order; ``command``: the command line that made the comparison."""
    rows = {row.tap: row for row in c.rows}
    mistakes = [d for d in c.diagnosis if not d.harmless and d.tap in rows]
    named = {tap for d in mistakes for tap in d.taps}
    found = [_explained_repair(d, rows[d.tap], c, command) for d in mistakes]
    found += [
        _unexplained_repair(group, c, command) for group in _alike(row for row in c.wrong if row.tap not in named)
    ]
    order = list(rows)
    return tuple(sorted(found, key=lambda repair: order.index(repair.tap)))


def _alike(rows: Iterator[Row]) -> list[list[Row]]:
    """Wrong taps without a cause, those of one kind together."""
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        kinds.setdefault(row.tap.rsplit("-", 1)[0], []).append(row)
    return list(kinds.values())


def _explained_repair(d: Diagnosis, row: Row, c: Comparison, command: Sequence[str]) -> Repair:
    confidence = _confidence(d)
    causes = d.causes or d.nearest
    ids = tuple(dict.fromkeys(name for cause in causes for name in cause.name.split(" + ")))
    return Repair(
        tap=d.tap, taps=tuple(d.taps), id=ids[0] if ids else None, ids=ids, confidence=confidence,
        nmse=causes[0].nmse if causes else None, says=headline(d, c.rows),
        fix=diagnosis_text.fix(d) if d.known else None,
        place=_place(row, tuple(d.taps), c), explain=("llamadiff", "explain", ids[0]) if ids else None,
        settle=_settling_step(confidence, row, c, command),
    )  # fmt: skip


def _confidence(d: Diagnosis) -> str:
    if d.known:
        return REPLAYED if len({cause.name for cause in d.causes}) == 1 else ONE_OF
    if any(d.read.values()):
        return READ_BACK
    return NEAREST if d.nearest else PLACE


def _unexplained_repair(rows: Sequence[Row], c: Comparison, command: Sequence[str]) -> Repair:
    """Wrong taps of one kind that nothing explains."""
    first = rows[0]
    facts = [fact.says for fact in first.local.facts] if first.local is not None else []
    names = tuple(row.tap for row in rows)
    return Repair(
        tap=first.tap, taps=names, id=None, ids=(), confidence=PLACE, nmse=None,
        says=f"{first.tap} is wrong on the inputs it was given{': ' if facts else ''}{'; '.join(facts)}", fix=None,
        place=_place(first, names, c), settle=_settling_step(PLACE, first, c, command),
    )  # fmt: skip


def _place(row: Row, names: Sequence[str], c: Comparison) -> Place:
    tap = taps.parse(row.tap)
    layers = {other.layer for name in names if (other := taps.parse(name)) is not None and other.layer is not None}
    present = [row.tap for row in c.rows] + list(c.missing)
    inputs = () if tap is None else tuple(taps.inputs_of(tap, present, int(c.model.get("layers") or 0)))
    by_graph = c.engine is not None and c.engine.name == "graph"
    architecture = str(c.model.get("architecture") or "").replace("-", "_")
    return Place(
        row.tap, tuple(sorted(layers)), row.op, (tap.kind.what or tap.kind.op) if tap is not None else row.op,
        row.weight, inputs, None if by_graph else f"reference/llamaref/models/{architecture}.py", row.span,
    )  # fmt: skip


def _settling_step(confidence: str, row: Row, c: Comparison, command: Sequence[str]) -> Settling | None:
    """What to run next; nothing where a replay has settled it."""
    if confidence == REPLAYED or not command:
        return None
    if confidence == ONE_OF:
        return Settling(tuple(command), "mend the first of the ids and run this again: if it was another, it says so")
    if row.span:
        return Settling(
            ("llamadiff", "taps", _model_in(command) or str(c.model.get("file")), "--json"),
            f"record {', '.join(row.span)} too: one of them is where it goes wrong",
        )
    return None


def _model_in(command: Sequence[str]) -> str | None:
    """The model's file, where a command line names it."""
    return next((word for word in command[2:] if word.endswith(".gguf")), None)
