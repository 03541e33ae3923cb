"""Captures in a project's tests: the pytest fixture ``llamadiff_check``, and captures recorded anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamadiff.plugins import Slice

if TYPE_CHECKING:
    from pathlib import Path


class Captures(Slice):
    """Captures in a project's tests: the pytest fixture ``llamadiff_check``, and captures recorded anew."""

    pytest_plugin = "llamadiff.ext.captures.pytest_plugin"

    def record_anew(self, traces: Sequence[Path], model: Path | None, force: bool) -> str:
        from llamadiff.ext.captures.cli import record_anew

        return record_anew(traces, model, force)


slice_ = Captures()
