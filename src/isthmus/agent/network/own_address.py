"""Where the workers of a site listen: the address that was named, or that of this machine towards the server."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from isthmus.core.errors import UnavailableError

_DEFAULT_PORTS = {"http": 80, "https": 443}


def own_address(server: str) -> str:
    """Return the local address of the route to URL `server`; sends nothing.

    It is a loopback address if the server is on this machine's loopback. Raises `UnavailableError` without a route
    or if the server's name cannot be resolved.
    """
    url = urlsplit(server)
    try:
        found = socket.getaddrinfo(url.hostname, url.port or _DEFAULT_PORTS.get(url.scheme), type=socket.SOCK_DGRAM)
        family, kind, number, _, address = found[0]
        with socket.socket(family, kind, number) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UnavailableError(
            f"no way to the server {server}: {error.strerror or error}",
            hint="check the server's address; --host ADDRESS names the address where workers listen",
        ) from error


def resolve_host(host: str) -> str:
    """Return the address of `host`, which its workers then name; a name that cannot be resolved stays as it is."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return host
