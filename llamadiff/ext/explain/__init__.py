"""Why taps are wrong: known bugs, replayed on what was recorded, and what is read back of an op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamadiff.plugins import Slice

if TYPE_CHECKING:
    from llamaref.config import Rope

    from llamadiff.cli.command import Command
    from llamadiff.judge.compared import Compared
    from llamadiff.judge.fact import Fact
    from llamadiff.judge.lanes import Lane, Source
    from llamadiff.judge.study import Bench, Look, Study
    from llamadiff.result.diagnosis import Diagnosis


class Explain(Slice):
    """Why taps are wrong: known bugs, replayed on what was recorded, and what is read back of an op."""

    needs = ("file", "graph")

    def commands(self) -> Sequence[Command]:
        from llamadiff.ext.explain.cli import COMMANDS

        return COMMANDS

    def looks(self) -> Sequence[Look]:
        from llamadiff.ext.explain.conventions.study import choices, ends, roundings

        return ends, choices, roundings

    def causes(self, bench: Bench, study: Study) -> tuple[Diagnosis, ...]:
        from llamadiff.ext.explain.causes import causes_of

        return causes_of(bench, study)

    def facts(
        self, seen: Compared, source: Source, lane: Lane, limit: float, rope: Rope | None, dim: int | None
    ) -> tuple[Fact, ...]:
        from llamadiff.ext.explain.pattern.described import described

        return described(seen, source, lane, limit, rope, dim)


slice_ = Explain()
