"""Requests to the tests' server: by urllib, and over a bare connection, which takes what no client would."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from waiting import HANG


@dataclass(frozen=True)
class Answer:
    status: int
    value: Any
    headers: Mapping[str, str] = field(default_factory=dict)


def ask(url: str, body: object = None, **headers: str) -> Answer:
    """What a server answers: GET without a body, otherwise POST."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(Request(url, data=data, headers=headers), timeout=HANG) as response:
            return Answer(response.status, json.load(response), response.headers)
    except HTTPError as error:
        with error:
            return Answer(error.code, json.loads(error.read() or b"null"), error.headers)


def bytes_of(url: str, body: object, most: int, key: str = "sesame") -> bytes:
    """The first bytes that come: so many, or all."""
    received = b""
    with _asked(url, body, key) as connection, suppress(ConnectionError):
        while len(received) < most and (more := connection.recv(1 << 16)):
            received += more
    return received


@contextmanager
def _asked(url: str, body: object, key: str) -> Iterator[socket.socket]:
    parts, data = urlsplit(url), json.dumps(body).encode()
    head = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
    with socket.create_connection((parts.hostname, parts.port), timeout=HANG) as connection:
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        yield connection
