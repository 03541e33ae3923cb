"""llama.cpp of a build, an install or a fork, by its headers or its release: ``--llama-cpp DIR``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from llamadiff.plugins import Slice

if TYPE_CHECKING:
    from pathlib import Path


class Builds(Slice):
    """llama.cpp of a build, an install or a fork, by its headers or its release: ``--llama-cpp DIR``."""

    library = "llamadiff.ext.builds.prebuilt:open_build"
    remote = tuple(
        f"llamadiff.ext.builds.{name}" for name in ("build_tree", "compiled", "prebuilt", "shims", "structures")
    )
    remote_files = ("llamadiff/ext/builds/shim.c", "llamadiff/ext/builds/structures.json")

    def ops_of(self, folder: Path) -> Iterable[str]:
        from llamadiff.ext.builds.build_tree import find

        return find(folder).ops()


slice_ = Builds()
