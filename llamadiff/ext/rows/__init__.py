"""A long prompt, of which some rows are judged: nothing as long as the prompt is kept but K and V."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamadiff.plugins import Slice

if TYPE_CHECKING:
    from llamadiff.candidates.opening import CandidateSpec
    from llamadiff.engines.run_spec import How, Run
    from llamadiff.verbs.verbs import Compare


class Rows(Slice):
    """A long prompt, of which some rows are judged: nothing as long as the prompt is kept but K and V."""

    remote = ("llamadiff.ext.rows.choose", "llamadiff.ext.rows.row_observer")

    def comparison_of(self, candidate: CandidateSpec | None, how: How, run: Run) -> Compare | None:
        from llamadiff.ext.rows.choose import is_asked

        if not is_asked(how.rows, run.prompt, len(run.tokens)):
            return None
        from llamadiff.ext.rows.compare import compare_rows, takes

        return compare_rows if takes(candidate, how, run) else None


slice_ = Rows()
