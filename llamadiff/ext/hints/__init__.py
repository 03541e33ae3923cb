"""What was given by mistake: what a file is by its first bytes and where it belongs, near names, a command's words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llamadiff.plugins import Slice


class Hints(Slice):
    """What was given by mistake: what a file is by its first bytes and where it belongs, near names, a command."""

    def mistake(self, given: str | Path | Sequence[str], place: str) -> str | None:
        from llamadiff.ext.hints.candidates import mistaken_candidate
        from llamadiff.ext.hints.names import advice_on_names
        from llamadiff.ext.hints.places import mistaken_file

        if not isinstance(given, (str, Path)):
            return advice_on_names(given)
        return mistaken_candidate(str(given)) if place == "candidate" else mistaken_file(Path(given), place)


slice_ = Hints()
