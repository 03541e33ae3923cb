"""What PyTorch models compute: recorded (``llamadiff.torch``), and as a candidate ``transformers:``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamadiff.plugins import Slice

if TYPE_CHECKING:
    from llamadiff.candidates.opening import CandidateSpec
    from llamadiff.engines.model_file import Runnable
    from llamadiff.system.progress import Progress
    from llamadiff.verbs.by_original import Original


class Pytorch(Slice):
    """What PyTorch models compute: recorded (``llamadiff.torch``), and as a candidate ``transformers:``."""

    needs = ("file", "graph", "writers")
    recorder = "llamadiff.ext.pytorch.modules:record"

    def sources(self) -> Sequence[str]:
        return ("llamadiff.ext.pytorch.transformers",)

    def original(self, candidate: CandidateSpec, model: Runnable, progress: Progress) -> Original | None:
        if not str(candidate).startswith("transformers:"):
            return None
        from llamadiff.ext.pytorch.original import find_original
        from llamadiff.ext.pytorch.transformers import checkpoint_of

        folder = checkpoint_of(str(candidate))
        return None if folder is None else find_original(model, folder, progress)


slice_ = Pytorch()
