"""What a server does to contexts: batches, sequences, states, shifts; llama.cpp against itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamadiff.plugins import Slice

if TYPE_CHECKING:
    from llamadiff.candidates.opening import CandidateSpec
    from llamadiff.cli.command import Command
    from llamadiff.engines.run_spec import How, Run
    from llamadiff.llamacpp.passes import PassCheck
    from llamadiff.verbs.verbs import Compare


class State(Slice):
    """What a server does to contexts: batches, sequences, states, shifts; llama.cpp against itself."""

    listener = "llamadiff.ext.state.graph_inputs:GraphInputs"
    remote = tuple(f"llamadiff.ext.state.{name}" for name in ("graph_inputs", "memory", "split", "stepper"))

    def commands(self) -> Sequence[Command]:
        from llamadiff.ext.state.cli import COMMANDS

        return COMMANDS

    def sources(self) -> Sequence[str]:
        return ("llamadiff.ext.state.candidate",)

    def comparison_of(self, candidate: CandidateSpec | None, how: How, run: Run) -> Compare | None:
        if how.steps is None:
            return None
        from llamadiff.ext.state.stepwise import compare_steps

        return compare_steps

    def pass_check(self) -> PassCheck:
        from llamadiff.ext.state.inputs import Inputs

        return Inputs()


slice_ = State()
