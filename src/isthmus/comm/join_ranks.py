"""`join_ranks`: connects this rank to its neighbours in the tree of ranks, and waits until all ranks have done so."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from isthmus.comm.channel.link_keys import LinkKeys
from isthmus.comm.meeting.rank_tree import rank_tree
from isthmus.comm.tcp.endpoint import Endpoint
from isthmus.comm.tcp.greeting import Greeting
from isthmus.comm.tcp.rendezvous import connect_ranks
from isthmus.comm.tcp.tcp_transport import TcpTransport
from isthmus.core.errors import PeerError, RestartError
from isthmus.core.process.steady_clock import steady_time_s

REPORT_GRACE_S = 2.0
"""How long after the time limit a rank waits for another one to report which rank is missing."""


def join_ranks(
    greeting: Greeting,
    endpoints: Sequence[Endpoint],
    listener: socket.socket,
    timeout_s: float,
    *,
    keys: LinkKeys | None = None,
    clock: Callable[[], float] = steady_time_s,
    on_refused: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> TcpTransport:
    """Return a transport once all ranks have met, within `timeout_s`; the `options` are those of `TcpTransport`.

    With `keys`, the sites of the ranks are the clusters of the tree; without, all ranks are on one machine. The
    transport owns `listener`. Raises what `connect_ranks` raises, also for a rank that is no neighbour.
    """
    deadline_s = time.monotonic() + timeout_s
    place = rank_tree((0,) * greeting.size if keys is None else keys.sites, greeting.rank)
    try:
        channels = connect_ranks(greeting, endpoints, listener, timeout_s, clock, keys, on_refused, place.neighbours)
    except BaseException:
        listener.close()
        raise
    transport = TcpTransport(
        greeting,
        endpoints,
        channels,
        listener,
        clock=clock,
        keys=keys,
        on_refused=on_refused,
        place=place,
        **options,
    )
    if transport.wait_until_met(max(deadline_s - time.monotonic(), 0.0) + REPORT_GRACE_S):
        return transport
    error = transport.loss()
    if isinstance(error, RestartError):
        transport.abort()
        raise error
    if error is None:
        behind = ", ".join(map(str, transport.not_met))
        error = PeerError(
            f"rank {greeting.rank}: a rank that joins through rank {behind} did not join within {timeout_s:g} s",
            hint="see the logs of the ranks: one has not started, or cannot reach another",
        )
    transport.close(error.message)
    raise error
