"""What a picture or a sound is turned into before the encoder, against the checkpoint's own processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamadiff.plugins import Slice

if TYPE_CHECKING:
    from llamadiff.cli.command import Command


class Preprocess(Slice):
    """What a picture or a sound is turned into before the encoder, against the checkpoint's own processor."""

    needs = ("file",)

    def commands(self) -> Sequence[Command]:
        from llamadiff.ext.preprocess.cli import COMMANDS

        return COMMANDS


slice_ = Preprocess()
