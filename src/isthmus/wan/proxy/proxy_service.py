"""`ProxyService`: the proxy of a site: routes for its workers, tunnels to other sites, what those may reach here."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

from isthmus.core.errors import ProtocolError, UnavailableError
from isthmus.wan.dial import MAX_HEAD_BYTES, format_address
from isthmus.wan.legs.datagram_entrance import DatagramEntrance
from isthmus.wan.legs.leg import Leg
from isthmus.wan.legs.leg_entrance import LegEntrance
from isthmus.wan.legs.leg_greeting import LegListener, OpenedLeg
from isthmus.wan.legs.roce_host import RoceHost
from isthmus.wan.proxy.connect_target import connect_target
from isthmus.wan.proxy.dialled_proxy import DialledProxy
from isthmus.wan.proxy.pick_proxy import pick_proxy
from isthmus.wan.proxy.proxy_config import ProxyConfig
from isthmus.wan.proxy.redirected_workers import RedirectedWorkers, reset
from isthmus.wan.proxy.tunnel_shell import RefusedTargetError, TunnelShell
from isthmus.wan.tcp_listener import listen
from isthmus.wan.tunnel.incoming_bytes import CreditBudget
from isthmus.wan.tunnel.tunnel import BUDGET_BYTES, Tunnel
from isthmus.wan.tunnel.tunnel_legs import SILENCE_S
from isthmus.wan.udp_socket import UdpSocket

REQUEST_TIMEOUT_S = 10.0
"""Longest time from a worker's connection to its whole request."""

OPEN_TIMEOUT_S = 30.0
"""Longest time from a request to its answer."""

MAX_REQUESTS = 512
"""Most workers that wait for their connection."""

MAX_TUNNELS_OF_A_SITE = 32
"""Most tunnels that a site may have open here."""

_OPENED = b"HTTP/1.1 200 Connection established\r\n\r\n"


class ProxyService:
    """Runs on `loop` between `start` and `close`."""

    def __init__(self, config: ProxyConfig, loop: asyncio.AbstractEventLoop) -> None:
        self.config, self._loop = config, loop
        self.is_closed = False
        self.listens_at: str | None = None
        """Address for proxies of other sites, once started."""
        self.dialled: dict[str, list[DialledProxy]] = {}
        self.accepted: dict[tuple[str, bytes], TunnelShell] = {}
        self._budgets = {site: CreditBudget(BUDGET_BYTES) for site in config.keys}
        self.entrance: LegEntrance | None = None
        self.roce_host: RoceHost | None = None
        self.datagrams: DatagramEntrance | None = None
        self._routes: dict[str, socket.socket] = {}
        self._redirected: RedirectedWorkers | None = None
        self._requests: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Listen, and dial the other sites; raise `UnavailableError` if an address cannot be bound."""
        try:
            keys = LegListener(self.config.site, self.config.keys)
            listener = None if self.config.listen is None else listen(*self.config.listen)
            if listener is not None or self.config.roce is not None:
                self.entrance = LegEntrance(listener, keys, self._admit, self._loop)
                self.roce_host = self._open_host(self.entrance)
            if listener is not None:
                host, port = listener.getsockname()[:2]
                self.datagrams = DatagramEntrance(UdpSocket(host, port), keys, self._admit, self._loop)
                self.listens_at = format_address(host, port)
            if self.config.redirect:
                self._redirected = RedirectedWorkers(self.config, self._loop, self._accept_redirected)
            for site in self.config.peers:
                port = self.config.worker_ports.get(site, 0)
                self._routes[site] = route = listen(self.config.workers, port)
                route.setblocking(False)
                self._loop.add_reader(route, self._accept_worker, site, route)
        except UnavailableError:
            self.close("it did not start")
            raise
        for site, addresses in self.config.peers.items():
            self.dialled[site] = [
                DialledProxy(self.config, site, address, self._loop, self.roce_host) for address in addresses
            ]
        for proxies in self.dialled.values():
            for proxy in proxies:
                proxy.start()

    def _open_host(self, entrance: LegEntrance) -> RoceHost | None:
        if (roce := self.config.roce) is None:
            return None
        return RoceHost(
            roce.nic, roce.doors, self._loop, entrance.greet,
            mtu_bytes=roce.mtu_bytes, round_trip_s=roce.round_trip_s,
            silence_s=min((self.config.legs(site).silence_s for site in self.config.keys), default=SILENCE_S),
        )  # fmt: skip

    def routes(self) -> dict[str, dict[str, str]]:
        """Return {this site: {other site: "host:port"}}: what workers dial, as a file of routes has it."""
        found = {site: format_address(*listener.getsockname()[:2]) for site, listener in self._routes.items()}
        return {self.config.site: found}

    def statistics(self) -> dict[str, Any]:
        """Return the state of each tunnel as JSON values."""
        tunnels = [
            _tunnel_view(proxy.shell, site=site, direction="dialled")
            | {"proxy": format_address(*proxy.address), "num_tunnels": proxy.num_tunnels, "last_end": proxy.last_end}
            for site, proxies in self.dialled.items()
            for proxy in proxies
        ]
        tunnels += [
            _tunnel_view(shell, site=site, direction="accepted") | {"id": name.hex()}
            for (site, name), shell in self.accepted.items()
        ]
        entrances = (self.entrance, self.datagrams, self.roce_host)
        refused = sum(one.num_refused for one in entrances if one is not None)
        found = {"site": self.config.site, "tunnels": tunnels, "num_refused_callers": refused}
        if self.roce_host is not None:
            found["gateways_left"] = self.roce_host.num_left
        return found

    def close(self, reason: str) -> None:
        """End all tunnels: the other sites learn why; close all sockets."""
        if self.is_closed:
            return
        self.is_closed = True
        if self.entrance is not None:
            self.entrance.close()
        if self._redirected is not None:
            self._redirected.close()
        for listener in self._routes.values():
            self._loop.remove_reader(listener)
            listener.close()
        for task in list(self._requests):
            task.cancel()
        for proxy in (one for proxies in self.dialled.values() for one in proxies):
            proxy.close(reason)
        for shell in list(self.accepted.values()):
            shell.close(reason)
        for one in (self.datagrams, self.roce_host):
            if one is not None:
                one.close()

    def _admit(self, opened: OpenedLeg) -> Callable[[Leg], None] | None:
        key = opened.site, opened.tunnel
        if key not in self.accepted:
            of_site = sum(site == opened.site for site, _ in self.accepted)
            if not opened.is_new:
                return None
            if of_site >= MAX_TUNNELS_OF_A_SITE:
                raise ProtocolError(f"{opened.site} has {of_site} tunnels here already")
            budget = self._budgets[opened.site]
            legs = self.config.legs(opened.site)
            tunnel = Tunnel(
                is_dialler=False, num_legs=0, now_s=self._loop.time(), budget=budget,
                silence_s=legs.silence_s, ping_s=legs.ping_s,
            )  # fmt: skip
            self.accepted[key] = TunnelShell(
                tunnel,
                self._loop,
                connect=lambda target: connect_target(self._loop, target, self.config.allow),
                on_end=lambda _: self._forget(key),
                bytes_per_s=legs.bytes_per_s,
            )
        return partial(self.accepted[key].add_leg, index=opened.index)

    def _accept_redirected(self, site: str, sock: socket.socket, target: str) -> None:
        if len(self._requests) >= MAX_REQUESTS:
            sock.close()
        else:
            self._serve(self._serve_redirected(site, sock, target))

    async def _serve_redirected(self, site: str, sock: socket.socket, target: str) -> None:
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await self._shell_to(site).open(sock, target, b"", b"")
        except (RefusedTargetError, OSError):  # a time-out is an OSError
            reset(sock)
        except asyncio.CancelledError:
            sock.close()
            raise

    def _forget(self, key: tuple[str, bytes]) -> None:
        self.accepted.pop(key, None)

    def _accept_worker(self, site: str, listener: socket.socket) -> None:
        try:
            sock, address = listener.accept()
        except OSError:
            return
        sock.setblocking(False)
        client = ipaddress.ip_address(str(address[0]).partition("%")[0])
        is_client = any(client.version == one.version and client in one for one in self.config.clients)
        if not is_client or len(self._requests) >= MAX_REQUESTS:
            sock.close()
            return
        self._serve(self._serve_worker(site, sock))

    def _serve(self, serving: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(serving)
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)

    def _shell_to(self, site: str) -> TunnelShell:
        proxies = self.dialled[site]
        return proxies[pick_proxy([one.load() for one in proxies])].shell

    async def _serve_worker(self, site: str, sock: socket.socket) -> None:
        try:
            try:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    target, rest = await self._read_request(sock)
                async with asyncio.timeout(OPEN_TIMEOUT_S):
                    await self._shell_to(site).open(sock, target, rest, _OPENED)
            except RefusedTargetError as error:
                await self._loop.sock_sendall(sock, f"HTTP/1.1 {error.message}\r\n\r\n".encode("ascii", "replace"))
                sock.close()
            except TimeoutError:
                with suppress(OSError):
                    await self._loop.sock_sendall(sock, b"HTTP/1.1 503 no answer from the far proxy\r\n\r\n")
                sock.close()
        except OSError:
            sock.close()
        except asyncio.CancelledError:
            sock.close()
            raise

    async def _read_request(self, sock: socket.socket) -> tuple[str, bytes]:
        """Return the target of a CONNECT request, and the bytes after it."""
        head = b""
        while b"\r\n\r\n" not in head:
            data = await self._loop.sock_recv(sock, MAX_HEAD_BYTES)
            head += data
            if not data or len(head) > MAX_HEAD_BYTES:
                raise RefusedTargetError("400 Bad Request")
        head, _, rest = head.partition(b"\r\n\r\n")
        words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(words) != 3 or words[0] != "CONNECT" or not words[2].startswith("HTTP/1."):
            raise RefusedTargetError("405 Only CONNECT")
        return words[1], rest


def _tunnel_view(shell: TunnelShell, *, site: str, direction: str) -> dict[str, Any]:
    tunnel = shell.tunnel
    return {
        "peer": site,
        "direction": direction,
        "legs": tunnel.num_legs,
        "streams": tunnel.num_streams,
        "sent_bytes": shell.counters.sent_bytes,
        "received_bytes": shell.counters.received_bytes,
        "held_bytes": tunnel.num_held_bytes,
        "legs_lost": shell.counters.num_legs_lost,
        "frames_again": tunnel.num_frames_again,
    }
