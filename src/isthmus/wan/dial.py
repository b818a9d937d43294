"""`dial`: open a TCP connection to a worker, directly or through an HTTP CONNECT proxy (the route)."""

from __future__ import annotations

import socket
import time

from isthmus.core.errors import InputError, PeerError, UnavailableError

MAX_HEAD_BYTES = 8192
"""Longest accepted head of a CONNECT request or response."""

_HEAD_END = b"\r\n\r\n"


def parse_address(text: str) -> tuple[str, int]:
    """Read `"host:port"` or `"[v6]:port"`; raise `InputError` on anything else."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise InputError(f"invalid address {text!r}", hint="write host:port, such as 127.0.0.1:7001")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def dial(address: tuple[str, int], proxy: str | None = None, timeout_s: float = 10.0) -> socket.socket:
    """Return a connected, blocking socket (TCP_NODELAY) to `address`, through `proxy` `"host:port"` if given.

    `timeout_s` bounds connecting and the CONNECT exchange together. Raises `UnavailableError` if the
    route fails, `PeerError` if the peer cannot be reached.
    """
    deadline_s = time.monotonic() + timeout_s
    target = format_address(*address)
    if proxy is None:
        try:
            return _open_socket(address, timeout_s)
        except OSError as error:
            hint = "check that its worker runs, and whether its cluster needs a route from here"
            raise PeerError(f"peer {target} cannot be reached: {_failure_reason(error)}", hint=hint) from error
    try:
        connection = _open_socket(parse_address(proxy), timeout_s)
    except OSError as error:
        hint = "start the gateway or link emulator of this site, or correct the route in `routes`"
        raise UnavailableError(
            f"route {proxy} to peer {target} cannot be reached: {_failure_reason(error)}", hint=hint
        ) from error
    try:
        _request_tunnel(connection, target, proxy, deadline_s)
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


def _open_socket(address: tuple[str, int], timeout_s: float) -> socket.socket:
    connection = socket.create_connection(address, timeout=max(timeout_s, 1e-3))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(None)
    return connection


def _request_tunnel(sock: socket.socket, target: str, proxy: str, deadline_s: float) -> None:
    """Send the CONNECT request and read exactly the head of the response, no payload."""
    try:
        sock.settimeout(max(deadline_s - time.monotonic(), 1e-3))
        sock.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode("ascii"))
        head = _read_head(sock, deadline_s)
    except OSError as error:
        hint = "the link may be cut; check the link emulator or gateway, then retry"
        raise UnavailableError(
            f"route {proxy} did not answer for peer {target}: {_failure_reason(error)}", hint=hint
        ) from error
    status_line = head.split(b"\r\n", 1)[0].decode("latin-1")
    words = status_line.split(maxsplit=2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
        raise UnavailableError(
            f"route {proxy} is not an HTTP CONNECT proxy: it answered {status_line[:80]!r}",
            hint="correct the route in `routes`",
        )
    if words[1] == "503":
        raise UnavailableError(
            f"route {proxy} to peer {target} is down: {' '.join(words[1:])}",
            hint="the link is down; retry when it is restored",
        )
    if not words[1].startswith("2"):
        hint = "check that the peer's worker still runs and listens; see its log and its agent"
        raise PeerError(f"peer {target} cannot be reached through route {proxy}: {' '.join(words[1:])}", hint=hint)


def _read_head(sock: socket.socket, deadline_s: float) -> bytes:
    """Read exactly up to and including the empty line: the peer may already be sending."""
    head = b""
    while not head.endswith(_HEAD_END):
        sock.settimeout(max(deadline_s - time.monotonic(), 1e-3))
        seen = sock.recv(MAX_HEAD_BYTES, socket.MSG_PEEK)
        if not seen:
            raise ConnectionResetError("closed before it answered")
        joined = head + seen
        end = joined.find(_HEAD_END)
        wanted = len(seen) if end < 0 else end + len(_HEAD_END) - len(head)
        head += sock.recv(wanted)
        if len(head) > MAX_HEAD_BYTES:
            return head
    return head


def _failure_reason(error: OSError) -> str:
    return "timed out" if isinstance(error, TimeoutError) else (error.strerror or str(error))
