"""What a known bug is, and the list of them: small objects that register themselves.

A recipe is one op with everything it uses laid open: inputs, weights, constants. ``recipe_of`` gives the right one for
a tap. A bug changes a recipe; what the changed recipe computes from the inputs that a candidate recorded is what the
candidate would have recorded if it had that bug. Where a model is run through llama.cpp's graph, the recipe of every
tap is the part of the graph that makes it, and bugs change its nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any, Protocol, TypeVar, get_type_hints

from numpy.typing import NDArray

from llamadiff.diagnose.case import Case, NotRecordedError
from llamadiff.diagnose.subgraph import Subgraph, subgraph_of

Array = NDArray[Any]

# The likeliest first: of bugs that a model cannot tell apart, the first is named first.
FAMILIES = (
    "bugs.rope", "bugs.norms", "bugs.softmax", "bugs.attention", "bugs.cache", "bugs.matmul", "bugs.activations",
    "graph_bugs.recurrent", "bugs.residuals", "bugs.embedding", "bugs.quant_blocks", "bugs.quant_scales", "bugs.moe",
    "graph_bugs.rope", "graph_bugs.norms", "graph_bugs.attention", "graph_bugs.softmax", "graph_bugs.cache",
    "graph_bugs.matmul", "graph_bugs.activations", "graph_bugs.residuals", "graph_bugs.embedding",
    "graph_bugs.quant_blocks", "graph_bugs.moe", "bugs.precision", "graph_bugs.precision",
)  # fmt: skip


class Recipe(Protocol):
    """One op, laid open."""

    def compute(self, case: Case) -> Array:
        """The op's result, [b, token, ...]: one batch entry, or one for each arithmetic."""
        ...


@dataclass(frozen=True)
class Change:
    """A recipe as a bug leaves it, and what the op does instead, as a clause without its subject.

    ``value`` is a constant that was solved for, ``variant`` tells this change from the bug's others in every layer;
    ``at`` is the tap that it is at, if that is not the one that is judged.
    """

    recipe: Recipe
    says: str
    variant: str = ""
    value: float | None = None
    at: str | None = None


Changes = Callable[[Any, Case], Iterator[Change]]


@dataclass(frozen=True)
class Bug:
    """A mistake that engines are known to make.

    ``words`` are the taps it can explain, ``about`` says what it is and ``fix`` what to do, ``source`` names threads
    where people had it. A ``general`` one has a constant to solve for and is asked when nothing exact fits. A
    ``harmless`` one is a way of computing, not a mistake: where it fits, the tap is noise. ``takes`` is the kind of
    recipe that it changes; ``nodes`` are functions that change a subgraph, ``ops`` those of the nodes they change.
    """

    name: str
    words: tuple[str, ...]
    about: str
    fix: str
    source: str
    changes: Callable[[Any, Case], Iterator[Change]]
    takes: Any
    general: bool = False
    harmless: bool = False
    nodes: tuple[Changes, ...] = ()
    ops: tuple[str, ...] = ()

    def changes_to(self, recipe: Recipe) -> tuple[Changes, ...]:
        """The functions that change such a recipe."""
        if isinstance(recipe, Subgraph):
            return self.nodes
        return (self.changes,) if isinstance(recipe, self.takes) else ()


Builder = TypeVar("Builder", bound="Callable[[Case], Recipe]")
BUGS: dict[str, Bug] = {}
_RECIPES: dict[str, Callable[[Case], Recipe]] = {}
_NODES: dict[str, list[tuple[tuple[str, ...], Changes]]] = {}  # bug -> ops and what changes them


def bug(
    *words: str, fix: str, source: str = "", general: bool = False, harmless: bool = False
) -> Callable[[Callable[[Any, Case], Iterator[Change]]], Callable[[Any, Case], Iterator[Change]]]:
    """Register a function that changes recipes; its name is the bug's name, its docstring what the bug is."""

    def register(changes: Callable[[Any, Case], Iterator[Change]]) -> Callable[[Any, Case], Iterator[Change]]:
        name, about = changes.__name__.replace("_", "-"), " ".join((changes.__doc__ or "").split())
        takes = get_type_hints(changes)["r"]
        takes = object if takes in (Any, Recipe) else takes
        BUGS[name] = Bug(name, words, about, fix, source, changes, takes, general, harmless)
        return changes

    return register


def recipe(*words: str) -> Callable[[Builder], Builder]:
    """Register the function that lays these taps' op open."""

    def register(build: Builder) -> Builder:
        _RECIPES.update(dict.fromkeys(words, build))
        return build

    return register


def define(
    name: str, about: str, fix: str, source: str, general: bool, module: str, ops: tuple[str, ...], changes: Changes
) -> None:
    """Register a bug that is known of nodes alone; the ops stand for the taps where it shows."""

    def no_changes(r: Subgraph, case: Case) -> Iterator[Change]:
        yield from ()

    no_changes.__module__ = module
    BUGS[name] = Bug(name, ops, about, fix, source, no_changes, Subgraph, general)
    extend(name, ops, changes)


def extend(name: str, ops: tuple[str, ...], changes: Changes) -> None:
    """Register a function that changes nodes with these ops as a bug does, one that is known of taps."""
    _NODES.setdefault(name, []).append((ops, changes))


def recipe_of(case: Case) -> Recipe:
    """The right recipe of a case's tap. Raises NotRecordedError where an input is missing, or there is no recipe."""
    if case.by_graph:
        return subgraph_of(case)
    build = _RECIPES.get(case.tap.kind.word)
    if build is None:
        raise NotRecordedError(case.tap.name)
    return build(case)


def reads_blocks(known: Bug) -> bool:
    """Whether a bug is a misreading of quantized blocks."""
    return known.changes.__module__.endswith((".quant_blocks", ".quant_scales"))


@cache
def known_bugs() -> dict[str, Bug]:
    """Every known bug by name, in the order in which they are asked."""
    for family in FAMILIES:
        import_module(f"llamadiff.diagnose.{family}")

    def family_of(known: Bug) -> int:
        return FAMILIES.index(known.changes.__module__.removeprefix("llamadiff.diagnose."))

    return {known.name: _with_nodes(known) for known in sorted(BUGS.values(), key=family_of)}


def _with_nodes(known: Bug) -> Bug:
    found = _NODES.get(known.name, [])
    ops = dict.fromkeys(op for own, _ in found for op in own)
    return replace(known, nodes=tuple(changes for _, changes in found), ops=tuple(ops))


def bugs_of(case: Case) -> list[Bug]:
    """The bugs that a case's tap may have."""
    return [known for known in known_bugs().values() if can_have(case, known)]


def can_have(case: Case, known: Bug) -> bool:
    """Whether a case's tap may have a bug."""
    return bool(known.nodes) if case.by_graph else case.tap.kind.word in known.words
