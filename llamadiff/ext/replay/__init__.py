"""Saved ops, run again in ggml on any build and device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamadiff.plugins import Slice

if TYPE_CHECKING:
    from llamadiff.cli.command import Command


class Replay(Slice):
    """Saved ops, run again in ggml on any build and device."""

    needs = ("cpus", "devices", "graph")
    remote = ("llamadiff.ext.replay.run_op",)

    def commands(self) -> Sequence[Command]:
        from llamadiff.ext.replay.cli import COMMANDS

        return COMMANDS


slice_ = Replay()
