"""What llama.cpp cannot do on this machine: asked once, as the doctor does, and skipped for the reason it gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from llamaref import Weights

from llamadiff.llamacpp.doctor import OK, Examined, decodes
from llamadiff.llamacpp.request import Settings

UNQUANTIZED = {"F32", "F16", "BF16"}


class Machine:
    """The machine that the tests run on. Only what is off for its crashes may be missing: repacked weights."""

    def __init__(self, probe: Callable[[str, Settings, bool], Examined] = decodes) -> None:
        self._probe = probe
        self._found: dict[tuple[Settings, bool], Examined] = {}

    def lacks(self, settings: Settings, quantized: bool) -> str | None:
        """Why llama.cpp cannot run with these settings here; None where it can, or where it has to."""
        if not settings.repack:
            return None
        key = (settings, quantized)
        if key not in self._found:
            self._found[key] = self._probe("repacked weights", settings, quantized)
        return None if self._found[key].state == OK else self._found[key].found

    def needs(self, settings: Settings, model: Path) -> None:
        """Skip the test that calls this, where llama.cpp cannot run a model with these settings."""
        if settings.repack:  # a model is opened only then
            weights = Weights(model)
            reason = self.lacks(settings, any(weights.type(name) not in UNQUANTIZED for name in weights))
            if reason is not None:
                pytest.skip(reason)
