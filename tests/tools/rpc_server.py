"""A local rpc-server of llama.cpp, for as long as a test wants it."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from waiting import HANG, eventually


@contextmanager
def serving(program: Path, **environment: str) -> Iterator[str]:
    """Where it listens: HOST:PORT. It is ended at the end. ``environment``: what stands in its own besides."""
    port = _free_port()
    command = [str(program), "--host", "127.0.0.1", "--port", str(port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env={**os.environ, **environment}, **quiet) as server:
        try:
            eventually(lambda: _answers(port), server)
            yield f"127.0.0.1:{port}"
        finally:
            server.kill()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), HANG).close()
    except OSError:
        return False
    return True
