"""What a known bug is: edits of graph nodes, where they can be made, and the list of them, which they enter themselves.

The nodes of llama.cpp's graph that make a tap are a Subgraph: every weight, input and constant laid open. A bug alters
some of them; what the altered nodes compute from the inputs that a candidate recorded is what the candidate would have
recorded if it had that bug.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import import_module

import numpy as np

from llamadiff.ext.explain.alter import after
from llamadiff.ext.explain.case import Case, NotRecordedError
from llamadiff.ext.explain.site import Site
from llamadiff.ext.explain.solve import PROBE, Sought, least_squares, solve
from llamadiff.ext.explain.subgraph import Subgraph
from llamadiff.ext.graph.engine import Alter

# The likeliest first: of bugs that a model cannot tell apart, the first is named first.
FAMILIES = (
    "rope", "norms", "softmax", "attention", "cache", "matmul", "activations", "recurrent", "residuals", "embedding",
    "heads", "misread", "moe", "precision",
)  # fmt: skip
ANY = "any"  # op, in the place of its name
ALONE = "at "  # begins the variant of an edit at one node alone
SLOW = 1 << 24  # weights behind a node, beyond which constants are not solved for but tried


@dataclass(frozen=True)
class Edit:
    """What a node computes instead, as a clause without its subject; ``more`` are other nodes that change with it.

    ``variant`` tells the edit from the bug's others. ``fix`` says what this node needs, with its values; empty: what
    the bug's own sentence says, of whatever node.
    """

    alter: Alter
    says: str
    variant: str = ""
    more: Mapping[int, Alter] = field(default_factory=dict)
    fix: str = ""


@dataclass(frozen=True)
class Constant:
    """An edit with a constant to solve for; ``own`` is the model's, ``familiar`` are values that are tried for it.

    ``fix`` is an Edit's. ``linear``: of a factor, which may be negative where the tap follows it in proportion.
    """

    make: Callable[[float], Alter]
    sought: Sought
    own: float = 0.0
    familiar: tuple[float, ...] | None = None
    variant: str = ""
    more: Callable[[float], Mapping[int, Alter]] = lambda value: {}
    linear: bool = False
    fix: str = ""


Edits = Callable[[Site], Iterator[Edit | Constant]]
Place = tuple[Site, Edit | Constant]


@dataclass(frozen=True)
class Bug:
    """A mistake that engines are known to make.

    ``about`` says what it is and ``fix`` what to do, in every model; ``source`` names threads where people had it. A
    ``general`` one has a constant to solve for and is asked when nothing exact fits. A ``harmless`` one is a way of
    computing, not a mistake: where it fits, the tap is noise. ``edits`` are those of nodes with some ops.
    """

    name: str
    about: str
    fix: str
    source: str
    family: str
    general: bool = False
    harmless: bool = False
    edits: tuple[tuple[tuple[str, ...], Edits], ...] = ()

    @property
    def ops(self) -> tuple[str, ...]:
        """Those of the nodes that it alters."""
        return tuple(dict.fromkeys(op for ops, _ in self.edits for op in ops))


@dataclass(frozen=True)
class Change:
    """A bug as it was made in a subgraph, and what the op does instead, as a clause without its subject.

    ``fix`` says what to do here; ``value`` is a constant that was solved for, ``own`` the model's; ``variant`` tells
    this change from the bug's others in every layer; ``at`` is the tap that it is at, if not the one that is judged;
    ``op`` is the op of its node.
    """

    bug: Bug
    says: str
    fix: str
    variant: str = ""
    value: float | None = None
    at: str | None = None
    own: float | None = None
    op: str = ""


Changes = Iterator[tuple[Change, Subgraph]]
_BUGS: dict[str, Bug] = {}
EDITS: list[tuple[str, tuple[str, ...], Edits]] = []  # bug, ops and edits, as they are registered


def define(known: Bug) -> None:
    """Register a bug. It has one home: ValueError for a name that is there already."""
    if known.name in _BUGS:
        raise ValueError(f"{known.name} is defined in {_BUGS[known.name].family} and in {known.family}")
    _BUGS[known.name] = known


def ways_to_have(name: str, ops: tuple[str, ...], edits: Edits) -> None:
    """Register the edits of nodes with these ops that a bug comes to."""
    EDITS.append((name, ops, edits))


@cache
def known_bugs() -> dict[str, Bug]:
    """Every known bug by name, in the order in which they are asked."""
    for family in FAMILIES:
        import_module(f"llamadiff.ext.explain.bugs.{family}")
    ways: dict[str, list[tuple[tuple[str, ...], Edits]]] = {}
    for name, ops, edits in EDITS:
        ways.setdefault(name, []).append((ops, edits))
    ordered = sorted(_BUGS.values(), key=lambda known: FAMILIES.index(known.family))
    return {known.name: replace(known, edits=tuple(ways[known.name])) for known in ordered}


def at_nodes(
    *ops: str, of: str = "", fix: str = "", source: str = "", general: bool = False, harmless: bool = False
) -> Callable[[Edits], Edits]:
    """Register a function that edits nodes with these ops: as a new bug, or as one more way to have the bug ``of``.

    A new bug has the function's name, and its docstring says what it is.
    """

    def register(edits: Edits) -> Edits:
        name, about = of or edits.__name__.replace("_", "-"), " ".join((edits.__doc__ or "").split())
        if not of:
            family = edits.__module__.rpartition(".")[2]
            define(Bug(name, about, fix, source, family, general, harmless))
        ways_to_have(name, ops, edits)
        return edits

    return register


def changes_of(known: Bug, r: Subgraph, case: Case) -> Changes:
    """A bug's changes to a subgraph; none where it needs what was not recorded."""
    if known.harmless and r.is_span(case):  # what rounds somewhere would excuse what is wrong there
        return
    for ops, edits in known.edits:
        with suppress(NotRecordedError):
            yield from _changes(known, r, case, ops, edits)


def _changes(known: Bug, r: Subgraph, case: Case, ops: tuple[str, ...], edits: Edits) -> Changes:
    """The edits of all nodes: the same one wherever it can be, or at one kind of op, then at each node alone."""
    if edits not in r.places:
        r.places[edits] = {variant: _scopes(places) for variant, places in _found(r, case, ops, edits).items()}
    for variant, scopes in r.places[edits].items():
        for where, some in scopes.items():
            if case.everywhere in (None, not where.startswith(ALONE)):
                yield from _applied(known, r, case, some, f"{variant} {where}".strip())


def _found(r: Subgraph, case: Case, ops: tuple[str, ...], edits: Edits) -> dict[str, list[Place]]:
    """The nodes that an edit can be made at, by its variant."""
    found: dict[str, list[Place]] = {}
    for site in (Site(node, r, case) for node in r.nodes if {node.op, ANY} & set(ops) and r.computes(node)):
        for edit in edits(site):
            found.setdefault(edit.variant, []).append((site, edit))
    return found


def _scopes(places: list[Place]) -> dict[str, list[Place]]:
    """Which places have an edit together: all, those of Q and K, of Q, K and V, of one word, each alone."""
    scopes = {"": places}
    for letters in ("QK", "QKV"):
        some = [place for place in places if place[0].shown[:1] in letters]
        if len(some) > 1 and len(some) not in map(len, scopes.values()):
            scopes[f"of {letters}"] = some
    words = {word: [place for place in places if _word(place) == word] for word in map(_word, places)}
    scopes |= {f"of {word}": some for word, some in words.items() if len(some) < len(places)}
    alone = {f"{ALONE}{number}": [place] for number, place in enumerate(places) if len(words[_word(place)]) > 1}
    return scopes | alone


def _word(place: Place) -> str:
    return place[0].shown.rpartition("-")[0]


def _applied(known: Bug, r: Subgraph, case: Case, places: list[Place], variant: str) -> Changes:
    first, edit = places[0]
    fix = edit.fix or known.fix
    if isinstance(edit, Edit):
        yield Change(known, edit.says, fix, variant, at=first.tap, op=first.node.op), _with(r, places, 0.0)
        return
    slow = _weights_after(r, {site.node.number for site, _ in places}) > SLOW
    how = replace(case, hurried=True) if slow else case
    build = partial(_with, r, places)
    for value in filter(math.isfinite, _values(how, build, edit)):
        says = edit.sought.says(value, edit.own)
        yield Change(known, says, fix, variant, value, first.tap, edit.own, first.node.op), build(value)


def _values(case: Case, build: Callable[[float], Subgraph], edit: Constant) -> Sequence[float]:
    """The values to try: the one that fits best; through a span, where that takes long, at first the familiar ones.

    And one on each side of the model's own, which tell the direction of a small error (``lowest``).
    """
    if case.everywhere is not None and case.hint is None:
        beside = [edit.own * (1 + PROBE), edit.own * (1 - PROBE)] if edit.own > 0 else []
        return [*(edit.sought.familiar if edit.familiar is None else edit.familiar), *beside]
    return (edit.linear and least_squares(case, build)) or solve(case, build, edit.sought, edit.familiar)


def _with(r: Subgraph, places: list[Place], value: float) -> Subgraph:
    altered = dict(r.altered)
    for site, edit in places:
        alter = edit.alter if isinstance(edit, Edit) else edit.make(value)
        more = edit.more if isinstance(edit, Edit) else edit.more(value)
        for number, other in ((site.node.number, alter), *more.items()):
            altered[number] = other if number not in altered else after(altered[number], other)
    return replace(r, altered=altered)


def _weights_after(r: Subgraph, numbers: set[int]) -> int:
    """How many weights are multiplied by from some nodes on."""
    total = 0
    for node in [*(node for node in r.nodes if node.number in numbers), *r.after(numbers)]:
        leaf = r.engine.graph.leaves.get(node.sources[0]) if node.sources and node.sources[0] is not None else None
        if leaf is not None and node.op in ("MUL_MAT", "MUL_MAT_ID") and leaf.number not in r.engine.graph.given:
            total += int(np.prod(leaf.shape))
    return total
