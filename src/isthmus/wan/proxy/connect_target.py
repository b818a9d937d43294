"""`connect_target`: connect to a worker of this site for another site, if its address is allowed."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from collections.abc import Sequence

from isthmus.core.errors import InputError
from isthmus.wan.dial import format_address, parse_address
from isthmus.wan.proxy.proxy_config import Network
from isthmus.wan.proxy.tunnel_shell import RefusedTargetError

CONNECT_TIMEOUT_S = 10.0


async def connect_target(loop: asyncio.AbstractEventLoop, target: str, allow: Sequence[Network]) -> socket.socket:
    """Return a connected, non-blocking socket; raise `RefusedTargetError` with an HTTP status.

    The address that is checked is the one that is dialled, so a name that resolves differently the second time
    reaches nothing else.
    """
    try:
        host, port = parse_address(target)
    except InputError:
        raise RefusedTargetError("400 the target is no host:port") from None
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            allowed = [one for one in found if _is_allowed(str(one[4][0]), allow)]
            if not allowed:
                raise RefusedTargetError(f"403 the far proxy does not connect to {format_address(host, port)}")
            return await _connect(loop, allowed[0][0], allowed[0][4])
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else "timed out or unknown"
        raise RefusedTargetError(f"502 {why} at {format_address(host, port)}") from None


async def _connect(loop: asyncio.AbstractEventLoop, family: int, place: tuple[object, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, place)
    except BaseException:
        sock.close()
        raise
    return sock


def _is_allowed(host: str, allow: Sequence[Network]) -> bool:
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return any(address.version == network.version and address in network for network in allow)
