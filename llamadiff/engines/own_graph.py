"""llama.cpp's own graph of a run, where the slice that reads it is there."""

from __future__ import annotations

from llamadiff import plugins
from llamadiff.plugins import OwnGraph
from llamadiff.system.errors import UserError


def own_graph() -> OwnGraph | None:
    """What reads llama.cpp's graph; None where that slice is missing."""
    return plugins.ask_first(lambda each: each.own_graph())


def needed_graph(what: str) -> OwnGraph:
    """The same, for ``what`` needs it. Raises UserError where that slice is missing."""
    found = own_graph()
    if found is None:
        raise UserError(f"{what}: the slice that reads llama.cpp's own graph is missing; llamadiff doctor says why")
    return found
