"""Servers, each started once for the tests of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from servers import started

from llamadiff.llamacpp.shipped import shipped_model


@pytest.fixture(scope="module")
def served() -> Iterator[Callable[..., str]]:
    """served("--api", "vllm", model=PATH): the address of such a server."""
    made: dict[tuple[str, ...], str] = {}
    with ExitStack() as stack:

        def get(*flags: str, model: Path | None = None) -> str:
            words = (str(model or shipped_model()), *flags)
            if words not in made:
                made[words] = stack.enter_context(started(*words))
            return made[words]

        yield get
