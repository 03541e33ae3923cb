"""Is the file right: its tensors alone, against another file, a checkpoint, a dump of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from llamadiff.plugins import Slice

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llamadiff.cli.command import Command
    from llamadiff.engines.model_file import ModelFile
    from llamadiff.result.oddity import Oddity

    Array = NDArray[Any]


class File(Slice):
    """Is the file right: its tensors alone, against another file, a checkpoint, a dump of them."""

    remote = ("llamadiff.ext.file.errands",)

    def commands(self) -> Sequence[Command]:
        from llamadiff.ext.file.cli import COMMANDS

        return COMMANDS

    def weight_check(self) -> Callable[[ModelFile, str, Array], str | None]:
        from llamadiff.ext.file.weight_faults import weight_fault

        return weight_fault

    def not_finite(self, model: ModelFile, weight: str | None, layer: int | None) -> Oddity | None:
        from llamadiff.ext.file.finite import not_finite

        return not_finite(model, weight, layer)

    def concerns(self, model: ModelFile) -> Iterable[str]:
        from llamadiff.ext.file.concerns import concerns

        return concerns(model)


slice_ = File()
