"""`LegEntrance`: accepts connections of other proxies and opens those that prove a key.

A stranger costs one descriptor for at most `GREETING_TIMEOUT_S` and gets no byte. When too many wait, the oldest one
of the address with the most makes room, so silent strangers keep no proxy out.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable

from isthmus.core.errors import ProtocolError
from isthmus.noise import UnauthenticatedError
from isthmus.wan.legs.leg import Leg
from isthmus.wan.legs.leg_greeting import FIRST_BYTES, RECORD_BYTES, LegListener, OpenedLeg
from isthmus.wan.legs.tcp_leg import TcpLeg, set_leg_options

GREETING_TIMEOUT_S = 10.0
"""Longest time from a connection to its proof."""

MAX_WAITING = 128
"""Most connections that have proved nothing."""

AdmitLeg = Callable[[OpenedLeg], Callable[[Leg], None] | None]
"""Called with a proven leg: what takes it, None if its tunnel is unknown."""


class LegEntrance:
    """The entrance of `listener`, which it closes at the end; without one only `greet` opens legs."""

    def __init__(
        self,
        listener: socket.socket | None,
        keys: LegListener,
        admit: AdmitLeg,
        loop: asyncio.AbstractEventLoop,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._listener, self._keys, self._admit, self._loop = listener, keys, admit, loop
        self._max_waiting = max_waiting
        self._waiting: dict[asyncio.Task[None], str] = {}
        self.num_refused = 0
        """Connections that proved no key."""
        if listener is not None:
            listener.setblocking(False)
            loop.add_reader(listener, self._accept, listener)

    def close(self) -> None:
        """Stop, and drop what has proved nothing."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
        for task in list(self._waiting):
            task.cancel()

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, address = listener.accept()
        except OSError:  # the caller is gone, or no descriptor is left
            if self._waiting:
                self._evict(next(iter(self._waiting)))
            return
        self.greet(sock, str(address[0]))

    def greet(self, sock: socket.socket, caller: str) -> None:
        """Open the leg of `caller` at `sock`, if it proves a key."""
        set_leg_options(sock)
        task = self._loop.create_task(self._greet(sock))
        self._waiting[task] = caller
        task.add_done_callback(lambda done: self._waiting.pop(done, None))
        task.add_done_callback(lambda done: sock.close() if done.cancelled() else None)
        if len(self._waiting) > self._max_waiting:
            busiest, _ = Counter(self._waiting.values()).most_common(1)[0]
            self._evict(next(one for one, place in self._waiting.items() if place == busiest))

    def _evict(self, task: asyncio.Task[None]) -> None:
        del self._waiting[task]
        task.cancel()

    async def _greet(self, sock: socket.socket) -> None:
        try:
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                opened = self._keys.open(await read_exactly(self._loop, sock, FIRST_BYTES))
                if opened is None:
                    raise UnauthenticatedError("a stranger")
                await self._loop.sock_sendall(sock, opened.second)
                opened.prove(await read_exactly(self._loop, sock, RECORD_BYTES))
                take = self._admit(opened)
                await self._loop.sock_sendall(sock, opened.verdict(is_known=take is not None))
        except (OSError, ProtocolError, TimeoutError):
            self.num_refused += 1
            sock.close()
            return
        if take is None:
            sock.close()
        else:
            take(TcpLeg(sock, opened.sending, opened.receiving, self._loop))


async def read_exactly(loop: asyncio.AbstractEventLoop, sock: socket.socket, num_bytes: int) -> bytes:
    """Return exactly `num_bytes`; raise `ConnectionResetError` if fewer come."""
    data = b""
    while len(data) < num_bytes:
        more = await loop.sock_recv(sock, num_bytes - len(data))
        if not more:
            raise ConnectionResetError("closed before it had sent all")
        data += more
    return data
