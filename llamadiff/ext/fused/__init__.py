"""Kernels of several nodes, which a device runs where nobody asks for values between: found, and judged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamadiff.plugins import Slice

if TYPE_CHECKING:
    from llamadiff.cli.command import Command


class Fused(Slice):
    """Kernels of several nodes, which a device runs where nobody asks for values between: found, and judged."""

    needs = ("graph",)
    remote = ("llamadiff.ext.fused.observer",)

    def commands(self) -> Sequence[Command]:
        from llamadiff.ext.fused.cli import COMMANDS

        return COMMANDS


slice_ = Fused()
