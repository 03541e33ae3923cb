"""Any program that computes ggml graphs, judged node by node while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamadiff.plugins import Slice

if TYPE_CHECKING:
    from llamadiff.cli.command import Command


class Watch(Slice):
    """Any program that computes ggml graphs, judged node by node while it runs."""

    needs = ("builds", "cpus", "graph")
    remote = tuple(f"llamadiff.ext.watch.{name}" for name in ("watch_run", "watch_remote", "watched_ggml"))
    remote_files = ("llamadiff/ext/watch/watch.c",)

    def commands(self) -> Sequence[Command]:
        from llamadiff.ext.watch.cli import COMMANDS

        return COMMANDS

    def ops(self) -> Sequence[str]:
        return tuple(f"llamadiff.ext.watch.ops.{name}" for name in ("convolutions", "images"))


slice_ = Watch()
