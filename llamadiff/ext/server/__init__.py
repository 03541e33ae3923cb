"""A server, by the log-probabilities that it answers with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamadiff.plugins import Slice

if TYPE_CHECKING:
    from llamadiff.candidates.opening import CandidateSpec
    from llamadiff.engines.run_spec import How, Run
    from llamadiff.verbs.verbs import Compare


class Server(Slice):
    """A server, by the log-probabilities that it answers with."""

    needs = ("explain", "file", "loss", "prompt", "state")
    remote = ("llamadiff.ext.server.errands",)

    def sources(self) -> Sequence[str]:
        return ("llamadiff.ext.server.candidate",)

    def comparison_of(self, candidate: CandidateSpec | None, how: How, run: Run) -> Compare | None:
        from llamadiff.ext.server.pooled_trace import is_pooled_alone

        if how.steps is not None:
            return None
        if is_pooled_alone(candidate):
            from llamadiff.ext.server.pooled import compare_pooled

            return compare_pooled
        from llamadiff.ext.server.candidate import matches

        if not isinstance(candidate, str) or not matches(candidate):
            return None
        from llamadiff.ext.server.compare import compare_server

        return compare_server


slice_ = Server()
