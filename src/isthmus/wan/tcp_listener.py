"""`listen`: a TCP listener at an address of this machine, at any free port or within a range of ports.

`local_address`: the address of this machine at which the peers of a host reach it.
"""

from __future__ import annotations

import errno
import socket

from isthmus.core.errors import UnavailableError
from isthmus.wan.dial import format_address

PortRange = tuple[int, int]
"""The first and the last port of a range."""

_DISCARD_PORT = 9


def listen(host: str, port: int = 0, backlog: int = 256, *, ports: PortRange | None = None) -> socket.socket:
    """Return a socket that listens at `host`: at `port` (0: any free one), or at the lowest free port of `ports`.

    Raises `UnavailableError` if the address cannot be bound or no port of the range is free.
    """
    numbers = (port,) if ports is None else range(ports[0], ports[1] + 1)
    where = format_address(host, port) if ports is None else f"{format_address(host, ports[0])}-{ports[1]}"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in numbers:
        try:
            return socket.create_server((host, number), family=family, backlog=backlog)
        except OSError as error:
            if ports is not None and error.errno == errno.EADDRINUSE:
                continue
            raise UnavailableError(
                f"cannot listen at {where}: {error.strerror or error}",
                hint="set the site's host to an address of this machine and choose a free port",
            ) from error
    raise UnavailableError(
        f"cannot listen at {where}: every port of the range is in use",
        hint="give the agent a larger range: --ports FIRST-LAST, one port for each worker of the site",
    )


def local_address(host: str) -> str:
    """Return `host` if it is an address of this machine, else this machine's address on its route to `host`.

    Sends nothing. So a worker on another node than its agent is reached by those that reach the agent. Returns
    `host` where it is no address or there is no route to it: `listen` then says why it cannot be used.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)[0]
    except OSError:
        return host
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address[0], 0))
        except OSError:
            pass
        else:
            return host
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)
        except OSError:
            return host
        return str(probe.getsockname()[0])
