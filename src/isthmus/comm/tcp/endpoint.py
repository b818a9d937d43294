"""`Endpoint`: where a rank listens and how it is reached; opening a lane to it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from isthmus.comm.tcp.reconnect import Connection
from isthmus.comm.tcp.wire_format import Greeting, greet
from isthmus.core.errors import IsthmusError, PeerError, RestartError, UnavailableError
from isthmus.wan.dial import dial, format_address

DIAL_S = 5.0
"""How long one try to open a connection may take, before it is greeted."""


@dataclass(frozen=True)
class Endpoint:
    """Where a peer listens, the route (`host:port` of an HTTP CONNECT proxy) to it, if one is needed, and by
    how many connections it is reached: both sides of a pair must agree. `congestion_control` (a name that the
    kernel knows, such as bbr) is asked for on each; where the kernel has it not, its default stays.
    """

    host: str
    port: int
    route: str | None = None
    lanes: int = 1
    congestion_control: str | None = None


def listen(host: str, port: int = 0, backlog: int = 256) -> socket.socket:
    """Return a listening socket at `host` (port 0: any free one); `UnavailableError` if there is none."""
    try:
        return socket.create_server((host, port), backlog=backlog)
    except OSError as error:
        raise UnavailableError(
            f"cannot listen at {format_address(host, port)}: {error.strerror or error}",
            hint="the site's host must be an address of this machine, and the port free",
        ) from error


def tune(connection: socket.socket, congestion_control: str | None) -> None:
    """Send what there is at once; ask for a congestion control, if one is named and the kernel has it."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if congestion_control is not None:
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control.encode())


def may_pass(error: PeerError) -> bool:
    """Tell whether a peer that could not be dialled may be there a little later: not where it *refused*."""
    cause = error.__cause__
    return isinstance(cause, OSError) and not isinstance(cause, ConnectionRefusedError | socket.gaierror)


def dial_lane(
    greeting: Greeting,
    rank: int,
    lane: int,
    endpoint: Endpoint,
    timeout_s: float,
    clock: Callable[[], float] = time.time,
    opened: Callable[[socket.socket], None] = lambda _: None,
) -> Connection:
    """Open and greet lane `lane` to a lower rank; `opened` is told of the connection before it is greeted.

    Raises `UnavailableError` where there is no way just now, `PeerError` where the worker is not there or
    refuses, `RestartError` where another has taken its place, `ProtocolError` where it is of another format
    version.
    """
    deadline_s = time.monotonic() + timeout_s
    try:
        connection = dial((endpoint.host, endpoint.port), endpoint.route, min(timeout_s, DIAL_S))
    except PeerError as error:
        raise PeerError(f"rank {rank}: {error.message}", hint=error.hint) from error.__cause__
    try:
        opened(connection)
        tune(connection, endpoint.congestion_control)
        connection.settimeout(max(deadline_s - time.monotonic(), 1e-3))
        return connection, greet(connection, greeting, clock, lane)
    except OSError as error:
        connection.close()
        where = format_address(endpoint.host, endpoint.port)
        raise PeerError(f"rank {rank} at {where} did not answer: {error}") from error
    except RestartError as error:
        connection.close()
        raise RestartError(f"rank {rank} has begun anew", incarnation=error.incarnation) from error
    except IsthmusError:
        connection.close()
        raise
