"""`dial_leg`: open a leg to a proxy of another site."""

from __future__ import annotations

import asyncio
import socket

from isthmus.wan.legs.leg_entrance import read_exactly
from isthmus.wan.legs.leg_greeting import RECORD_BYTES, SECOND_BYTES, LegDialler
from isthmus.wan.legs.tcp_leg import TcpLeg, set_leg_options

DIAL_TIMEOUT_S = 10.0


async def dial_leg(loop: asyncio.AbstractEventLoop, address: tuple[str, int], greeting: LegDialler) -> TcpLeg | None:
    """Return the leg, None if the proxy does not know its tunnel.

    Raises `OSError` (also for a wrong key, and after `DIAL_TIMEOUT_S`) and `ProtocolError`.
    """
    sock: socket.socket | None = None
    try:
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            found = await loop.getaddrinfo(*address, type=socket.SOCK_STREAM)
            family, _, _, _, place = found[0]
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            await loop.sock_connect(sock, place)
            set_leg_options(sock)  # after the connection: a route's own congestion control counts at its start
            await loop.sock_sendall(sock, greeting.first)
            await loop.sock_sendall(sock, greeting.proof(await read_exactly(loop, sock, SECOND_BYTES)))
            is_taken = greeting.confirm(await read_exactly(loop, sock, RECORD_BYTES))
    except BaseException:
        if sock is not None:
            sock.close()
        raise
    if not is_taken or greeting.sending is None or greeting.receiving is None:
        sock.close()
        return None
    return TcpLeg(sock, greeting.sending, greeting.receiving, loop)
