"""`MetricsListener`: answers `GET /metrics` with the agent's latest page; one request a connection, one at a time.

Other sites and users need no access to it. So it listens on this machine alone unless a token protects it, and holds no
more than a request head in memory.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import threading
import time

from isthmus.core.errors import InputError, UnavailableError
from isthmus.core.loopback import is_loopback

MAX_HEAD_BYTES = 8_192
REQUEST_LIMIT_S = 2.0
"""Longest time for a request, and again for its answer."""
MIN_TOKEN_CHARS = 16

_log = logging.getLogger("isthmus.agent")
_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricsListener:
    """Listens at `host` and `port` (0: any free one) in a thread; `address` is where. `close` ends it.

    With a `token` requests need it (`Authorization: Bearer`). Raises `InputError` beyond loopback without one, and
    `UnavailableError` if the port is taken.
    """

    def __init__(self, host: str, port: int, token: str | None = None) -> None:
        if token is None and not is_loopback(host):
            raise InputError(
                f"metrics at {host} need a token, since other machines reach them",
                hint="give --metrics-token-file, or listen at 127.0.0.1",
            )
        if token is not None and len(token) < MIN_TOKEN_CHARS:
            raise InputError(f"the token of the metrics has fewer than {MIN_TOKEN_CHARS} characters")
        self._token, self._page = token, b""
        try:
            self._listener = socket.create_server((host, port), backlog=16)
        except OSError as error:
            raise UnavailableError(
                f"cannot listen for metrics at {host}:{port}: {error.strerror or error}",
                hint="choose another --metrics-port",
            ) from error
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._thread = threading.Thread(target=self._serve, daemon=True, name="agent-metrics")
        self._thread.start()
        _log.info("metrics of the agent at http://%s:%d/metrics", *self.address)

    def show(self, page: bytes) -> None:
        """Answer with this page from now on."""
        self._page = page

    def close(self) -> None:
        """Stop listening."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(2 * REQUEST_LIMIT_S + 1)

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return  # closed
            with peer, contextlib.suppress(OSError, ValueError):
                peer.settimeout(REQUEST_LIMIT_S)
                peer.sendall(self._answer(_read_head(peer)))

    def _answer(self, head: bytes) -> bytes:
        first, *lines = head.decode("latin-1").split("\r\n")
        method, _, rest = first.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if not self._admits(lines):
            return _response("401 Unauthorized", b"a token is needed\n", "WWW-Authenticate: Bearer\r\n")
        if path != "/metrics":
            return _response("404 Not Found", b"metrics are at /metrics\n")
        if method != "GET":
            return _response("405 Method Not Allowed", b"only GET\n", "Allow: GET\r\n")
        return _response("200 OK", self._page)

    def _admits(self, lines: list[str]) -> bool:
        if self._token is None:
            return True
        given = [line.partition(":")[2].strip() for line in lines if line.lower().startswith("authorization:")]
        wanted = f"Bearer {self._token}"
        return len(given) == 1 and hmac.compare_digest(given[0].encode(), wanted.encode())


def _read_head(peer: socket.socket) -> bytes:
    """Return a request up to its empty line; raise `ValueError` for one that is too long, late or cut off."""
    deadline_s, found = time.monotonic() + REQUEST_LIMIT_S, b""
    while b"\r\n\r\n" not in found:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or len(found) > MAX_HEAD_BYTES:
            raise ValueError("no request")
        peer.settimeout(left_s)
        more = peer.recv(4_096)
        if not more:
            raise ValueError("cut off")
        found += more
    peer.settimeout(REQUEST_LIMIT_S)
    return found.partition(b"\r\n\r\n")[0]


def _response(status: str, body: bytes, more: str = "") -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {_TYPE}\r\nContent-Length: {len(body)}\r\n{more}Connection: close\r\n\r\n"
    )
    return head.encode() + body
