"""What the types of another file of the model cost, and where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamadiff.plugins import Slice

if TYPE_CHECKING:
    from llamadiff.candidates.opening import CandidateSpec
    from llamadiff.cli.command import Command
    from llamadiff.engines.run_spec import How, Run
    from llamadiff.report.tables import Table
    from llamadiff.result.comparison import Comparison
    from llamadiff.verbs.verbs import Compare


class Loss(Slice):
    """What the types of another file of the model cost, and where."""

    needs = ("file",)
    remote = ("llamadiff.ext.loss.two_files",)

    def commands(self) -> Sequence[Command]:
        from llamadiff.ext.loss.cli import COMMANDS

        return COMMANDS

    def comparison_of(self, candidate: CandidateSpec | None, how: How, run: Run) -> Compare | None:
        from llamadiff.candidates.gguf_file import is_model_file

        if not is_model_file(candidate):
            return None
        from llamadiff.ext.loss.compare import compare_files

        return compare_files

    def tables(self, result: Comparison, full: bool) -> Sequence[Table]:
        if "loss" not in result.more:
            return ()
        from llamadiff.ext.loss.tables import loss_tables

        return loss_tables(result.more["loss"], full)


slice_ = Loss()
