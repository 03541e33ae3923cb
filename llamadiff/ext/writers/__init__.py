"""Writers of the trace file in eight languages, to paste into an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamadiff.plugins import Slice

if TYPE_CHECKING:
    from llamadiff.cli.command import Command


class Writers(Slice):
    """Writers of the trace file in eight languages, to paste into an engine."""

    def commands(self) -> Sequence[Command]:
        from llamadiff.ext.writers.cli import COMMANDS

        return COMMANDS


slice_ = Writers()
