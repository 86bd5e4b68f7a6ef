"""A proxy in front of a real server that damages one answer. The server has executed the request.

swallow   the connection ends without an answer      cut   half of the answer, then the end of the connection
slow      the answer comes in small pieces           fail  the answer says that the server is too busy
"""

from __future__ import annotations

import http.client
import re
import socketserver
import threading
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

HARMS = ("swallow", "cut", "slow", "fail")


class Proxy(socketserver.ThreadingTCPServer):
    """A proxy that forwards requests, and damages the answer to one of them."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = urllib.parse.urlsplit(upstream).netloc
        self.harmed = ""  # Method and path of the request whose answer was damaged.
        self._harm = ""
        self._at = -1
        self._kind = ""
        self._counted = 0
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """URL of the proxy."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def arm(self, harm: str, at: int, kind: str = "") -> None:
        """Damage the answer to the request number `at`, counted from now. Only requests that match `kind` count."""
        with self._lock:
            self.harmed = ""
            self._harm = harm
            self._at = at
            self._kind = kind
            self._counted = 0

    def disarm(self) -> None:
        """Damage no more answers."""
        self.arm("", -1)

    def count(self, what: str) -> str:
        """Count a request. Return the damage to its answer, or an empty text."""
        with self._lock:
            if re.match(self._kind, what) is None:
                return ""
            self._counted += 1
            if self._counted - 1 != self._at:
                return ""
            self.harmed = what
            return self._harm


@contextmanager
def run_proxy(upstream: str) -> Iterator[Proxy]:
    """Run a proxy in a thread."""
    with Proxy(upstream) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        connection = http.client.HTTPConnection(self.server.upstream, timeout=60)
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():  # The header Host is signed, so it must not change.
            connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        content = answer.read()
        headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in _HOP_BY_HOP]
        connection.close()
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
        lines = [f"HTTP/1.1 {answer.status} {answer.reason}", *(f"{name}: {value}" for name, value in headers)]
        whole = "\r\n".join([*lines, f"Content-Length: {length or 0}", "", ""]).encode() + content
        self._answer(self.server.count(f"{self.command} {self.path}"), whole)

    def _answer(self, harm: str, whole: bytes) -> None:
        if harm == "swallow":
            self.close_connection = True
        elif harm == "cut":
            self.wfile.write(whole[: len(whole) // 2])
            self.close_connection = True
        elif harm == "slow":
            for start in range(0, len(whole), max(1, len(whole) // 8)):
                self.wfile.write(whole[start : start + max(1, len(whole) // 8)])
                self.wfile.flush()
                time.sleep(0.05)
        elif harm == "fail":
            self.wfile.write(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n")
        else:
            self.wfile.write(whole)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _forward  # noqa: N815  http.server needs these names.

    def log_message(self, *_: object) -> None:
        """Log nothing."""


_HOP_BY_HOP = {"connection", "content-length", "transfer-encoding", "keep-alive"}
