"""`GatewayService`: sockets and timers around one `Gateway` and one `SealedLink` for each other site."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
import secrets
import socket
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from isthmus.wan.dial import format_address
from isthmus.wan.gateway.gateway_config import FarSite, GatewayConfig, Network
from isthmus.wan.gateway.nic_port import NicPort, TunNics, UdpNics, bind_udp
from isthmus.wan.gateway.sealed_link import Opened, SealedLink, SendDatagram
from isthmus.wan.roce.gateway.gateway import Gateway
from isthmus.wan.roce.gateway.gateway_events import (
    GatewayEvent,
    LinkDatagrams,
    NicFrames,
    SendOnLink,
    SendToNic,
    Tick,
)
from isthmus.wan.roce.gateway.native_gateway import native_gateway

MAX_READ = 64
"""Frames or datagrams that are read before timers are looked at."""

MAX_QUEUED_ADDRESSES = 65_536


class _Site:
    """A link to another site."""

    def __init__(self, name: str, far: FarSite, config: GatewayConfig, form: type[Gateway]) -> None:
        self.name, self.networks = name, far.networks
        self.gateway = form(far.settings or config.settings, secrets.randbelow(2**32 - 1) + 1)
        self.link = SealedLink(far.key, (config.site, name), far.address, lambda: secrets.randbits(32))
        self.num_unsent = 0


class GatewayService:
    """A gateway of a site, on an event loop; `form` is its state machine, the native one if that is built."""

    def __init__(
        self, config: GatewayConfig, loop: asyncio.AbstractEventLoop, form: type[Gateway] | None = None
    ) -> None:
        self.config, self._loop = config, loop
        self._form = form or native_gateway() or Gateway
        self._sites = {name: _Site(name, far, config, self._form) for name, far in config.sites.items()}
        self._nics: NicPort | None = None
        self._socket: socket.socket | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf
        self._site_of: dict[bytes, _Site | None] = {}
        self._is_near: dict[bytes, bool] = {}
        self._num_refused = self._num_strangers = 0

    def start(self) -> None:
        """Open sockets and the device; raise `UnavailableError` if one cannot be."""
        config = self.config
        self._socket = bind_udp(config.listen)
        try:
            self._nics = TunNics(config.tun) if config.tun is not None else self._open_frames()
        except BaseException:
            self._socket.close()
            raise
        self._loop.add_reader(self._socket.fileno(), self._read_link)
        self._loop.add_reader(self._nics.fileno(), self._read_nics)
        self._advance()

    def _open_frames(self) -> UdpNics:
        nics = {ipaddress.ip_address(nic).packed: place for nic, place in self.config.nics.items()}
        return UdpNics(self.config.frames or ("127.0.0.1", 0), nics)

    @property
    def listens_at(self) -> str:
        """Where datagrams of other gateways come."""
        return "" if self._socket is None else format_address(*self._socket.getsockname()[:2])

    @property
    def frames_at(self) -> str:
        """Where frames of NICs come."""
        return "" if self._nics is None else self._nics.where

    def close(self) -> None:
        """Close everything."""
        if self._timer is not None:
            self._timer.cancel()
        for port in (self._socket, self._nics):
            if port is not None:
                self._loop.remove_reader(port.fileno())
                port.close()
        self._socket = self._nics = None

    def statistics(self) -> dict[str, Any]:
        """Return the state of each link."""
        links = [
            {
                "site": one.name,
                "is_open": one.link.is_open and one.gateway.is_connected,
                "sessions": one.link.num_sessions,
                "datagrams_refused": one.link.num_refused,
                "datagrams_unsent": one.num_unsent,
                **asdict(one.gateway.statistics()),
            }
            for one in self._sites.values()
        ]
        return {
            "site": self.config.site,
            "datapath": "python" if self._form is Gateway else "native",
            "frames_refused": self._num_refused,
            "strangers": self._num_strangers,
            "links": links,
        }

    # Reading

    def _read_nics(self) -> None:
        nics = self._nics
        frames: dict[_Site, list[bytes]] = {}
        for _ in range(MAX_READ):
            frame = nics.read() if nics is not None else None
            if frame is None:
                break
            site = self._target_of(frame)
            if site is None:
                self._num_refused += 1
            else:
                frames.setdefault(site, []).append(frame)
        for site, found in frames.items():
            self._handle(site, NicFrames(found))
        self._advance()

    def _target_of(self, frame: bytes) -> _Site | None:
        """Return the site that a frame goes to, if it comes from a NIC of this one."""
        ends = _ends_of(frame)
        half = len(ends) // 2
        return self._far_site(ends[half:]) if ends and self._is_of_this_site(ends[:half]) else None

    def _read_link(self) -> None:
        opened: dict[_Site, list[bytes]] = {}
        for _ in range(MAX_READ):
            if self._socket is None:
                return
            try:
                data, address = self._socket.recvfrom(2**16)
            except (BlockingIOError, ConnectionRefusedError):
                break
            self._open(data, (address[0], address[1]), opened)
        for site, datagrams in opened.items():
            self._handle(site, LinkDatagrams(datagrams))
        self._advance()

    def _open(self, data: bytes, address: tuple[str, int], opened: dict[_Site, list[bytes]]) -> None:
        for site in self._sites.values():
            if not site.link.is_addressed(data):
                continue
            for one in site.link.receive(data, address, self._loop.time()):
                if isinstance(one, Opened):
                    opened.setdefault(site, []).append(one.content)
                else:
                    self._send(site, one)
            return
        self._num_strangers += 1

    # Writing

    def _handle(self, site: _Site, event: GatewayEvent) -> None:
        now_s = self._loop.time()
        for one in site.gateway.handle(event, now_s):
            if isinstance(one, SendOnLink):
                datagram = site.link.seal(one.data, now_s)
                if datagram is None:
                    site.num_unsent += 1
                else:
                    self._send(site, datagram)
            elif isinstance(one, SendToNic):
                self._send_to_nic(site, one.frame)

    def _send(self, site: _Site, datagram: SendDatagram) -> None:
        try:
            if self._socket is not None:
                self._socket.sendto(datagram.data, datagram.address)
        except OSError:  # full or unreachable: the gateway sends it again
            site.num_unsent += 1

    def _send_to_nic(self, site: _Site, frame: bytes) -> None:
        ends = _ends_of(frame)
        half = len(ends) // 2
        if self._far_site(ends[:half]) is not site or not self._is_of_this_site(ends[half:]):
            self._num_refused += 1
            return
        if self._nics is not None:
            self._nics.write(frame, ends[half:])

    def _far_site(self, address: bytes) -> _Site | None:
        if address not in self._site_of:
            found = (one for one in self._sites.values() if _is_in(address, one.networks))
            _remember(self._site_of, address, next(found, None))
        return self._site_of[address]

    def _is_of_this_site(self, address: bytes) -> bool:
        if address not in self._is_near:
            _remember(self._is_near, address, _is_in(address, self.config.near))
        return self._is_near[address]

    # Time

    def _advance(self) -> None:
        """Do what is due, and set the timer."""
        due_s = math.inf
        for site in self._sites.values():
            now_s = self._loop.time()
            for datagram in site.link.tick(now_s):
                self._send(site, datagram)
            if site.link.is_open and site.gateway.next_tick_s(now_s) <= now_s:
                self._handle(site, Tick())
            next_s = site.gateway.next_tick_s(now_s) if site.link.is_open else math.inf
            due_s = min(due_s, site.link.next_tick_s(), next_s)
        if self._timer is not None and self._timer_s <= due_s and self._timer_s > self._loop.time():
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if due_s < math.inf:
            self._timer_s = due_s
            self._timer = self._loop.call_at(due_s, self._wake)

    def _wake(self) -> None:
        self._timer, self._timer_s = None, math.inf
        with contextlib.suppress(BlockingIOError):
            self._advance()


def _ends_of(frame: bytes) -> bytes:
    """Return both addresses of an IP packet, nothing for what is none; the gateway checks the rest."""
    if len(frame) < 40:
        return b""
    version = frame[0] >> 4
    return frame[12:20] if version == 4 else frame[8:40] if version == 6 else b""


def _is_in(address: bytes, networks: Sequence[Network]) -> bool:
    found = ipaddress.ip_address(address)
    return any(found in network for network in networks if network.version == found.version)


def _remember(known: dict[bytes, Any], address: bytes, value: Any) -> None:
    """Remember an answer, in bounded memory: addresses come from frames."""
    if len(known) >= MAX_QUEUED_ADDRESSES:
        known.clear()
    known[address] = value
