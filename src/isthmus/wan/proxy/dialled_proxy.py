"""`DialledProxy`: the tunnel to one proxy of another site, dialled from here."""

from __future__ import annotations

import asyncio
import logging
import os
import socket

from isthmus.core.errors import IsthmusError, NotFoundError, UnavailableError
from isthmus.core.messages.datagram import Address
from isthmus.wan.dial import format_address, parse_address
from isthmus.wan.legs.dial_datagram_leg import dial_datagram_leg
from isthmus.wan.legs.dial_leg import connect_tcp, dial_leg
from isthmus.wan.legs.leg import Leg
from isthmus.wan.legs.leg_greeting import TUNNEL_ID_BYTES, LegDialler
from isthmus.wan.legs.roce_host import RoceHost
from isthmus.wan.proxy.pick_proxy import ProxyLoad
from isthmus.wan.proxy.proxy_config import ProxyConfig
from isthmus.wan.proxy.tunnel_shell import TunnelShell
from isthmus.wan.read_route import read_route
from isthmus.wan.tunnel.tunnel import Tunnel

_log = logging.getLogger(__name__)


class DialledProxy:
    """The tunnel to one proxy of another site; a new one follows where it ends."""

    def __init__(
        self,
        config: ProxyConfig,
        site: str,
        address: Address,
        loop: asyncio.AbstractEventLoop,
        host: RoceHost | None = None,
    ) -> None:
        """`host` has the queue pairs, where the legs to `site` are such."""
        self._config, self.site, self.address, self._loop, self._host = config, site, address, loop, host
        self._is_closed = False
        self.num_tunnels = 0
        self.last_end: str | None = None
        self._last_error: str | None = None
        self.shell = self._new_shell()

    def load(self) -> ProxyLoad:
        """Return what `pick_proxy` compares."""
        tunnel = self.shell.tunnel
        return ProxyLoad(tunnel.num_legs, tunnel.num_streams, tunnel.num_held_bytes)

    def _new_shell(self) -> TunnelShell:
        config, legs = self._config, self._config.legs(self.site)
        name, self.num_tunnels = os.urandom(TUNNEL_ID_BYTES), self.num_tunnels + 1
        is_new = True

        async def dial(index: int) -> Leg | None:
            nonlocal is_new
            sites = config.site, self.site
            try:
                leg = await self._dial(LegDialler(config.keys[self.site], sites, name, index, is_new=is_new))
            except (OSError, IsthmusError) as error:
                if str(error) != self._last_error:
                    _log.warning(
                        "no leg to %s at %s: %s", self.site, format_address(*self.address), error or "no answer"
                    )
                self._last_error = str(error)
                raise
            is_new, self._last_error = False, None
            return leg

        tunnel = Tunnel(
            is_dialler=True,
            num_legs=legs.num_legs,
            now_s=self._loop.time(),
            silence_s=legs.silence_s,
            ping_s=legs.ping_s,
        )
        return TunnelShell(tunnel, self._loop, dial=dial, on_end=self._restart, bytes_per_s=legs.bytes_per_s)

    async def _dial(self, greeting: LegDialler) -> Leg | None:
        legs = self._config.legs(self.site)
        if legs.transport == "datagram":
            return await dial_datagram_leg(self._loop, self.address, greeting, error_correction=legs.error_correction)
        if legs.transport == "roce":
            return await dial_leg(self._loop, self._open_queue_pair, greeting, max(2.0, 2 * legs.silence_s))
        return await dial_leg(self._loop, self._connect, greeting)

    async def _connect(self) -> socket.socket:
        route: Address | None = None
        if self._config.via is not None:
            try:
                route = parse_address(read_route(self._config.via, self._config.site, self.site))
            except NotFoundError:  # no route to this site: directly
                route = None
        return await connect_tcp(self._loop, self.address, route, self._config.legs(self.site).bytes_per_s)

    async def _open_queue_pair(self) -> socket.socket:
        if self._host is None:
            raise UnavailableError("this proxy has no queue pairs")
        return self._host.open(self._config.legs(self.site).far_nic)

    def start(self) -> None:
        """Dial the first legs."""
        self.shell.start()

    def _restart(self, reason: str) -> None:
        self.last_end = reason
        if not self._is_closed:
            self.shell = self._new_shell()
            self._loop.call_soon(self.start)

    def close(self, reason: str) -> None:
        """End the tunnel for good."""
        self._is_closed = True
        self.shell.close(reason)
