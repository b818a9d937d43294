"""The addresses of this machine at which a server can be reached: for its certificate, and to print."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Sequence

import psutil

_EVERY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound here
_OUTSIDE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses for documentation (RFC 5737, RFC 3849): the route to one is that to any other machine."""


def certificate_hosts(host: str) -> tuple[str, ...]:
    """Return the names of a server that listens at `host`: its addresses, this machine's name and loopback."""
    found = machine_addresses(host) if host in _EVERY_ADDRESS else (host,)
    return tuple(dict.fromkeys((*found, "localhost", "127.0.0.1", socket.gethostname())))


def printed_hosts(host: str, valid: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the hosts to print for a server that listens at `host`, the one for other machines first.

    `valid` are the hosts of its certificate: a printed host is among them, as long as the certificate names one that
    is not loopback (None: plain HTTP).
    """
    found = machine_addresses(host) if host in _EVERY_ADDRESS else (host,)
    if valid is None:
        return found
    printed = tuple(one for one in found if one in valid)
    names = tuple(one for one in valid if one != "localhost" and not _is_address(one))
    # A certificate of a real CA usually has names only.
    return printed or names or found


def machine_addresses(host: str) -> tuple[str, ...]:
    """Return this machine's addresses: that of the default route first, loopback only if there is no other.

    `host` `0.0.0.0` stands for the IPv4 addresses, `::` for those of IPv6 too. Link-local addresses are left out.
    """
    families = (socket.AF_INET,) if host == "0.0.0.0" else (socket.AF_INET, socket.AF_INET6)  # noqa: S104
    found = [address for family in families if (address := _default_route_address(family))]
    for interface in psutil.net_if_addrs().values():
        found += [one.address for one in interface if one.family in families]
    parsed = {text: ipaddress.ip_address(text) for text in found if "%" not in text}
    usable = [text for text, one in parsed.items() if not (one.is_loopback or one.is_link_local)]
    return tuple(usable) or ("127.0.0.1",)


def _default_route_address(family: socket.AddressFamily) -> str | None:
    """Return the local address of the route to other machines, None without a route; sends nothing."""
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((_OUTSIDE[family], 9))
        return str(probe.getsockname()[0])
    return None


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
