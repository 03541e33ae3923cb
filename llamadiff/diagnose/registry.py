"""What a known bug is, and the list of them: functions that register themselves.

The nodes of llama.cpp's graph that make a tap are a Subgraph: every weight, input and constant laid open. A bug alters
some of them; what the altered nodes compute from the inputs that a candidate recorded is what the candidate would have
recorded if it had that bug.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module

from llamadiff.diagnose.case import Case
from llamadiff.diagnose.subgraph import Subgraph

# The likeliest first: of bugs that a model cannot tell apart, the first is named first.
FAMILIES = (
    "rope", "norms", "softmax", "attention", "cache", "matmul", "activations", "recurrent", "residuals", "embedding",
    "misread", "moe", "precision",
)  # fmt: skip


@dataclass(frozen=True)
class Change:
    """A subgraph as a bug leaves it, and what the op does instead, as a clause without its subject.

    ``value`` is a constant that was solved for, ``own`` the model's; ``variant`` tells this change from the bug's
    others in every layer; ``at`` is the tap that it is at, if that is not the one that is judged.
    """

    subgraph: Subgraph
    says: str
    variant: str = ""
    value: float | None = None
    at: str | None = None
    own: float | None = None


Changes = Callable[[Subgraph, Case], Iterator[Change]]


@dataclass(frozen=True)
class Bug:
    """A mistake that engines are known to make.

    ``about`` says what it is and ``fix`` what to do, ``source`` names threads where people had it. A ``general`` one
    has a constant to solve for and is asked when nothing exact fits. A ``harmless`` one is a way of computing, not a
    mistake: where it fits, the tap is noise. ``changes`` alter a subgraph; ``ops`` are those of the nodes they alter.
    """

    name: str
    about: str
    fix: str
    source: str
    family: str
    general: bool = False
    harmless: bool = False
    changes: tuple[Changes, ...] = ()
    ops: tuple[str, ...] = ()


_BUGS: dict[str, Bug] = {}
_CHANGES: dict[str, list[tuple[tuple[str, ...], Changes]]] = {}  # bug -> ops and what changes them


def define(known: Bug) -> None:
    """Register a bug. It has one home: ValueError for a name that is there already."""
    if known.name in _BUGS:
        raise ValueError(f"{known.name} is defined in {_BUGS[known.name].family} and in {known.family}")
    _BUGS[known.name] = known


def extend(name: str, ops: tuple[str, ...], changes: Changes) -> None:
    """Register a function that changes nodes with these ops as a bug does."""
    _CHANGES.setdefault(name, []).append((ops, changes))


@cache
def known_bugs() -> dict[str, Bug]:
    """Every known bug by name, in the order in which they are asked."""
    for family in FAMILIES:
        import_module(f"llamadiff.diagnose.bugs.{family}")
    ordered = sorted(_BUGS.values(), key=lambda known: FAMILIES.index(known.family))
    return {known.name: _with_changes(known) for known in ordered}


def _with_changes(known: Bug) -> Bug:
    found = _CHANGES[known.name]
    ops = tuple(dict.fromkeys(op for own, _ in found for op in own))
    shared = (known.name, known.about, known.fix, known.source, known.family, known.general, known.harmless)
    return Bug(*shared, tuple(changes for _, changes in found), ops)
