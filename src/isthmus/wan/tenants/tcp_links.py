"""`TcpLinks`: a TCP connection to each other gateway, for flows that a lossy link would hold up.

The gateway with the smaller address dials. Connections are taken from gateways of the file only; the congestion control
is BBR where the kernel has it, since its rate does not follow loss.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable, Coroutine, Mapping

from isthmus.wan.tenancy.tenant_events import TcpBytes, TcpChanged, TcpResends

DIAL_S = 1.0
"""Between tries."""
_READ_BYTES = 2**18
_TCP_USER_TIMEOUT = 18
_DEAD_MS = 5000
"""Without an acknowledgement for so long, a connection ends."""
_INFO = struct.Struct("=100xI52xI")
"""Of Linux's `tcp_info`: segments sent again, and data segments sent."""

TcpEvent = TcpChanged | TcpBytes | TcpResends


class TcpLinks:
    """Connections of the gateway at `address` with `others`, by site. Events go to `give`."""

    def __init__(
        self, address: str, port: int, others: Mapping[str, str], traffic_class: int, give: Callable[[TcpEvent], None]
    ) -> None:
        self._address, self._port, self._others = address, port, dict(others)
        self._traffic_class, self._give = traffic_class, give
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen, and dial where this side dials."""
        self._server = await asyncio.start_server(self._accept, self._address, self._port)
        for site, address in self._others.items():
            if socket.inet_aton(self._address) < socket.inet_aton(address):
                self._spawn(self._keep(site, address))

    def send(self, site: str, data: bytes) -> None:
        """Send bytes; without a connection they are lost, as the gateway knows."""
        if (writer := self._writers.get(site)) is not None:
            writer.write(data)

    def end(self, site: str) -> None:
        """End a connection; the dialling side begins another one."""
        if (writer := self._writers.get(site)) is not None:
            writer.transport.abort()

    def count_resends(self) -> None:
        """Give what each connection has sent, and sent again."""
        for site, writer in self._writers.items():
            raw: socket.socket = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                data = raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                if len(data) >= _INFO.size:
                    num_resent, num_sent = _INFO.unpack_from(data)
                    self._give(TcpResends(site, num_sent, num_resent))

    async def close(self) -> None:
        """End all connections."""
        if self._server is not None:
            self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        site = next((site for site, address in self._others.items() if peer and address == peer[0]), None)
        if site is None:
            writer.transport.abort()
            return
        self._spawn(self._serve(site, reader, writer))

    async def _keep(self, site: str, address: str) -> None:
        """Dial for as long as the gateway runs."""
        while True:
            with contextlib.suppress(OSError):
                made = asyncio.open_connection(address, self._port, local_addr=(self._address, 0))
                reader, writer = await asyncio.wait_for(made, 10)
                await self._serve(site, reader, writer)
            await asyncio.sleep(DIAL_S)

    async def _serve(self, site: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read a connection to its end; a newer one takes its place."""
        if (earlier := self._writers.pop(site, None)) is not None:
            earlier.transport.abort()
            self._give(TcpChanged(site, False))
        self._writers[site] = writer
        raw: socket.socket = writer.get_extra_info("socket")
        with contextlib.suppress(OSError):
            raw.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, _DEAD_MS)
            raw.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, self._traffic_class)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        self._give(TcpChanged(site, True))
        try:
            while data := await reader.read(_READ_BYTES):
                self._give(TcpBytes(site, data))
        except OSError:
            pass
        finally:
            if self._writers.get(site) is writer:
                del self._writers[site]
                self._give(TcpChanged(site, False))
            writer.transport.abort()
