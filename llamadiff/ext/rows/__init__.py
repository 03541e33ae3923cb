"""A long prompt, of which some rows are judged: nothing as long as the prompt is kept but K and V."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llamadiff.plugins import Slice, SomeRows

if TYPE_CHECKING:
    from llamadiff.candidates.opening import CandidateSpec
    from llamadiff.cli.command import Command
    from llamadiff.engines.model_file import Runnable
    from llamadiff.engines.run_spec import How, Run
    from llamadiff.judge.fact import Fact
    from llamadiff.trace.reader import Trace
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
        from llamadiff.ext.rows.compare import compare_rows, is_of_rows, takes

        if not asked and not is_of_rows(candidate):
            return None
        return compare_rows if takes(candidate, how) else None

    def some_rows(self, model: Runnable, baseline: Trace, candidate: Trace | None) -> SomeRows | None:
        from llamadiff.ext.rows.judged import some_rows

        return some_rows(model, baseline, candidate)

    def read_span(self, case: Any, sure: bool) -> tuple[Fact, ...] | None:
        from llamadiff.ext.rows.seen_words import seen_keys

        return seen_keys(case, sure)


slice_ = Rows()
