"""`connect_transport`: connect to all ranks of a run, with transport threads or a transport process."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from isthmus.comm.process.process_transport import ProcessTransport
from isthmus.comm.tcp.endpoint import Endpoint
from isthmus.comm.tcp.reconnect import OnLink
from isthmus.comm.tcp.rendezvous import connect_ranks
from isthmus.comm.tcp.tcp_transport import TcpTransport
from isthmus.comm.tcp.wire_format import Greeting
from isthmus.comm.transport.transport import JoinedTransport
from isthmus.core.base_model import TransportKind
from isthmus.core.errors import PeerError


def connect_transport(
    kind: TransportKind,
    greeting: Greeting,
    endpoints: Sequence[Endpoint],
    listener: socket.socket,
    timeout_s: float,
    *,
    heartbeat_s: float = 2.0,
    peer_timeout_s: float = 30.0,
    on_loss: Callable[[PeerError], None] = lambda _: None,
    on_link: OnLink = lambda _rank, _why, _lasted_s: None,
) -> JoinedTransport:
    """Return a transport that is connected to every rank. Raises what `connect_ranks` raises.

    `endpoints[r]` is where rank `r` listens. `listener` is this rank's own listening socket; it stays
    open after the transport is closed.
    """
    if kind == "process":
        return ProcessTransport(
            greeting,
            endpoints,
            listener,
            timeout_s,
            heartbeat_s=heartbeat_s,
            peer_timeout_s=peer_timeout_s,
            on_loss=on_loss,
            on_link=on_link,
        )
    return TcpTransport(
        greeting,
        endpoints,
        connect_ranks(greeting, endpoints, listener, timeout_s),
        listener.dup(),
        heartbeat_s=heartbeat_s,
        peer_timeout_s=peer_timeout_s,
        on_loss=on_loss,
        on_link=on_link,
    )
