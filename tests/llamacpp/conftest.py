"""The parts that `make backends` has made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tools.backends import PARTS, made
from tools.parts import Usage
from tools.rpc_server import serving


@pytest.fixture(scope="session")
def usage() -> Iterator[Callable[[str], Usage]]:
    """usage("vulkan"): how that part is used; whoever asks for one that was not made is skipped."""
    with ExitStack() as open_ones:
        known: dict[str, Usage] = {}

        def of(name: str) -> Usage:
            group = PARTS[name].group
            folder = made().get(name, f" not made yet: make backends{f' PARTS={group}' if group else ''}")
            if folder[0] == " ":
                pytest.skip(folder.strip())
            if name not in known:
                known[name] = PARTS[name].use(Path(folder))
                if PARTS[name].served:
                    server = open_ones.enter_context(serving(next(Path(folder, "lib").glob("*rpc-server"))))
                    known[name] = Usage((*known[name].options, "--llama-cpp", f"device=rpc:{server}"))
            return known[name]

        yield of
