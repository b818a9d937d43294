"""Emulated links without root: HTTP CONNECT proxies whose bytes pass through two shaped link directions.

Each cluster has two listeners per other cluster, for runs and for other traffic. All connections share
one `LinkDirection` each way; with `runs_first`, each kind of traffic has its own. The CONNECT handshake
crosses the link too, so dialling takes a round trip.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import TypeAlias

from isthmus.core.errors import InputError, NotFoundError, UnavailableError
from isthmus.core.pool import Pool
from isthmus.wan.control.wan_topology import Booking, TransferBooking
from isthmus.wan.dial import MAX_HEAD_BYTES, format_address, parse_address
from isthmus.wan.edge.link_promises import LinkPromises, require_known_ends
from isthmus.wan.link_direction import DeliveredChunk, HalfStream, LinkDirection, close_with_reset
from isthmus.wan.shaper import Flow, Shaper, links_both_ways

ClusterPair: TypeAlias = tuple[str, str]
"""(source, target) cluster of a direction."""

LinkRecord: TypeAlias = "Callable[[ClusterPair, DeliveredChunk], None]"
"""Gets every chunk that a link delivers."""

CONNECT_TIMEOUT_S = 10.0
"""Time limit for a client's CONNECT request, and for connecting to the worker at the far end."""


class _RefusedError(UnavailableError):
    """The HTTP status with which to refuse a CONNECT request."""


class ProxyConnection:
    """One proxied connection: the CONNECT handshake, then a `HalfStream` per direction until both finish."""

    def __init__(
        self,
        client: socket.socket,
        forward: LinkDirection,
        backward: LinkDirection,
        promises: tuple[LinkPromises, LinkPromises],
    ) -> None:
        self.client, self.forward, self.backward, self.promises = client, forward, backward, promises
        self.worker: socket.socket | None = None
        self._halves: list[HalfStream] = []
        self._done = asyncio.Event()
        self._broken = False

    async def run(self) -> None:
        """Serve the connection, then close both sockets; cancellation resets them."""
        flows = Flow(), Flow()
        try:
            try:
                rest = await self._connect_worker(flows)
            except _RefusedError as refusal:
                await self._answer(refusal.message)
                return
            await self._answer("200 OK")
            await self._relay(flows, rest)
        except OSError:
            self._broken = True  # the client disconnected during the handshake
        except asyncio.CancelledError:
            self._broken = True
            raise
        finally:
            self.close()

    async def _connect_worker(self, flows: tuple[Flow, Flow]) -> bytes:
        """Read the CONNECT request and connect to the worker; return the bytes after the request."""
        if self.forward.is_cut:
            raise _RefusedError("503 Link Cut")
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            head, rest = await self._read_head()
        host, port = _requested_target(head)
        peer, numeric = self.client.getpeername()[0], "127.0.0.1" if host == "localhost" else host
        flows[0].limit = self.promises[0].limit(host=numeric, port=port, peer=peer)
        flows[1].limit = self.promises[1].limit(host=peer, port=None, peer=numeric)
        await self.forward.transmit(0, flows[0])
        try:
            self.worker = await _connect_to_worker(host, port)
        except _RefusedError:
            await self.backward.transmit(0, flows[1])
            raise
        await self.backward.transmit(0, flows[1])
        return rest

    async def _read_head(self) -> tuple[bytes, bytes]:
        loop, head = asyncio.get_running_loop(), b""
        while b"\r\n\r\n" not in head:
            data = await loop.sock_recv(self.client, MAX_HEAD_BYTES)
            if not data or len(head) > MAX_HEAD_BYTES:
                raise _RefusedError("400 Bad Request")
            head += data
        head, _, rest = head.partition(b"\r\n\r\n")
        return head, rest

    async def _answer(self, status: str) -> None:
        await asyncio.get_running_loop().sock_sendall(self.client, f"HTTP/1.1 {status}\r\n\r\n".encode())

    async def _relay(self, flows: tuple[Flow, Flow], rest: bytes) -> None:
        if self.worker is None:
            return
        self._halves = [
            HalfStream(self.forward, self.client, self.worker, flows[0], self._on_half_finished),
            HalfStream(self.backward, self.worker, self.client, flows[1], self._on_half_finished),
        ]
        if rest:
            self._halves[0].send(rest)
        for half in self._halves:
            half.set_reading(True)
        await self._done.wait()

    def _on_half_finished(self, error: OSError | None) -> None:
        if error is not None:
            self._broken = True
        if self._broken or all(half.finished for half in self._halves):
            self._done.set()

    def close(self, task: object = None) -> None:
        """Close both sockets, with a reset if the connection broke; idempotent.

        Also the done callback of the `task` that runs the connection.
        """
        del task
        for half in self._halves:
            half.finish(None)
        for sock in (self.client, self.worker):
            if sock is not None and sock.fileno() >= 0 and self._broken:
                close_with_reset(sock)
            elif sock is not None:
                sock.close()


class TcpRelay:
    """All links of a pool on the running event loop (`wan.precise_timing.precise_event_loop` keeps the times exact).

    After `await start()`, `routes()` returns the address that each cluster dials for each other one;
    `await close()` breaks every connection. A link given in one direction only is mirrored. With
    `runs_first`, other traffic (`other_routes`) gets the bandwidth that runs leave; without it all
    connections share equally. `record` gets the chunks of runs with their direction. Connections that `bookings` match
    have the rates that those have at `at_s`, and all others of their link share the rest.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        seed: int = 0,
        host: str = "127.0.0.1",
        runs_first: bool = False,
        record: LinkRecord | None = None,
        bookings: Sequence[Booking | TransferBooking] = (),
        at_s: float = 0.0,
    ) -> None:
        self.pool, self.host, self.runs_first, self._record = pool, host, runs_first, record
        self.links = links_both_ways(pool)
        require_known_ends(bookings, [cluster.name for cluster in pool.clusters])
        self._promises = {ends: LinkPromises(link, bookings, at_s) for ends, link in self.links.items()}
        self._rngs = {ends: Random(f"{seed}/{ends[0]}/{ends[1]}") for ends in self.links}  # noqa: S311 - seeded, so that runs repeat; no secret
        self.directions: dict[ClusterPair, LinkDirection] = {}
        self.other_directions: dict[ClusterPair, LinkDirection] = {}
        self._listeners: dict[ClusterPair, socket.socket] = {}
        self._other_listeners: dict[ClusterPair, socket.socket] = {}
        self._acceptors: list[asyncio.Task[None]] = []
        self._connections: dict[asyncio.Task[None], frozenset[str]] = {}

    async def start(self) -> None:
        """Listen for every pair; if a port cannot be bound, close all and raise `UnavailableError`."""
        loop = asyncio.get_running_loop()
        try:
            for ends, link in self.links.items():
                shaper = Shaper(link, self._rngs[ends], self.links[ends[::-1]])
                record = None if self._record is None else partial(self._record, ends)
                self.directions[ends] = self.other_directions[ends] = LinkDirection(shaper, loop, record)
                if self.runs_first:
                    shaper.low_priority = Shaper(link, self._rngs[ends], self.links[ends[::-1]])
                    self.other_directions[ends] = LinkDirection(shaper.low_priority, loop)
                for listeners in (self._listeners, self._other_listeners):
                    listeners[ends] = socket.create_server((self.host, 0), backlog=128)
                    listeners[ends].setblocking(False)
        except OSError as error:
            await self.close()
            raise UnavailableError(
                f"cannot listen on {self.host} for the link from {ends[0]} to {ends[1]}: {error.strerror}",
                hint="choose a host of this machine, or raise the open-file limit",
            ) from error
        kinds = (self._listeners, self.directions), (self._other_listeners, self.other_directions)
        self._acceptors = [
            loop.create_task(self._accept(listeners[ends], ends, directions))
            for listeners, directions in kinds
            for ends in self.links
        ]

    def routes(self) -> dict[str, dict[str, str]]:
        """Return {cluster: {other cluster: "host:port"}}: the proxy that `cluster` dials for the other."""
        return _addresses(self._listeners)

    def other_routes(self) -> dict[str, dict[str, str]]:
        """Return the routes for traffic other than runs."""
        return _addresses(self._other_listeners)

    def cut(self, a: str, b: str, *, reset: bool = False) -> None:
        """Cut the link both ways: refuse new connections; stall existing ones, or `reset` them."""
        for ends in ((a, b), (b, a)):
            self._direction(ends).cut()
            self.other_directions[ends].cut()
        if reset:
            for connection, joined in self._connections.items():
                if joined == {a, b}:
                    connection.cancel()

    def restore(self, a: str, b: str) -> None:
        """Restore a cut link; stalled connections continue."""
        for ends in ((a, b), (b, a)):
            self._direction(ends).restore()
            self.other_directions[ends].restore()

    async def close(self) -> None:
        """Stop listening, break every connection and close all sockets."""
        tasks = [*self._acceptors, *self._connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener in (*self._listeners.values(), *self._other_listeners.values()):
            listener.close()
        for direction in (*self.directions.values(), *self.other_directions.values()):
            direction.clear()
        self._listeners.clear()
        self._other_listeners.clear()

    def _direction(self, ends: ClusterPair) -> LinkDirection:
        if ends not in self.directions:
            known = ", ".join(" to ".join(pair) for pair in sorted(self.directions))
            raise NotFoundError(f"no link from {ends[0]} to {ends[1]}", hint=f"available: {known}")
        return self.directions[ends]

    async def _accept(
        self, listener: socket.socket, ends: ClusterPair, directions: Mapping[ClusterPair, LinkDirection]
    ) -> None:
        loop, there, back = asyncio.get_running_loop(), directions[ends], directions[ends[::-1]]
        while True:
            try:
                client, _ = await loop.sock_accept(listener)
            except OSError:  # out of descriptors, or the client disconnected
                await asyncio.sleep(0.1)
                continue
            _configure_socket(client)
            connection = ProxyConnection(client, there, back, (self._promises[ends], self._promises[ends[::-1]]))
            task = loop.create_task(connection.run())
            self._connections[task] = frozenset(ends)
            task.add_done_callback(self._connections.pop)
            task.add_done_callback(connection.close)  # also if the task never ran


def _addresses(listeners: Mapping[ClusterPair, socket.socket]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for (source, target), listener in listeners.items():
        found.setdefault(source, {})[target] = format_address(*listener.getsockname()[:2])
    return found


def _configure_socket(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _requested_target(head: bytes) -> tuple[str, int]:
    """Return host and port of a CONNECT request; raise `_RefusedError` unless it is a loopback address."""
    method, _, rest = head.split(b"\r\n", 1)[0].decode("latin-1").partition(" ")
    if method != "CONNECT":
        raise _RefusedError("405 Only CONNECT")
    try:
        host, port = parse_address(rest.rpartition(" ")[0])
    except InputError:
        raise _RefusedError("400 Bad Request") from None
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local:
        raise _RefusedError("403 Emulated links join workers on loopback addresses of this machine only")
    return host, port


async def _connect_to_worker(host: str, port: int) -> socket.socket:
    """Return a socket connected to the worker at the far end of the link."""
    address = "127.0.0.1" if host == "localhost" else host
    worker = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        _configure_socket(worker)
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await asyncio.get_running_loop().sock_connect(worker, (address, port))
    except OSError as error:
        worker.close()
        why = os.strerror(error.errno) if error.errno else "timed out"
        raise _RefusedError(f"502 {why} at {format_address(host, port)}") from error
    except BaseException:
        worker.close()
        raise
    return worker
