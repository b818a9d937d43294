"""`dial_leg`: open a leg to a proxy of another site; `connect_tcp`: the connection below it, also through a route."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

from isthmus.wan.dial import MAX_HEAD_BYTES, format_address
from isthmus.wan.legs.leg_entrance import read_exactly
from isthmus.wan.legs.leg_greeting import RECORD_BYTES, SECOND_BYTES, LegDialler
from isthmus.wan.legs.tcp_leg import TcpLeg, set_leg_options

DIAL_TIMEOUT_S = 10.0


Connect = Callable[[], Awaitable[socket.socket]]
"""Returns a connected, non-blocking socket; raises `OSError` or `IsthmusError`."""


async def connect_tcp(
    loop: asyncio.AbstractEventLoop,
    address: tuple[str, int],
    route: tuple[str, int] | None = None,
    bytes_per_s: int | None = None,
) -> socket.socket:
    """Connect a leg to `address`, through the CONNECT proxy at `route` if one is given; it sends at most `bytes_per_s`.

    Raises `OSError`, also where the route refuses.
    """
    found = await loop.getaddrinfo(*(route or address), type=socket.SOCK_STREAM)
    family, _, _, _, place = found[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, place)
        if route is not None:
            target = format_address(*address)
            await loop.sock_sendall(sock, f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode("ascii"))
            await _read_answer(loop, sock)
        set_leg_options(sock, bytes_per_s=bytes_per_s)  # a route's own congestion control counts at its start
    except BaseException:
        sock.close()
        raise
    return sock


async def _read_answer(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    """Read the head of a route's answer and nothing after it: the far proxy speaks second."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += await read_exactly(loop, sock, 1)
        if len(head) > MAX_HEAD_BYTES:
            raise ConnectionRefusedError("the route answers without an end")
    words = head.split(b"\r\n", 1)[0].split(maxsplit=2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].startswith(b"2"):
        raise ConnectionRefusedError(f"the route refuses: {head[:80]!r}")


async def dial_leg(
    loop: asyncio.AbstractEventLoop, connect: Connect, greeting: LegDialler, timeout_s: float = DIAL_TIMEOUT_S
) -> TcpLeg | None:
    """Return the leg over what `connect` returns, None if the proxy does not know its tunnel.

    Raises `OSError` (also for a wrong key, and after `timeout_s`) and `ProtocolError`.
    """
    sock: socket.socket | None = None
    try:
        async with asyncio.timeout(timeout_s):
            sock = await connect()
            await loop.sock_sendall(sock, greeting.first)
            await loop.sock_sendall(sock, greeting.proof(await _read_second(loop, sock)))
            is_taken = greeting.confirm(await read_exactly(loop, sock, RECORD_BYTES))
    except BaseException:
        if sock is not None:
            sock.close()
        raise
    if not is_taken or greeting.sending is None or greeting.receiving is None:
        sock.close()
        return None
    return TcpLeg(sock, greeting.sending, greeting.receiving, loop)


async def _read_second(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> bytes:
    try:
        return await read_exactly(loop, sock, SECOND_BYTES)
    except ConnectionResetError as error:
        raise ConnectionResetError("the proxy does not answer: it has another key, site or release") from error
