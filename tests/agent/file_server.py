"""An HTTP server on this machine for the tests of fetching: it counts, resumes, and misbehaves as a test says."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

LOOPBACK = "127.0.0.0/8"


@dataclass
class FileServer:
    """Files by path. `requests` are the paths asked for with their first byte, `sent` the bytes of each answer."""

    files: dict[str, bytes]
    port: int = 0
    requests: list[tuple[str, int]] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    sent: int = 0
    # Bytes after which the next answers break off.
    breaks: list[int] = field(default_factory=list)
    # Where paths redirect to.
    redirects: dict[str, str] = field(default_factory=dict)
    # Paths whose body never ends.
    endless: set[str] = field(default_factory=set)
    has_ranges: bool = True
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """The URL of its top folder."""
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def serving(files: dict[str, bytes]) -> Iterator[FileServer]:
    """Serve `files` until the end of the block."""
    told = FileServer(files)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            _answer(self, told)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    told.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield told
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _answer(request: BaseHTTPRequestHandler, told: FileServer) -> None:
    path = unquote(request.path).lstrip("/")
    begin, status = 0, 200
    if told.has_ranges and (asked := request.headers.get("Range")):
        begin, status = int(asked.removeprefix("bytes=").partition("-")[0]), 206
    told.requests.append((path, begin))
    told.hosts.append(request.headers.get("Host", ""))
    request.close_connection = True
    if path in told.redirects:
        request.send_response(302)
        request.send_header("Location", told.redirects[path])
        request.send_header("Content-Length", "0")
        request.end_headers()
        return
    if path in told.endless:
        request.send_response(200)
        request.end_headers()
        try:
            while True:
                request.wfile.write(b"x" * 65536)
                told.sent += 65536
        except OSError:
            return
    if path not in told.files:
        request.send_error(404)
        return
    whole = told.files[path]
    body = whole[begin:]
    request.send_response(status)
    request.send_header("Content-Length", str(len(body)))
    if status == 206:
        request.send_header("Content-Range", f"bytes {begin}-{len(whole) - 1}/{len(whole)}")
    for name, value in told.headers.items():
        request.send_header(name, value)
    request.end_headers()
    if told.breaks:
        body = body[: told.breaks.pop(0)]
    told.sent += len(body)
    request.wfile.write(body)
