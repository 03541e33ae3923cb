"""The head that predicts a token more (MTP, nextn): what goes into it, and every op of it, judged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamadiff.plugins import Slice

if TYPE_CHECKING:
    from llamadiff.cli.command import Command


class Heads(Slice):
    """The head that predicts a token more (MTP, nextn): what goes into it, and every op of it, judged."""

    needs = ("explain", "graph", "state")
    variant = "llamadiff.ext.heads.mtp_variant:MTP"
    remote = tuple(f"llamadiff.ext.heads.{name}" for name in ("drafting", "head_library", "head_observer"))

    def commands(self) -> Sequence[Command]:
        from llamadiff.ext.heads.cli import COMMANDS

        return COMMANDS


slice_ = Heads()
