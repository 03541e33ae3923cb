"""Many cases: models by prompts by candidates by settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamadiff.plugins import Slice

if TYPE_CHECKING:
    from llamadiff.cli.command import Command


class Sweep(Slice):
    """Many cases: models by prompts by candidates by settings."""

    def commands(self) -> Sequence[Command]:
        from llamadiff.ext.sweep.cli import COMMANDS

        return COMMANDS


slice_ = Sweep()
