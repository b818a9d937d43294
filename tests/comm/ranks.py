"""Ranks of one job inside this process, for tests: TCP transports and process groups over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

from isthmus.comm.frame import Greeting
from isthmus.comm.gloo import local_group
from isthmus.comm.group import IsthmusGroup
from isthmus.comm.mesh import Endpoint, connect, listen
from isthmus.comm.tcp import TcpTransport

LIMIT = timedelta(seconds=30)


def tcp_transports(
    size: int,
    route: str | None = None,
    *,
    lanes: int = 1,
    heartbeat_s: float = 2.0,
    peer_timeout_s: float = 30.0,
) -> list[TcpTransport]:
    """Return `size` connected transports; every connection goes through `route` if one is given."""
    listeners = [listen("127.0.0.1") for _ in range(size)]
    endpoints = [Endpoint("127.0.0.1", one.getsockname()[1], route, lanes) for one in listeners]

    def make(rank: int) -> TcpTransport:
        greeting = Greeting("job-1", 1, rank, size)
        met = connect(greeting, endpoints, listeners[rank], timeout_s=20)
        return TcpTransport(
            greeting,
            endpoints,
            met,
            listeners[rank],
            heartbeat_s=heartbeat_s,
            peer_timeout_s=peer_timeout_s,
        )

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(make, range(size)))


@contextmanager
def isthmus_groups(clusters: Sequence[str], route: str | None = None) -> Iterator[list[IsthmusGroup]]:
    """Yield one group per rank; `clusters[r]` is where rank `r` runs."""
    transports = tcp_transports(len(clusters), route)

    def make(transport: TcpTransport) -> IsthmusGroup:
        return IsthmusGroup(transport, clusters, local_group(transport, clusters, "127.0.0.1", LIMIT))

    with ThreadPoolExecutor(len(clusters)) as pool:
        groups = list(pool.map(make, transports))
        try:
            yield groups
        finally:
            list(pool.map(lambda group: group.shutdown(), groups))
