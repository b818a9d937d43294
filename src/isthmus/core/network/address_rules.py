"""`allowed_address`: the address at which a program may contact a host that a user has named.

Without it a URL would reach services that only the site's or the server's machines can reach: loopback, private
networks, and the metadata services of clouds at link-local addresses. The caller connects to the address itself, so
that a name which resolves to another one a moment later changes nothing.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Sequence

from isthmus.core.errors import InputError, UnavailableError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Sequence[str]]
"""Returns the addresses of a host as text; raises `OSError`."""

POLICY_HINT = "the site's owner may allow a network in fetch.networks of the policy"
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_SITE_LOCAL = ipaddress.ip_network("fec0::/10")


def allowed_address(
    host: str, port: int, networks: Sequence[str], resolve: Resolve | None = None, *, hint: str = POLICY_HINT
) -> str:
    """Return the first address of `host` that is public or in one of `networks`; `hint` says who may allow others.

    Raises `UnavailableError` if the name cannot be resolved, `InputError` if all its addresses are forbidden.
    """
    try:
        found = (resolve or _resolve)(host, port)
    except (OSError, UnicodeError) as error:
        raise UnavailableError(f"cannot resolve '{host}': {error}") from error
    for text in found:
        if is_allowed(ipaddress.ip_address(text), networks):
            return text
    raise InputError(
        f"'{host}' has no public address: {', '.join(found) or 'none'}",
        hint=hint,
    )


def is_allowed(address: Address, networks: Sequence[str]) -> bool:
    """Return whether an address is public or in one of `networks`, as the IPv4 address inside it if it has one."""
    forms = [address, *_embedded(address)]
    listed = [ipaddress.ip_network(one) for one in networks]
    if any(one.version == network.version and one in network for one in forms for network in listed):
        return True
    return all(_is_public(one) for one in forms)


def _is_public(address: Address) -> bool:
    if address.is_multicast or address.is_unspecified or (address.is_reserved and address not in _NAT64):
        return False
    return address in _NAT64 or (address.is_global and address not in _SITE_LOCAL)


def _embedded(address: Address) -> list[Address]:
    """Return the IPv4 addresses to which an IPv6 address may lead: mapped, 6to4, Teredo and NAT64."""
    if isinstance(address, ipaddress.IPv4Address):
        return []
    found = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in _NAT64:
        found.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return [one for one in found if one is not None]


def _resolve(host: str, port: int) -> Sequence[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(one[4][0]).partition("%")[0] for one in found))
