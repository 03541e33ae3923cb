"""An engine that was not changed: its values are found in its memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamadiff.plugins import Slice

if TYPE_CHECKING:
    from llamadiff.cli.command import Command
    from llamadiff.judge.preflight.checks import Check
    from llamadiff.judge.study import Bench, Study
    from llamadiff.trace.reader import Trace


class Record(Slice):
    """An engine that was not changed: its values are found in its memory."""

    def commands(self) -> Sequence[Command]:
        from llamadiff.ext.record.cli import COMMANDS

        return COMMANDS

    def other_file(self, bench: Bench, study: Study, given: Trace) -> Check | None:
        from llamadiff.ext.record.nowhere import lost_values

        return lost_values(study, given)

    def sources(self) -> Sequence[str]:
        return ("llamadiff.ext.record.candidate",)


slice_ = Record()
