"""Small checkpoints, made once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from ext.file.conversion.checkpoints import make


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """checkpoint("llama"): the directory of one."""
    made: dict[str, Path] = {}

    def get(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = make(tmp_path_factory.mktemp(architecture), architecture)
        return made[architecture]

    return get
