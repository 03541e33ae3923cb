"""Saved ops, run again in ggml on any build and device; runs that are recorded with every node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamadiff.plugins import Slice

if TYPE_CHECKING:
    from llamadiff.cli.command import Command
    from llamadiff.verbs.backend import NodeRecordings


class Replay(Slice):
    """Saved ops, run again in ggml on any build and device; runs that are recorded with every node."""

    needs = ("cpus",)
    remote = ("llamadiff.ext.replay.run_op",)

    def commands(self) -> Sequence[Command]:
        from llamadiff.ext.replay.cli import COMMANDS

        return COMMANDS

    def node_recordings(self) -> NodeRecordings:
        from llamadiff.ext.replay.recording import Recordings

        return Recordings()


slice_ = Replay()
