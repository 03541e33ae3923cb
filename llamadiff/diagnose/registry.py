"""What a known bug is, and the list of them: functions that register themselves.

The nodes of llama.cpp's graph that make a tap are a Subgraph: every weight, input and constant laid open. A bug alters
some of them; what the altered nodes compute from the inputs that a candidate recorded is what the candidate would have
recorded if it had that bug.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any

# The likeliest first: of bugs that a model cannot tell apart, the first is named first.
FAMILIES = (
    "rope", "norms", "softmax", "attention", "cache", "matmul", "activations", "recurrent", "residuals", "embedding",
    "misread", "moe", "precision",
)  # fmt: skip


Way = tuple[tuple[str, ...], Callable[[Any], Iterator[Any]]]  # ops, and edit.Edits of nodes with these


@dataclass(frozen=True)
class Bug:
    """A mistake that engines are known to make.

    ``about`` says what it is and ``fix`` what to do, ``source`` names threads where people had it. A ``general`` one
    has a constant to solve for and is asked when nothing exact fits. A ``harmless`` one is a way of computing, not a
    mistake: where it fits, the tap is noise. ``ways`` to have it are edits of nodes with some ops.
    """

    name: str
    about: str
    fix: str
    source: str
    family: str
    general: bool = False
    harmless: bool = False
    ways: tuple[Way, ...] = ()

    @property
    def ops(self) -> tuple[str, ...]:
        """Those of the nodes that it edits."""
        return tuple(dict.fromkeys(op for ops, _ in self.ways for op in ops))


_BUGS: dict[str, Bug] = {}
EDITS: list[tuple[str, Way]] = []  # of bugs by name, as they are registered


def define(known: Bug) -> None:
    """Register a bug. It has one home: ValueError for a name that is there already."""
    if known.name in _BUGS:
        raise ValueError(f"{known.name} is defined in {_BUGS[known.name].family} and in {known.family}")
    _BUGS[known.name] = known


@cache
def known_bugs() -> dict[str, Bug]:
    """Every known bug by name, in the order in which they are asked."""
    for family in FAMILIES:
        import_module(f"llamadiff.diagnose.bugs.{family}")
    ordered = sorted(_BUGS.values(), key=lambda known: FAMILIES.index(known.family))
    return {
        known.name: replace(known, ways=tuple(way for name, way in EDITS if name == known.name)) for known in ordered
    }
