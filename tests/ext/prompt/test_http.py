"""A server that is asked: what it answers, and one line for each way in which it does not; the key is never shown."""

from __future__ import annotations

import contextlib
import gzip
import json
import select
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from optional import needs
from waiting import BRIEF, HANG, Clock, eventually

from llamadiff import UserError
from llamadiff.ext.prompt import http
from llamadiff.ext.prompt.http import KEY, MOST, LacksError, RefusedError, Server, is_server

SECRET = "sk-0123456789abcdef"
Answers = Callable[[int, bytes, socket.socket], None]  # the number of the request, its bytes, where the answer goes


class Stranger:
    """A server of raw sockets: what it was asked, and over how many connections."""

    def __init__(self, answers: Answers, context: ssl.SSLContext | None = None) -> None:
        self.answers, self.context = answers, context
        self.asked, self.connections = list[bytes](), 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.url = f"http{'s' if context else ''}://localhost:{self.port}"
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                self.connections += 1
                threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            if self.context is not None:
                connection = self.context.wrap_socket(connection, server_side=True)
            with connection:
                while request := _request(connection):
                    self.asked.append(request)
                    self.answers(len(self.asked), request, connection)


def _request(connection: socket.socket) -> bytes:
    """One request whole; nothing where there is none."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(1 << 16)
        if not part:
            return b""
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    while lengths and len(body) < int(lengths[0].partition(b":")[2]):
        body += connection.recv(1 << 16)
    return head + b"\r\n\r\n" + body


def said(body: bytes | str = b"{}", code: str = "200 OK", *headers: str) -> bytes:
    body = body.encode() if isinstance(body, str) else body
    lines = [f"HTTP/1.1 {code}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def saying(*parts: bytes, ends: bool = False) -> Answers:
    def answers(number: int, request: bytes, connection: socket.socket) -> None:
        for part in parts:
            connection.sendall(part)
        if ends:
            connection.shutdown(socket.SHUT_RDWR)

    return answers


def never(number: int, request: bytes, connection: socket.socket) -> None:
    """Nothing comes until nobody waits."""
    connection.recv(1)


def endlessly(first: bytes, more: bytes) -> Answers:
    def answers(number: int, request: bytes, connection: socket.socket) -> None:
        connection.sendall(first)
        while True:
            connection.sendall(more)

    return answers


@pytest.fixture
def stranger() -> Iterator[Callable[..., Stranger]]:
    made = list[Stranger]()

    def start(answers: Answers, context: ssl.SSLContext | None = None) -> Stranger:
        made.append(Stranger(answers, context))
        return made[-1]

    yield start
    for each in made:
        each.listener.close()


def fault(url: str, patience: float = HANG, path: str = "/props") -> UserError:
    """What is raised; it is one line, without the key."""
    with pytest.raises(UserError) as caught, Server(url, patience) as server:
        server.ask(path, {"a": 1})
    text = str(caught.value)
    assert text.splitlines() == [text]
    assert len(text) < 500
    assert SECRET not in text
    return caught.value


# -- right ones --------------------------------------------------------------------------------------------------------


def test_a_thousand_over_one_connection(stranger):
    here = stranger(lambda number, request, connection: connection.sendall(said(request.partition(b"\r\n\r\n")[2])))
    with Server(here.url) as server:
        for number in range(1000):
            assert server.ask("/echo", {"n": number, "é": "\ud800"}) == {"n": number, "é": "\ud800"}
    assert (here.connections, len(here.asked)) == (1, 1000)


def test_what_is_sent(stranger, monkeypatch):
    here = stranger(saying(said("[1]")))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv(KEY, raising=False)
    with Server(here.url + "/a/b/") as server:
        assert server.ask("/props") == [1]
        assert server.ask("/x", []) == [1]
    get, post = (each.decode() for each in here.asked)
    assert get.startswith("GET /a/b/props HTTP/1.1\r\n")
    assert "Accept-Encoding: identity\r\n" in get
    assert "Authorization" not in get
    assert post.startswith("POST /a/b/x HTTP/1.1\r\n")
    assert post.endswith("\r\n\r\n[]")


def test_the_key_is_sent(stranger, monkeypatch):
    monkeypatch.setenv(KEY, f"{SECRET}\n")
    here = stranger(saying(said()))
    with Server(here.url) as server:
        server.ask("/")
    assert f"\r\nAuthorization: Bearer {SECRET}\r\n".encode() in here.asked[0]


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
RIGHT = {  # what is answered, what that is, and over how many connections it is asked twice
    "in chunks": (saying(CHUNKED + b"3\r\n[1,\r\n2;x=y\r\n2]\r\n0\r\n\r\n"), "[1, 2]", 1),
    "up to the end of the connection": (saying(b"HTTP/1.0 200 OK\r\n\r\n[1]", ends=True), "[1]", 2),
    "no numbers": (saying(said("[NaN, 1e999]")), "[nan, inf]", 1),  # whoever computes with them looks
    "just short enough": (saying(said(b" " * (MOST - 200) + b"1")), "1", 1),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_an_answer(name, stranger):
    answers, value, connections = RIGHT[name]
    here = stranger(answers)
    with Server(here.url) as server:
        for _ in range(2):
            assert str(server.ask("/", {})) == value
    assert here.connections == connections


def test_a_connection_closed_between_two_is_opened_again(stranger):
    here = stranger(saying(said("[1]"), ends=True))
    with Server(here.url) as server:
        for _ in range(3):
            assert server.ask("/", {}) == [1]
            eventually(lambda: select.select([server._connection.sock], [], [], 0)[0])
    assert here.connections == 3


def test_once_alone(stranger):
    """A server that closes the new connection too is not asked a third time."""
    here = stranger(
        lambda number, request, connection: saying(*[said()] * (number == 1), ends=True)(1, b"", connection)
    )
    with Server(here.url) as server:
        server.ask("/")
        with pytest.raises(UserError, match="closes the connection before it answers /"):
            server.ask("/")
    assert here.connections == 2


def test_a_busy_server_is_waited_for(stranger, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(http, "time", clock)
    busy = said("{}", "429 Too Many Requests", "Retry-After: 1")
    here = stranger(lambda number, request, connection: connection.sendall(busy if number < 3 else said("[1]")))
    told = list[str]()
    with Server(here.url, HANG, lambda phase, done=0, of=0: told.append(phase)) as server:
        assert server.ask("/") == [1]
    assert told == ["waiting 1 s, as the server asks (429)"] * 2
    assert clock.now == 2


@pytest.mark.parametrize(
    ("spec", "is_one"), [("http://a", True), ("HTTPS://a", True), ("./http://", False), ("a", False)]
)
def test_what_a_server_is(spec, is_one):
    assert is_server(spec) is is_one


# -- hostile ones ------------------------------------------------------------------------------------------------------

ENDLESS = b"HTTP/1.1 200 OK\r\n\r\n"
LINE = b"a: " + b"b" * 60_000 + b"\r\n"
ANSWERS = {
    "endless": (endlessly(ENDLESS, b" " * 65536), "more than 16 MiB"),
    "endless chunks": (endlessly(CHUNKED, b"8000\r\n" + b" " * 0x8000 + b"\r\n"), "more than 16 MiB"),
    "endless headers": (endlessly(b"HTTP/1.1 200 OK\r\n", b"a: b\r\n"), "got more than 100 headers"),
    "endless line": (endlessly(b"HTTP/1.1 200 OK\r\na: ", b"b" * 65536), "got more than 65536 bytes"),
    "endless status": (endlessly(b"HTTP/1.1 200 ", b"b" * 65536), "got more than 65536 bytes"),
    "endless continue": (endlessly(b"", b"HTTP/1.1 100 Continue\r\n" + LINE + b"\r\n"), "more than 16 MiB"),
    "endless trailers": (endlessly(CHUNKED + b"0\r\n", LINE), ("more than 16 MiB", "headers")),
    "longer than memory": (saying(said(b"", "200 OK").replace(b": 0", b": 9999999999999"), ends=True), "in the middle"),
    "chunk longer than memory": (saying(CHUNKED + b"ffffffffffffffffff\r\n1", ends=True), "in the middle"),
    "chunk of less than nothing": (saying(CHUNKED + b"-5\r\n1", ends=True), "no HTTP"),
    "chunk that is no number": (saying(CHUNKED + b"zz\r\n1", ends=True), "in the middle"),
    "no HTTP": (saying(b"SSH-2.0-OpenSSH\r\n", ends=True), "what is no HTTP"),
    "another HTTP": (saying(b"HTTP/7.1 200 OK\r\n\r\n"), "what is no HTTP"),
    "code of letters": (saying(b"HTTP/1.1 abc OK\r\n\r\n"), "what is no HTTP"),
    "code of one digit": (saying(b"HTTP/1.1 2 OK\r\n\r\n"), "what is no HTTP"),
    "empty": (saying(said("")), "answers /props with nothing, which is no JSON"),
    "no JSON": (saying(said("<html>\x1b[2J\nnot here</html>")), "which is no JSON (Expecting value"),
    "deep": (saying(said("[" * 999_999)), "nested too deep"),
    "two of a name": (saying(said('{"a": 1, "a": 2}')), "two entries are called a"),
    "not UTF-8": (saying(said(b'"\xff"')), "not UTF-8"),
    "UTF-16": (saying(said('{"a": 1}'.encode("utf-16"))), "not UTF-8"),
    "gzip": (saying(said(gzip.compress(b"{}"), "200 OK", "Content-Encoding: gzip")), "encoded as gzip"),
    "closed in the middle": (saying(said("[1, 2]")[:-2], ends=True), "closes the connection in the middle"),
    "closed in the headers": (saying(b"HTTP/1.1 200 OK\r\nConte", ends=True), "no JSON"),
    "closed in a chunk": (saying(CHUNKED + b"9\r\n[1", ends=True), "closes the connection in the middle"),
    "closed at once": (saying(ends=True), "closes the connection before it answers /props"),
    "redirect": (saying(said("", "307 Moved", "Location: https://evil.example/x")), "a redirect to evil.example,"),
    "redirect to here": (saying(said("", "302 Found", "Location: /x")), "a redirect to the same host, which"),
    "redirect to no URL": (saying(said("", "302 Found", "Location: http://[::x")), "a redirect to what is no URL"),
    "401": (saying(said("{}", "401 No")), f"code 401: does not take the key that is in {KEY}"),
    "403": (saying(said("no", "403 No")), "(no)"),
    "echo": (saying(said(f'{{"error": {{"message": "bad key {SECRET}"}}}}', "400 Bad")), "code 400: bad key ***"),
    "echo at the cut": (saying(said("x" * 195 + SECRET, "500 Bad")), "xxx**"),
    "echo of a reason": (saying(f"{SECRET}\r\n".encode(), ends=True), "no HTTP"),
    "echo of a host": (saying(said("", "302 Found", f"Location: http://{SECRET}/")), "redirect to ***"),
    "echo that is no JSON": (saying(said(SECRET)), "'***', which is no JSON"),
    "echo in JSON": (saying(said(json.dumps({"prompt": SECRET}))), "with the key that is in"),
    "message": (saying(said('{"error": "model\\n\\u001b[2J gone"}', "400 Bad")), "code 400: model \x1b[2J gone"),
    "long message": (saying(said(json.dumps({"detail": "x" * 9999}), "422 Bad")), "x" * 197 + "..."),
    "message that is no text": (saying(said('{"error": {"message": [1]}}', "400 Bad")), '{"error": {"message": [1]}}'),
    "too long to wait": (saying(said("{}", "503 Busy", "Retry-After: 999")), "it asks to wait 999, ask later"),
    "a date to wait for": (saying(said("{}", "503 Busy", "Retry-After: Fri, 31 Dec 1999")), "wait Fri, 31 Dec"),
    "always busy": (saying(said("{}", "429 Busy", "Retry-After: 0")), "code 429"),
    "loading": (saying(said('{"error": {"message": "Loading model"}}', "503 Busy")), "code 503: Loading model"),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_what_is_no_answer_is_one_line(name, stranger, monkeypatch):
    answers, wanted = ANSWERS[name]
    monkeypatch.setenv(KEY, SECRET)
    here = stranger(answers)
    text = str(fault(here.url))
    assert text.startswith(f"http://localhost:{here.port}: ")
    assert any(each in text for each in ((wanted,) if isinstance(wanted, str) else wanted)), text
    assert len(here.asked) == (4 if name == "always busy" else 1)


def test_a_silent_server_is_not_waited_for(stranger):
    assert "did not answer /props within 0.5 s" in str(fault(stranger(never).url, BRIEF))


@pytest.mark.parametrize(
    ("first", "more"), [(b"HTTP/1.1 200 OK\r\na: ", b"b"), (ENDLESS, b" "), (CHUNKED, b"1\r\n \r\n")]
)
def test_an_answer_that_comes_slowly_has_no_more_time_than_one_that_does_not(first, more, stranger, monkeypatch):
    """It never stops coming, a second between two looks."""
    monkeypatch.setattr(http, "time", Clock(step=1.0))
    assert "did not answer /props within 5 s" in str(fault(stranger(endlessly(first, more)).url, 5.0))


@pytest.mark.parametrize(
    ("code", "kind"), [(404, LacksError), (405, LacksError), (501, LacksError), (500, RefusedError)]
)
def test_what_it_lacks_is_told_from_what_it_refuses(code, kind, stranger):
    error = fault(stranger(saying(said('{"error": "why"}', f"{code} No"))).url)
    assert type(error) is kind
    assert (error.code, error.says) == (code, "why")


@pytest.mark.parametrize(
    ("key", "asked", "answer", "is_shown"),
    [
        ("pw", {}, {"error": "no such key: pw"}, False),
        ("pw", {}, [{"pw": 1}], False),
        ("p/w", {}, r'["p\/w"]', False),
        ("pw", {}, r'["\u0070w"]', False),
        ("pw", {}, {"error": "key_pw"}, False),
        ("pw", {}, {"prompt": "spwn"}, True),
        ("user", {"role": "user"}, {"prompt": "<user>"}, True),
        ("12", {}, {"tokens": [12]}, True),
    ],
)
def test_a_short_key_is_not_shown(key, asked, answer, is_shown, stranger, monkeypatch):
    """One that is a part of a word, a number, or what was asked about, is there by chance."""
    monkeypatch.setenv(KEY, key)
    data = answer if isinstance(answer, str) else json.dumps(answer)
    with Server(stranger(saying(said(data))).url) as server:
        if is_shown:
            assert server.ask("/x", asked) == json.loads(data)
        else:
            with pytest.raises(UserError, match=f"with the key that is in {KEY}, which is not shown") as caught:
                server.ask("/x", asked)
            assert key not in str(caught.value).replace(KEY, "")


def test_without_a_key(stranger, monkeypatch):
    monkeypatch.delenv(KEY, raising=False)
    assert f"wants a key; put it into {KEY}" in str(fault(stranger(saying(said("", "401 No"))).url))


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("http://me:hunter2@localhost:1", "a name or a password stands in the URL"),
        ("http://hunter2@localhost:1", "a name or a password stands in the URL"),
        ("http://localhost:1/?key=hunter2", "a query or a fragment"),
        ("http://localhost:1/#hunter2", "a query or a fragment"),
        ("http://", "is no URL"), ("http://localhost:99999", "is no URL"), ("http://[::1", "is no URL"),
        ("http://a b", "is no URL"), ("http://a/\r\nX: y", "is no URL"), ("http://é", "is no URL"),
        ("http://localhost:1", "Connection refused"), ("https://localhost:1", "Connection refused"),
        ("http://nowhere.invalid", "cannot be asked"), ("http://" + "a" * 99, "no HTTP"),
    ],
)  # fmt: skip
def test_an_address_that_is_none(url, wanted):
    text = str(fault(url))
    assert wanted in text
    assert "hunter2" not in text


@pytest.mark.parametrize("key", [f"{SECRET} x", f"{SECRET}\r\nX: y", f"{SECRET}é"])
def test_a_key_that_is_none(key, monkeypatch):
    monkeypatch.setenv(KEY, key)
    assert str(fault("http://localhost:1")).startswith(f"{KEY}: has blanks")


# -- https -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, ssl.SSLContext]:
    files = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=DNS:localhost", "-out", files[0], "-keyout", files[1]],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    return files[0], context


@needs("openssl")
def test_https_is_verified(certificate, stranger, monkeypatch):
    path, context = certificate
    here = stranger(saying(said("[1]")), context)
    assert "its certificate is not to be trusted" in str(fault(here.url))
    assert here.asked == []
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    with Server(here.url) as server:
        assert [server.ask("/") for _ in range(100)] == [[1]] * 100
    assert here.connections == 2
    assert "not to be trusted" in str(fault(here.url.replace("localhost", "127.0.0.1")))


@needs("openssl")
def test_slow_https(certificate, stranger, monkeypatch):
    path, context = certificate
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    assert "in the middle" in str(fault(stranger(saying(said("[1]")[:-1], ends=True), context).url))
    assert "within 0.5 s" in str(fault(stranger(never, context).url, BRIEF))
    monkeypatch.setattr(http, "time", Clock(step=1.0))
    assert "within 5 s" in str(fault(stranger(endlessly(ENDLESS, b" "), context).url, 5.0))


def test_https_of_a_server_that_has_none():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: listener.accept()[0].sendall(b"HTTP/1.1 400 Bad\r\n\r\n"))
        thread.start()
        assert "cannot be asked" in str(fault(f"https://localhost:{listener.getsockname()[1]}"))
        thread.join()
