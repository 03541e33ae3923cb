"""Requests to the tests' server: by urllib, and over a bare connection, which takes what no client would."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen


@dataclass(frozen=True)
class Answer:
    status: int
    value: Any
    headers: Mapping[str, str] = field(default_factory=dict)


def ask(url: str, body: object = None, **headers: str) -> Answer:
    """What a server answers: GET without a body, otherwise POST."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(Request(url, data=data, headers=headers), timeout=60) as response:
            return Answer(response.status, json.load(response), response.headers)
    except HTTPError as error:
        with error:
            return Answer(error.code, json.loads(error.read() or b"null"), error.headers)


def bytes_of(url: str, body: object, most: int, seconds: float, key: str = "sesame") -> bytes:
    """The first bytes that come: so many, or what comes in that time."""
    parts, data = urlsplit(url), json.dumps(body).encode()
    head = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
    received, end = b"", time.monotonic() + seconds
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        connection.settimeout(seconds)
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        try:
            while len(received) < most and time.monotonic() < end and (more := connection.recv(1 << 16)):
                received += more
        except (TimeoutError, ConnectionError):
            pass
    return received
