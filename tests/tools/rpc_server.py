"""A local rpc-server of llama.cpp, for as long as a test wants it."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from waiting import HANG, eventually


@contextmanager
def serving(program: Path) -> Iterator[str]:
    """Where it listens: HOST:PORT. It is ended at the end."""
    port = _free_port()
    command = [str(program), "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
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
