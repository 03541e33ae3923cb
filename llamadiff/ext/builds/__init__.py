"""llama.cpp of a build or an install, or a fork, by its headers: ``--llama-cpp DIR``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from llamadiff.plugins import Slice

if TYPE_CHECKING:
    from pathlib import Path


class Builds(Slice):
    """llama.cpp of a build or an install, or a fork, by its headers: ``--llama-cpp DIR``."""

    library = "llamadiff.ext.builds.compiled:Compiled"
    remote = tuple(f"llamadiff.ext.builds.{name}" for name in ("build_tree", "compiled", "shims"))
    remote_files = ("llamadiff/ext/builds/shim.c",)

    def ops_of(self, folder: Path) -> Iterable[str]:
        from llamadiff.ext.builds.build_tree import find

        return find(folder).ops()


slice_ = Builds()
