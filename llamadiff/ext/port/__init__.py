"""A checkpoint's own code against llama.cpp's graph of the file that was made of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamadiff.plugins import Slice

if TYPE_CHECKING:
    from llamadiff.cli.command import Command


class Port(Slice):
    """A checkpoint's own code against llama.cpp's graph of the file that was made of it."""

    needs = ("explain", "file", "graph", "prompt", "pytorch", "watch")

    def commands(self) -> Sequence[Command]:
        from llamadiff.ext.port.cli import COMMANDS

        return COMMANDS


slice_ = Port()
