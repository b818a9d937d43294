"""`connect_transport`: join the ranks of a run, with transport threads or a transport process."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from isthmus.comm.channel.link_keys import LinkKeys
from isthmus.comm.join_ranks import join_ranks
from isthmus.comm.process.process_transport import ProcessTransport
from isthmus.comm.tcp.endpoint import Endpoint
from isthmus.comm.tcp.greeting import Greeting
from isthmus.comm.tcp.reconnect import OnLink
from isthmus.comm.transport.receive_matching import MAX_MESSAGE_BYTES
from isthmus.comm.transport.transport import JoinedTransport
from isthmus.core.base_model import TransportKind
from isthmus.core.errors import InputError, PeerError
from isthmus.core.loopback import is_loopback


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
    keys: LinkKeys | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    on_refused: Callable[[str], None] = lambda _: None,
) -> JoinedTransport:
    """Return a transport that reaches every rank, once all have joined. Raises what `join_ranks` raises.

    With `keys` every connection is authenticated and encrypted; without, this rank may listen on loopback only, and
    `InputError` is raised for another address. `endpoints[r]` is where rank `r` listens. `listener` is this rank's own
    listening socket; it stays open after the transport is closed. `on_refused` gets the address of each caller that was
    turned away; `max_message_bytes` bounds a message that arrives before its receive.
    """
    check_may_listen(str(listener.getsockname()[0]), keys)
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
            keys=keys,
            max_message_bytes=max_message_bytes,
            on_refused=on_refused,
        )
    return join_ranks(
        greeting,
        endpoints,
        listener.dup(),
        timeout_s,
        heartbeat_s=heartbeat_s,
        peer_timeout_s=peer_timeout_s,
        on_loss=on_loss,
        on_link=on_link,
        keys=keys,
        max_message_bytes=max_message_bytes,
        on_refused=on_refused,
    )


def check_may_listen(host: str, keys: LinkKeys | None) -> None:
    """Raise `InputError` if other machines reach a rank that listens at `host` and there are no `keys`."""
    if keys is None and not is_loopback(host):
        raise InputError(
            f"this rank listens at {host} without keys: any machine that reaches it could join or read the run",
            hint="agents hand out keys; a run by hand needs keys.json in each worker's folder, or host: 127.0.0.1",
        )
