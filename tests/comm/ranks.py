"""Ranks of one job inside this process, for tests: TCP transports and process groups over them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from isthmus.comm.channel.link_keys import LinkKeys
from isthmus.comm.connect_transport import connect_transport
from isthmus.comm.group.composed.composition import Composition, agree
from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.comm.group.transport_messages import GROUP_TAGS
from isthmus.comm.group.vendors.join_vendors import join_vendors
from isthmus.comm.group.vendors.vendor import Vendor
from isthmus.comm.group.vendors.vendor_group import VendorGroup
from isthmus.comm.tcp.endpoint import Endpoint
from isthmus.comm.tcp.greeting import Greeting
from isthmus.comm.tcp.peer import Peer
from isthmus.comm.tcp.rendezvous import connect_ranks
from isthmus.comm.tcp.tcp_transport import TcpTransport
from isthmus.comm.transport.memory_transport import MemoryTransport, memory_transports
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
    rdma: Callable[[int], str] | None = None,
) -> list[JoinedTransport]:
    """Return `size` transports that have met; every connection goes through `route` if one is given.

    With `sites`, the site of each rank, links have keys; with `rdma`, the device of each rank, they go on by RDMA.
    """
    listeners = [listen("127.0.0.1") for _ in range(size)]
    ports = [one.getsockname()[1] for one in listeners]

    def make(rank: int) -> JoinedTransport:
        device = rdma and rdma(rank)
        endpoints = [Endpoint("127.0.0.1", port, route, lanes, rdma=device) for port in ports]
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


def group_over(
    clusters: Sequence[str], transport: JoinedTransport, composition: Composition | None = None
) -> IsthmusGroup:
    """Return one rank's group; all ranks make theirs at once."""
    near = [rank for rank, cluster in enumerate(clusters) if cluster == clusters[transport.rank]]
    libraries = join_vendors(transport, near, "127.0.0.1", LIMIT)
    return IsthmusGroup(transport, clusters, libraries, composition, timeout=LIMIT)


@contextmanager
def isthmus_groups(
    clusters: Sequence[str], route: str | None = None, composition: Composition | None = None
) -> Iterator[list[IsthmusGroup]]:
    """Yield one group per rank; `clusters[r]` is where rank `r` runs."""
    transports = tcp_transports(len(clusters), route)
    with ThreadPoolExecutor(len(clusters)) as pool:
        groups = list(pool.map(partial(group_over, clusters, composition=composition), transports))
        try:
            yield groups
        finally:
            list(pool.map(lambda group: group.shutdown(), groups))


def library_groups(
    clusters: str, vendor: Vendor, timeout_s: float = 30.0, *, names_sources: bool = False
) -> list[IsthmusGroup]:
    """Return groups over the fake transport whose ranks have `vendor` inside their clusters."""
    timeout, composition = timedelta(seconds=timeout_s), agree([{"cpu": vendor}] * len(clusters), clusters)
    stores = {one: dist.HashStore() for one in clusters}

    def make(transport: MemoryTransport) -> IsthmusGroup:
        own = clusters[transport.rank]
        near = [rank for rank, cluster in enumerate(clusters) if cluster == own]
        place, size, libraries = near.index(transport.rank), len(near), {}
        if size > 1:
            backend = vendor.create(stores[own], place, size, "127.0.0.1", timeout)
            libraries["cpu"] = VendorGroup(vendor, backend, place, size)
        return IsthmusGroup(
            transport, list(clusters), libraries, composition, names_sources=names_sources, timeout=timeout
        )

    with ThreadPoolExecutor(len(clusters)) as pool:
        return list(pool.map(make, memory_transports(len(clusters))))


def part_of(group: IsthmusGroup, ranks: Sequence[int]) -> IsthmusGroup:
    """Return the part of `group` that has `ranks`, without libraries."""
    number = 1 + sum(1 << rank for rank in ranks)
    return IsthmusGroup(group.transport, group.clusters, ranks=ranks, tag_base=number * GROUP_TAGS, timeout=LIMIT)
