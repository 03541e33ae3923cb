"""A stranger's server, asked for JSON over HTTP: at the given address alone, within limits of bytes and time."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from http.client import (
    HTTPConnection,
    HTTPException,
    HTTPResponse,
    HTTPSConnection,
    IncompleteRead,
    RemoteDisconnected,
)
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from llamadiff.system.errors import UserError
from llamadiff.system.progress import Progress, silent
from llamadiff.trace.stated import parse_json, reason

if TYPE_CHECKING:
    from typing_extensions import Buffer, Self

PATIENCE = 60.0  # seconds that one answer may take
KEY = "LLAMADIFF_API_KEY"  # the environment variable that a server's key goes in
MOST = 16 << 20  # bytes of an answer, its headers too
AT_ONCE = 1 << 16  # bytes
SAID = 200  # characters that are shown of what a server says
WAITS = 3  # times that a busy server is asked again
OTHER = "mend the server, or take a key that no prompt has in it"
UNIQUE = 12  # characters of a key that is a part of no word by chance
MOVED, BUSY, LACKING = (301, 302, 303, 307, 308), (429, 503), (404, 405, 501)


class RefusedError(UserError):
    """A server answers with a code that is no success. ``says`` is what it says of it."""

    def __init__(self, message: str, code: int, says: str) -> None:
        super().__init__(message)
        self.code, self.says = code, says


class LacksError(RefusedError):
    """A server does not have what it was asked for: there may be another way."""


def is_server(spec: str) -> bool:
    """Whether it is the address of one."""
    return spec.lower().startswith(("http://", "https://"))


class Server:
    """A server at a URL, asked over one connection that stays open, and is opened again where the server closed it.

    No proxy is used and no redirect followed; https is verified. ``patience``: seconds that one answer may take, all of
    it. Every fault is a UserError of one line, in which the key does not stand.
    """

    def __init__(self, url: str, patience: float = PATIENCE, progress: Progress = silent) -> None:
        parts = _checked(url)
        self.name = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self.patience = patience
        self._prefix, self._progress, self._key = parts.path.rstrip("/"), progress, _key()
        self._connection = _connection(parts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def ask(self, path: str, body: Any | None = None) -> Any:
        """The JSON that is answered to a body, by POST, or to none, by GET.

        Raises UserError; of it LacksError for a path that is not there, RefusedError for another code.
        """
        for wait in range(WAITS + 1):
            code, headers, said = self._exchanged(path, body)
            seconds = self._asked_to_wait(code, headers)
            if seconds is None or wait == WAITS:
                break
            self._progress(f"waiting {seconds} s, as the server asks ({code})")
            time.sleep(seconds)
        if not 200 <= code < 300:
            raise self._refusal(path, code, headers, said)
        return self._parsed(path, body, said)

    # -- one request -----------------------------------------------------------------------------------------------

    def _exchanged(self, path: str, body: Any | None) -> tuple[int, Mapping[str, str], bytes]:
        """Code, headers and body of an answer. Raises UserError for whatever is none."""
        try:
            return self._answer(path, self._answered(path, body))
        except UserError:
            self._connection.close()
            raise
        except (OSError, HTTPException, ValueError, MemoryError) as error:
            self._connection.close()
            raise self._fault(self._reason(path, error)) from None

    def _answered(self, path: str, body: Any | None) -> HTTPResponse:
        """The answer up to its body; on a new connection where the server has closed the one that was open."""
        was_open = self._connection.sock is not None
        try:
            return self._sent(path, body)
        except (ConnectionError, ssl.SSLEOFError):
            self._connection.close()
            if not was_open:
                raise
        return self._sent(path, body)

    def _sent(self, path: str, body: Any | None) -> HTTPResponse:
        until = time.monotonic() + self.patience
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        headers |= {"Content-Type": "application/json"} if body is not None else {}
        data = None if body is None else json.dumps(body).encode()
        if self._connection.sock is None:
            self._connection.timeout = self.patience
            self._connection.connect()
        self._connection.sock.settimeout(_left(until))
        self._connection.request("GET" if body is None else "POST", self._prefix + path, data, headers)
        self._connection.sock.settimeout(_left(until))
        return self._connection.getresponse()

    def _answer(self, path: str, response: HTTPResponse) -> tuple[int, Mapping[str, str], bytes]:
        headers = {name.lower(): value for name, value in response.getheaders()}
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            what = self._told(encoding)
            raise self._fault(f"answers {path} ({response.status}) encoded as {what}, which was not asked for")
        length = headers.get("content-length", "0").strip()
        if not length.isdecimal():
            raise HTTPException(f"Content-Length: {length}")
        parts = []
        while part := response.read(AT_ONCE):
            parts.append(part)
        if response.length:
            raise IncompleteRead(b"", response.length)
        return response.status, headers, b"".join(parts)

    # -- what it says ----------------------------------------------------------------------------------------------

    def _asked_to_wait(self, code: int, headers: Mapping[str, str]) -> int | None:
        """Seconds after which a busy server wants to be asked again, if that is worth waiting for."""
        after = headers.get("retry-after", "").strip()
        if code not in BUSY or not after.isascii() or not after.isdecimal() or len(after) > 9:
            return None
        return int(after) if int(after) <= self.patience else None

    def _refusal(self, path: str, code: int, headers: Mapping[str, str], said: bytes) -> UserError:
        """What is told of a code that is no success."""
        where, says = f"answers {path} with code {code}", self._told(_message(said))
        if code in MOVED:
            host = self._told(_host(headers.get("location", "")))
            return self._fault(f"{where}, a redirect to {host}, which is not followed; give the address that answers")
        if code in (401, 403):
            how = f"does not take the key that is in {KEY}" if self._key else f"wants a key; put it into {KEY}"
            return self._fault(f"{where}: {how}{says and f' ({says})'}")
        after = self._told(headers.get("retry-after", "")) if code in BUSY else ""
        end = f"; it asks to wait {after}, ask later or raise --timeout" if after else ""
        message = self._hidden(f"{self.name}: {where}{says and f': {says}'}{end}")
        return (LacksError if code in LACKING else RefusedError)(message, code, says)

    def _parsed(self, path: str, asked: Any | None, said: bytes) -> Any:
        try:
            value = parse_json(said.decode())
        except ValueError as error:
            what = f"{self._told(said.decode('utf-8', 'replace'), 60)!r}" if said else "nothing"
            why = "not UTF-8" if isinstance(error, UnicodeDecodeError) else self._told(reason(error))
            raise self._fault(
                f"answers {path} with {what}, which is no JSON ({why}); is this the API's address?"
            ) from None
        if self._key and self._tells(value) and not self._tells(asked):
            raise self._fault(f"answers {path} with the key that is in {KEY}, which is not shown; {OTHER}")
        return value

    def _tells(self, value: Any) -> bool:
        """Whether the key stands in one of its texts; a short one must be a word there."""
        key = re.escape(self._key)
        word = re.compile(key if len(self._key) >= UNIQUE else rf"(?<![^\W_]){key}(?![^\W_])")
        return any(map(word.search, _texts(value)))

    def _reason(self, path: str, error: Exception) -> str:
        """Why there was no answer."""
        match error:
            case TimeoutError():
                return f"did not answer {path} within {self.patience:g} s; --timeout gives it longer"
            case _TooLongError():
                return f"answers {path} with more than {MOST >> 20} MiB"
            case IncompleteRead() | RemoteDisconnected():
                when = "in the middle of its answer to" if isinstance(error, IncompleteRead) else "before it answers"
                return f"closes the connection {when} {path}"
            case ssl.SSLCertVerificationError():
                why = self._told(error.verify_message)
                return f"its certificate is not to be trusted ({why}); SSL_CERT_FILE names authorities of your own"
            case OSError():
                why = self._told(error.strerror or str(error) or type(error).__name__)
                return f"cannot be asked ({why}); does a server listen at this address?"
        return f"answers {path} with what is no HTTP ({self._told(str(error) or type(error).__name__)})"

    def _fault(self, what: str) -> UserError:
        return UserError(self._hidden(f"{self.name}: {what}"))

    def _told(self, text: str, most: int = SAID) -> str:
        """Foreign text on one line that is not long, without the key."""
        text = " ".join(self._hidden(text).split())
        return text if len(text) <= most else f"{text[: most - 3]}..."

    def _hidden(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


# -- addresses, keys, messages -----------------------------------------------------------------------------------------


def _checked(url: str) -> SplitResult:
    """The parts of a URL. Raises UserError for one that is none, or says more than an address."""
    try:
        parts = urlsplit(url)
        where, _ = f"{parts.scheme}://{parts.hostname}", parts.port
    except ValueError as error:
        raise UserError(f"--candidate: is no URL ({reason(error)}); give one such as http://localhost:8080") from None
    if parts.username is not None or parts.password is not None:
        raise UserError(f"{where}: a name or a password stands in the URL; put the key into {KEY} instead")
    if parts.query or parts.fragment:
        raise UserError(f"{where}: the URL has a query or a fragment; give the address alone, and the key in {KEY}")
    if not parts.hostname or not all("!" <= character <= "~" for character in url):
        raise UserError(f"{where}: is no URL of plain characters with a host; give one such as http://localhost:8080")
    return parts


def _connection(parts: SplitResult) -> HTTPConnection:
    assert parts.hostname is not None
    if parts.scheme == "http":
        made = HTTPConnection(parts.hostname, parts.port)
    else:
        made = HTTPSConnection(parts.hostname, parts.port, context=ssl.create_default_context())
    made.response_class = _Limited
    return made


def _key() -> str:
    key = os.environ.get(KEY, "").strip()
    if not all("!" <= character <= "~" for character in key):
        raise UserError(f"{KEY}: has blanks or characters that are not ASCII within it; a key has none")
    return key


def _texts(value: Any) -> Iterator[str]:
    """All texts in a JSON value."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, (dict, list)):
            left += [*each, *each.values()] if isinstance(each, dict) else each


def _host(location: str) -> str:
    try:
        return urlsplit(location).hostname or "the same host"
    except ValueError:
        return "what is no URL"


def _message(said: bytes) -> str:
    """What a body says of an error, in the ways of llama-server, OpenAI, Ollama and FastAPI; else all of it."""
    text = said.decode("utf-8", "replace")
    try:
        found = parse_json(text)
    except ValueError:
        return text
    for key in ("error", "message", "detail"):
        found = found.get(key, found) if isinstance(found, dict) else found
    return found if isinstance(found, str) else text


# -- limits ------------------------------------------------------------------------------------------------------------


class _Limited(HTTPResponse):
    """An answer of which all must come within the time that its socket has left, and within ``MOST`` bytes."""

    def __init__(self, sock: socket.socket, *args: Any, **more: Any) -> None:
        super().__init__(sock, *args, **more)
        self.fp = io.BufferedReader(_Reader(sock, self.fp.detach()))


class _Reader(io.RawIOBase):
    """Bytes of a socket, as long as there is time, and not too many."""

    def __init__(self, sock: socket.socket, raw: io.RawIOBase) -> None:
        self._sock, self._raw, self._until = sock, raw, time.monotonic() + (sock.gettimeout() or 0)
        self._more = MOST

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int | None:
        self._sock.settimeout(_left(self._until))
        if hasattr(socket, "TCP_QUICKACK"):  # else a server that sends head and body apart waits 40 ms in between
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        count: int | None = self._raw.readinto(buffer)
        self._more -= count or 0
        if self._more < 0:
            raise _TooLongError
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _TooLongError(HTTPException):
    """More bytes than an answer may have."""


def _left(until: float) -> float:
    """Seconds until then. Raises TimeoutError where there are none."""
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
