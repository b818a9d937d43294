"""`DialledProxy`: the tunnel to one proxy of another site, dialled from here."""

from __future__ import annotations

import asyncio
import os

from isthmus.core.messages.datagram import Address
from isthmus.wan.legs.dial_datagram_leg import dial_datagram_leg
from isthmus.wan.legs.dial_leg import dial_leg
from isthmus.wan.legs.leg import Leg
from isthmus.wan.legs.leg_greeting import TUNNEL_ID_BYTES, LegDialler
from isthmus.wan.proxy.pick_proxy import ProxyLoad
from isthmus.wan.proxy.proxy_config import ProxyConfig
from isthmus.wan.proxy.tunnel_shell import TunnelShell
from isthmus.wan.tunnel.tunnel import Tunnel


class DialledProxy:
    """The tunnel to one proxy of another site; a new one follows where it ends."""

    def __init__(self, config: ProxyConfig, site: str, address: Address, loop: asyncio.AbstractEventLoop) -> None:
        self._config, self.site, self.address, self._loop = config, site, address, loop
        self._is_closed = False
        self.num_tunnels = 0
        self.last_end: str | None = None
        self.shell = self._new_shell()

    def load(self) -> ProxyLoad:
        """Return what `pick_proxy` compares."""
        tunnel = self.shell.tunnel
        return ProxyLoad(tunnel.num_legs, tunnel.num_streams, tunnel.num_held_bytes)

    def _new_shell(self) -> TunnelShell:
        config = self._config
        name, self.num_tunnels = os.urandom(TUNNEL_ID_BYTES), self.num_tunnels + 1
        is_new = True

        async def dial(index: int) -> Leg | None:
            nonlocal is_new
            sites = config.site, self.site
            greeting = LegDialler(config.keys[self.site], sites, name, index, is_new=is_new)
            opens = dial_leg if config.transport == "tcp" else dial_datagram_leg
            leg = await opens(self._loop, self.address, greeting)
            is_new = False
            return leg

        tunnel = Tunnel(is_dialler=True, num_legs=config.num_legs, now_s=self._loop.time())
        return TunnelShell(tunnel, self._loop, dial=dial, on_end=self._restart)

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
