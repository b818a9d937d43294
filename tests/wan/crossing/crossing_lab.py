"""A pool of two sites on loopback whose processes are started from `pool.yaml`, and an echo across them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.core.pool import Pool
from isthmus.wan.crossing.crossing_processes import CrossingProcesses, site_crossings
from isthmus.wan.dial import dial
from tests.free_ports import free_ports

GROUP = [{"chip": "H20", "nodes": 1, "chips_per_node": 1}]
SITES = ("hangzhou", "nanjing")


def loopback_pool(folder: Path, num_gateways: int = 0, **crossing: Any) -> Pool:
    """Return the pool, and write the key that its two sites share."""
    key = folder / "link.key"
    key.touch(mode=0o600)
    key.write_text("ab" * 32)
    clusters = []
    for number, name in enumerate(SITES):
        gateways = [
            {
                "name": f"g{one}",
                "listen": f"127.0.0.1:{free_ports(1)[0]}",
                "networks": [f"10.{number + 1}.0.0/24"],
            }
            for one in range(num_gateways)
        ]
        access = {"proxy": {"listen": f"127.0.0.1:{free_ports(1)[0]}"}, "gateways": gateways}
        clusters.append({"name": name, "owner": name, "node_groups": GROUP, "access": access})
    link = {"between": SITES, "bandwidth_gbps": 0.2, "round_trip_ms": 4, "crossing": {"key": "link.key", **crossing}}
    return Pool.model_validate({"clusters": clusters, "links": [link]})


@dataclass
class StartedSites:
    """The processes of both sites, and the routes of hangzhou's and nanjing's workers."""

    processes: dict[str, CrossingProcesses]
    routes: dict[str, str]


@contextmanager
def started_sites(pool: Pool, folder: Path, via: Path | None = None) -> Iterator[StartedSites]:
    """Start what the pool states for both sites."""
    with ExitStack() as stack:
        found = {}
        for site in SITES:
            crossings = site_crossings(pool, site, folder, folder / site, {}, via)
            assert crossings is not None
            found[site] = stack.enter_context(crossings)
        routes = {site: next(iter(one.plan.routes().values())) for site, one in found.items()}
        yield StartedSites(found, routes)


@contextmanager
def echo() -> Iterator[tuple[str, int]]:
    """Answer every connection with what it sends."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(sock: socket.socket) -> None:
        with closing(sock), suppress(OSError):
            while data := sock.recv(2**16):
                sock.sendall(data)

    def accept() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(sock,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    with closing(listener):
        yield listener.getsockname()
        listener.shutdown(socket.SHUT_RDWR)


@contextmanager
def connection(address: tuple[str, int], route: str) -> Iterator[socket.socket]:
    """Dial `address` through a route."""
    with closing(dial(address, route)) as sock:
        sock.settimeout(20)
        yield sock


def exchange(sock: socket.socket, data: bytes) -> None:
    """Send bytes and check that they come back."""
    sender = threading.Thread(target=sock.sendall, args=(data,))
    sender.start()
    back = b""
    while len(back) < len(data):
        more = sock.recv(2**16)
        assert more, "the connection broke"
        back += more
    sender.join()
    assert back == data
