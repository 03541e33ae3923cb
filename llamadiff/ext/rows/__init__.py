"""A long prompt, of which some rows are judged: nothing as long as the prompt is kept but K and V."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamadiff.plugins import Slice

if TYPE_CHECKING:
    from llamadiff.candidates.opening import CandidateSpec
    from llamadiff.cli.command import Command
    from llamadiff.engines.run_spec import How, Run
    from llamadiff.verbs.verbs import Compare


class Rows(Slice):
    """A long prompt, of which some rows are judged: nothing as long as the prompt is kept but K and V."""

    remote = ("llamadiff.ext.rows.choose", "llamadiff.ext.rows.row_observer")

    def commands(self) -> Sequence[Command]:
        from llamadiff.ext.rows.cli import COMMANDS

        return COMMANDS

    def comparison_of(self, candidate: CandidateSpec | None, how: How, run: Run) -> Compare | None:
        from llamadiff.ext.rows.choose import is_asked

        asked = is_asked(how.rows, run.prompt, len(run.tokens))
        if not asked and not str(candidate).endswith(".safetensors"):
            return None
        from llamadiff.ext.rows.compare import compare_rows, has_gaps, takes

        return compare_rows if (asked or has_gaps(candidate)) and takes(candidate, how) else None


slice_ = Rows()
