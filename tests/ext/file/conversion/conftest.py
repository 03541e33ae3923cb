"""Small checkpoints, made once a session."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from ext.file.conversion.checkpoints import make


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """checkpoint("llama"): the directory of one."""
    return cache(lambda architecture: make(tmp_path_factory.mktemp(architecture), architecture))
