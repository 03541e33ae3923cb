"""Is the file right: its tensors alone, against another file, a checkpoint, a dump of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamadiff.plugins import Slice

if TYPE_CHECKING:
    from llamadiff.candidates.opening import Candidate
    from llamadiff.cli.command import Command
    from llamadiff.engines.model_file import Runnable
    from llamadiff.system.progress import Progress
    from llamadiff.verbs.by_original import Original


class File(Slice):
    """Is the file right: its tensors alone, against another file, a checkpoint, a dump of them."""

    def commands(self) -> Sequence[Command]:
        from llamadiff.ext.file.cli import COMMANDS

        return COMMANDS

    def sources(self) -> Sequence[str]:
        return ("llamadiff.ext.file.transformers",)

    def original(self, candidate: Candidate, model: Runnable, progress: Progress) -> Original | None:
        if not isinstance(candidate, str) or not candidate.startswith("transformers:"):
            return None
        from llamadiff.ext.file.original import original_behind

        return original_behind(candidate, model, progress)


slice_ = File()
