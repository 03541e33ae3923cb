"""Is the file right: its tensors alone, against another file, a checkpoint, a dump of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from llamadiff.plugins import Slice

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from llamadiff.cli.command import Command
    from llamadiff.engines.model_file import ModelFile
    from llamadiff.judge.preflight.checks import Check
    from llamadiff.judge.study import Bench, Study
    from llamadiff.result.oddity import Oddity
    from llamadiff.trace.reader import Trace

    Array = NDArray[Any]


class File(Slice):
    """Is the file right: its tensors alone, against another file, a checkpoint, a dump of them."""

    remote = ("llamadiff.ext.file.errands", "llamadiff.ext.file.applied")
    adapter = "llamadiff.ext.file.applied:apply"

    def commands(self) -> Sequence[Command]:
        from llamadiff.ext.file.cli import COMMANDS

        return COMMANDS

    def weight_check(self) -> Callable[[ModelFile, str, Array], str | None]:
        from llamadiff.ext.file.weight_faults import weight_fault

        return weight_fault

    def adapter_of(self, trace: Trace, model: Path) -> tuple[str, float] | None:
        from llamadiff.ext.file.adapter import stated_adapter

        return stated_adapter(trace, model)

    def other_file(self, bench: Bench, study: Study, given: Trace) -> Check | None:
        from llamadiff.ext.file.adapter import refuse_other_adapter, unapplied

        refuse_other_adapter(bench.baseline, given)
        return unapplied(bench, study)

    def not_finite(self, model: ModelFile, weight: str | None, layer: int | None) -> Oddity | None:
        from llamadiff.ext.file.finite import not_finite

        return not_finite(model, weight, layer)

    def concerns(self, model: ModelFile) -> Iterable[str]:
        from llamadiff.ext.file.concerns import concerns

        return concerns(model)


slice_ = File()
