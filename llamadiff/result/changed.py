"""A capture, as it was judged when it was recorded, and what changed when it was recorded anew: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llamadiff.trace.metadata import CHECKED, Info


@dataclass(frozen=True)
class Changed:
    """What a capture was, what it is now, and the NMSE of each tap that is no longer the same."""

    path: Path
    before: Info
    after: Info
    taps: int
    apart: dict[str, float]
    gone: tuple[str, ...]
    new: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """That of the engine on what was recorded now."""
        return verdict_of(self.after)


def verdict_of(capture: Info) -> str:
    """What the engine said of a capture when it was recorded."""
    return str(capture.producer[CHECKED]["verdict"])
