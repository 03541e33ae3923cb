"""What a page shows of a tensor close up, where a slice draws such pictures."""

from __future__ import annotations

from collections.abc import Sequence

from llamadiff import plugins
from llamadiff.numerics.metrics import Rows


def closeup_of(recorded: Rows, right: Rows, axes: Sequence[str], index: Sequence[int]) -> object:
    """A tensor against what is right, around the worst place; None where nobody draws it."""
    return plugins.ask_first(lambda each: each.closeup(recorded, right, axes, index))
