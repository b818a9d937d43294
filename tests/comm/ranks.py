"""Ranks of one job inside this process, for tests: TCP transports and process groups over them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

from isthmus.comm.channel.link_keys import LinkKeys
from isthmus.comm.connect_transport import connect_transport
from isthmus.comm.group.gloo_group import join_gloo_group
from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.comm.tcp.endpoint import Endpoint
from isthmus.comm.tcp.greeting import Greeting
from isthmus.comm.tcp.peer import Peer
from isthmus.comm.tcp.rendezvous import connect_ranks
from isthmus.comm.tcp.tcp_transport import TcpTransport
from isthmus.comm.transport.transport import JoinedTransport
from isthmus.core.base_model import TransportKind
from isthmus.wan import listen

LIMIT = timedelta(seconds=30)


def link_keys(sites: Sequence[str], rank: int, master: str = "secret") -> LinkKeys:
    """Return the keys that the site of `rank` holds; `sites[r]` is the site of rank `r`."""
    own = sites[rank]
    pairs = {site: f"{master}/{'/'.join(sorted((own, site)))}" for site in sites}
    return LinkKeys(own, tuple(sites), {site: hashlib.sha256(pair.encode()).digest() for site, pair in pairs.items()})


def transports(
    size: int,
    route: str | None = None,
    *,
    kind: TransportKind = "thread",
    lanes: int = 1,
    heartbeat_s: float = 2.0,
    peer_timeout_s: float = 30.0,
    sites: Sequence[str] = (),
) -> list[JoinedTransport]:
    """Return `size` transports that have met; every connection goes through `route` if one is given.

    With `sites`, the site of each rank, links have keys.
    """
    listeners = [listen("127.0.0.1") for _ in range(size)]
    endpoints = [Endpoint("127.0.0.1", one.getsockname()[1], route, lanes) for one in listeners]

    def make(rank: int) -> JoinedTransport:
        with listeners[rank] as listener:
            return connect_transport(
                kind,
                Greeting("job-1", 1, rank, size),
                endpoints,
                listener,
                60,
                heartbeat_s=heartbeat_s,
                peer_timeout_s=peer_timeout_s,
                keys=link_keys(sites[:size], rank) if sites else None,
            )

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(make, range(size)))


tcp_transports: Callable[..., list[TcpTransport]] = transports
"""Those of threads."""


def tcp_ranks(
    peer_types: Sequence[type[Peer]], *, linger_s: float, lanes: int = 1, heartbeat_s: float = 2.0
) -> list[TcpTransport]:
    """Return one transport of this process per type of peers; each closes for up to `linger_s`."""
    listeners = [listen("127.0.0.1") for _ in peer_types]
    endpoints = [Endpoint("127.0.0.1", one.getsockname()[1], None, lanes) for one in listeners]

    def make(rank: int) -> TcpTransport:
        greeting = Greeting("job-1", 1, rank, len(peer_types))
        sockets = connect_ranks(greeting, endpoints, listeners[rank], 60)
        return TcpTransport(
            greeting,
            endpoints,
            sockets,
            listeners[rank],
            heartbeat_s=heartbeat_s,
            linger_s=linger_s,
            peer_type=peer_types[rank],
        )

    with ThreadPoolExecutor(len(peer_types)) as pool:
        return list(pool.map(make, range(len(peer_types))))


def group_over(clusters: Sequence[str], transport: JoinedTransport) -> IsthmusGroup:
    """Return one rank's group; all ranks make theirs at once."""
    near = [rank for rank, cluster in enumerate(clusters) if cluster == clusters[transport.rank]]
    return IsthmusGroup(transport, clusters, join_gloo_group(transport, near, "127.0.0.1", LIMIT), timeout=LIMIT)


@contextmanager
def isthmus_groups(clusters: Sequence[str], route: str | None = None) -> Iterator[list[IsthmusGroup]]:
    """Yield one group per rank; `clusters[r]` is where rank `r` runs."""
    transports = tcp_transports(len(clusters), route)
    with ThreadPoolExecutor(len(clusters)) as pool:
        groups = list(pool.map(partial(group_over, clusters), transports))
        try:
            yield groups
        finally:
            list(pool.map(lambda group: group.shutdown(), groups))
