"""What a known bug is, and the list of them: small objects that register themselves.

A recipe is one op with everything it uses laid open: inputs, weights, constants. ``recipe_of`` gives the right one for
a tap. A bug changes a recipe; what the changed recipe computes from the inputs that a candidate recorded is what the
candidate would have recorded if it had that bug.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, get_type_hints

from numpy.typing import NDArray

if TYPE_CHECKING:
    from llamadiff.diagnose.case import Case

Array = NDArray[Any]

# The likeliest first: of bugs that a model cannot tell apart, the first is named first.
FAMILIES = (
    "rope", "norms", "softmax", "attention", "products", "activations", "residuals", "embedding", "blocks", "scales",
    "router", "rounding",
)  # fmt: skip


class Recipe(Protocol):
    """One op, laid open."""

    def compute(self, case: Case) -> Array:
        """The op's result, [b, token, ...]: one batch entry, or one for each arithmetic."""
        ...


@dataclass(frozen=True)
class Change:
    """A recipe as a bug leaves it, and what the op does instead, as a clause without its subject.

    ``value`` is a constant that was solved for, ``variant`` tells this change from the bug's others in every layer.
    """

    recipe: Recipe
    says: str
    variant: str = ""
    value: float | None = None


@dataclass(frozen=True)
class Bug:
    """A mistake that engines are known to make.

    ``words`` are the taps it can explain, ``about`` says what it is and ``fix`` what to do, ``source`` names threads
    where people had it. A ``general`` one has a constant to solve for and is asked when nothing exact fits. A
    ``harmless`` one is a way of computing, not a mistake: where it fits, the tap is noise. ``takes`` is the kind of
    recipe that it changes.
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


Builder = TypeVar("Builder", bound="Callable[[Case], Recipe]")
BUGS: dict[str, Bug] = {}
_RECIPES: dict[str, Callable[[Case], Recipe]] = {}


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


def recipe_of(case: Case) -> Recipe:
    """The right recipe of a case's tap. Raises NotRecordedError for an op that no recipe lays open."""
    from llamadiff.diagnose.case import NotRecordedError

    if case.tap.kind.word not in _RECIPES:
        raise NotRecordedError(case.tap.name)
    return _RECIPES[case.tap.kind.word](case)


def reads_blocks(known: Bug) -> bool:
    """Whether a bug is a misreading of quantized blocks."""
    return known.changes.__module__.endswith((".blocks", ".scales"))


@cache
def known_bugs() -> dict[str, Bug]:
    """Every known bug by name, in the order in which they are asked."""
    for family in FAMILIES:
        import_module(f"llamadiff.diagnose.{family}")

    def family_of(known: Bug) -> int:
        return FAMILIES.index(known.changes.__module__.rpartition(".")[2])

    return {known.name: known for known in sorted(BUGS.values(), key=family_of)}
