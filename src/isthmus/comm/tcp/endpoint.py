"""`Endpoint`: where a rank listens and how to reach it; dialling it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from isthmus.comm.tcp.handshake import Handshake
from isthmus.comm.tcp.reconnect import GreetedChannel
from isthmus.core.errors import IsthmusError, PeerError, RestartError
from isthmus.wan import dial, format_address

DIAL_TIMEOUT_S = 5.0
"""Longest time for one TCP connect, before the greeting."""


@dataclass(frozen=True)
class Endpoint:
    """Where a peer listens and how to connect to it."""

    host: str
    port: int
    route: str | None = None
    """`host:port` of the HTTP CONNECT proxy to dial through, if any."""
    lanes: int = 1
    """Number of connections; both sides of a pair must agree."""
    congestion_control: str | None = None
    """Congestion control to set on each connection, such as bbr; ignored if the kernel lacks it."""
    rdma: str | None = None
    """Device of this rank by which its connections go on (`open_device`), None for TCP; both sides must agree."""


def set_socket_options(sock: socket.socket, congestion_control: str | None) -> None:
    """Set `TCP_NODELAY` and, if the kernel supports it, the named congestion control."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if congestion_control is not None:
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control.encode())


def is_transient(error: PeerError) -> bool:
    """Return whether a failed dial may succeed later; a refused connection or unknown host will not."""
    cause = error.__cause__
    return isinstance(cause, OSError) and not isinstance(cause, ConnectionRefusedError | socket.gaierror)


def dial_rank(
    handshake: Handshake,
    rank: int,
    number: int,
    endpoint: Endpoint,
    timeout_s: float,
    on_open: Callable[[socket.socket], None] = lambda _: None,
) -> GreetedChannel:
    """Dial `rank` and greet it for connection number `number`; `on_open` gets the socket before that.

    Raises `UnavailableError` if there is currently no route, `PeerError` if the worker is gone or rejects us,
    `RestartError` if it has restarted, `ProtocolError` if it has another format version.
    """
    deadline_s = time.monotonic() + timeout_s
    try:
        connection = dial((endpoint.host, endpoint.port), endpoint.route, min(timeout_s, DIAL_TIMEOUT_S))
    except PeerError as error:
        raise PeerError(f"rank {rank}: {error.message}", hint=error.hint) from error.__cause__
    try:
        on_open(connection)
        set_socket_options(connection, endpoint.congestion_control)
        connection.settimeout(max(deadline_s - time.monotonic(), 1e-3))
        return handshake.dial(connection, rank, number)
    except OSError as error:
        connection.close()
        where = format_address(endpoint.host, endpoint.port)
        raise PeerError(f"rank {rank} at {where} did not answer: {error}") from error
    except RestartError as error:
        connection.close()
        raise RestartError(f"rank {rank} has restarted", incarnation=error.incarnation) from error
    except IsthmusError:
        connection.close()
        raise
