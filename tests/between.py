"""Between who asks and a server: a server that answers what another one does, changed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from waiting import HANG

Change = Callable[[str, Any], Any]


def unchanged(_path: str, value: Any) -> Any:
    return value


@contextmanager
def between(url: str, change: Change = unchanged, request: Change = unchanged) -> Iterator[str]:
    """The address of a server that asks the one at ``url`` for ``request(path, body)``, and answers
    ``change(path, answer)``; what is asked without a body, and codes that are no success, go through as they are.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(self.rfile.read(int(self.headers["Content-Length"])))

        def _answer(self, body: bytes | None) -> None:
            if body is not None:
                body = json.dumps(request(self.path, json.loads(body))).encode()
            try:
                with urlopen(
                    Request(url + self.path, body, {"Content-Type": "application/json"}), timeout=HANG
                ) as said:
                    code, data = said.status, json.dumps(change(self.path, json.load(said))).encode()
            except HTTPError as error:
                with error:
                    code, data = error.code, error.read()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
