"""Emulated links, clients and workers on one event loop whose clock is virtual: it jumps to the next timer.

Real sockets and the real relay; what a link takes is then exact, whatever else the machine does.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from isthmus.core.pool import Pool
from isthmus.wan.control.wan_topology import Booking
from isthmus.wan.dial import format_address, parse_address
from isthmus.wan.tcp_relay import TcpRelay

RESOLUTION_S = 1e-6
"""The least step of the clock: without it a wait below the rounding of a float would never end."""


class VirtualClock(selectors.DefaultSelector):
    """Skips a wait in which no socket becomes ready: `now_s` jumps to its end."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(None)
        ready = super().select(0)
        if not ready and timeout > 0:
            os.sched_yield()  # the kernel hands what was sent to the other socket in the same call, as a rule
            ready = super().select(0)
        if not ready:
            self.now_s += max(timeout, RESOLUTION_S)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on a virtual clock."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now_s


class Links:
    """The relay of a pool, and one worker that echoes, swallows or holds what clients send."""

    def __init__(self, relay: TcpRelay) -> None:
        self.relay = relay
        self.go = asyncio.Event()
        self.worker = ("127.0.0.1", 0)
        self.clients: list[Client] = []

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def dial(self, kind: bytes, route: str | None = None, source: str = "127.0.0.1") -> Client:
        """Return a connection from a to the worker in b; its first byte says what the worker does with the rest."""
        loop, sock = asyncio.get_running_loop(), socket.socket()
        sock.setblocking(False)
        sock.bind((source, 0))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.sock_connect(sock, parse_address(route or self.relay.routes()["a"]["b"]))
        await loop.sock_sendall(sock, f"CONNECT {format_address(*self.worker)} HTTP/1.1\r\n\r\n".encode())
        client = Client(sock)
        self.clients.append(client)
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += await client.receive(1)
        assert head.startswith(b"HTTP/1.1 200 "), head
        await client.send(kind)
        return client

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Echo (`e`), count until the end (`s`), or do nothing until `go` and then count (`q`)."""
        kind, num_bytes = await reader.readexactly(1), 0
        if kind == b"q":
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await self.go.wait()
            writer.transport.resume_reading()  # type: ignore[attr-defined]
        while data := await reader.read(1 << 20):
            num_bytes += len(data)
            if kind == b"e":
                writer.write(data)
        if kind != b"e":
            writer.write(num_bytes.to_bytes(8, "big"))
        writer.close()


class Client:
    """One end of a connection over a link."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sent_bytes = 0

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def receive(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            piece = await asyncio.get_running_loop().sock_recv(self.sock, num_bytes - len(data))
            assert piece, f"the stream ended after {len(data)} of {num_bytes} bytes"
            data += piece
        return data

    async def send_until_stuck(self) -> None:
        """Send until nothing is taken for half a second."""
        while self.sent_bytes < 1 << 30:
            try:
                self.sent_bytes += self.sock.send(bytes(1 << 18))
            except BlockingIOError:
                before = self.sent_bytes
                await asyncio.sleep(0.5)
                try:
                    self.sent_bytes += self.sock.send(bytes(1 << 18))
                except BlockingIOError:
                    assert self.sent_bytes == before
                    return

    async def swallow_s(self, num_bytes: int) -> float:
        """Send that many bytes to a swallowing worker; return the seconds until its report is back."""
        start_s, block = asyncio.get_running_loop().time(), bytes(1 << 18)
        for sent in range(0, num_bytes, len(block)):
            await self.send(block[: num_bytes - sent])
        self.sock.shutdown(socket.SHUT_WR)
        assert int.from_bytes(await self.receive(8), "big") == num_bytes
        return asyncio.get_running_loop().time() - start_s

    async def round_trip_s(self, num_bytes: int = 64) -> float:
        """Time one echo."""
        start_s = asyncio.get_running_loop().time()
        await self.send(bytes(num_bytes))
        await self.receive(num_bytes)
        return asyncio.get_running_loop().time() - start_s


@asynccontextmanager
async def _links(pool: Pool, runs_first: bool, bookings: Sequence[Booking]) -> AsyncIterator[Links]:
    links = Links(TcpRelay(pool, runs_first=runs_first, bookings=bookings))
    server = await asyncio.start_server(links.serve, *links.worker)
    links.worker = server.sockets[0].getsockname()
    await links.relay.start()
    try:
        yield links
    finally:
        for client in links.clients:
            client.sock.close()
        await links.relay.close()
        server.close()
        await asyncio.sleep(1)  # of virtual time: the worker's ends close


def on_virtual_links(
    pool: Pool,
    script: Callable[[Links], Awaitable[None]],
    *,
    runs_first: bool = False,
    bookings: Sequence[Booking] = (),
) -> None:
    """Run `script` beside the links of `pool`, on a virtual clock."""

    async def main() -> None:
        async with _links(pool, runs_first, bookings) as links:
            await script(links)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())
