"""Real vocabularies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import vocabularies


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """vocabulary("gpt-2"): the path of such a file."""
    folder = vocabularies.folder(tmp_path_factory)
    return lambda name: folder / f"ggml-vocab-{name}.gguf"
