"""What npm has installed for the strangers, in a folder of this run."""

from __future__ import annotations

from pathlib import Path

import pytest
from once import once
from tools.parts import MissingPartError, run

NAMES = ("@huggingface/tokenizers", "gpt-tokenizer")


def folder(temporary: pytest.TempPathFactory) -> Path:
    """Where ``node_modules`` is; a test that needs it is skipped where npm is not, or cannot reach its registry."""

    def make(made: Path) -> None:
        run("npm", "install", "--loglevel=error", "--no-audit", "--no-fund", "--prefix", made, *NAMES)

    try:
        return once(temporary, "npm", make)
    except MissingPartError as error:
        pytest.skip(f"no {' and '.join(NAMES)} here: {error}; apt install npm")
