"""`ProxyConfig`: what a proxy is started with; `read_proxy_key`: the key that it shares with another site."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from isthmus.core.base_model import NAME_PATTERN
from isthmus.core.bounded_file import read_within
from isthmus.core.errors import FileError, InputError
from isthmus.core.loopback import is_loopback
from isthmus.core.messages.datagram import Address
from isthmus.wan.legs.roce_host import GatewayDoor
from isthmus.wan.tunnel.tunnel_legs import PING_S, SILENCE_S

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
LegTransport = Literal["tcp", "datagram", "roce"]

LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))
MAX_LEGS = 16
KEY_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class LinkLegs:
    """What the legs to a site are made of; both sites state the same."""

    num_legs: int = 2
    transport: LegTransport = "tcp"
    gbps: float | None = None
    """What all TCP legs together send on average at most; None for no bound."""
    silence_s: float = SILENCE_S
    ping_s: float = PING_S
    far_nic: str = ""
    """IP address of the far site's queue pairs, for `roce`."""
    error_correction: bool = False
    """Whether frames on `datagram` legs have parity; the side that dials decides for both."""

    @property
    def bytes_per_s(self) -> int | None:
        """The rate of `gbps`; each leg is paced at it too, so that a frame that is alone has all of it."""
        return None if self.gbps is None else max(1, round(self.gbps * 1e9 / 8))


@dataclass(frozen=True, kw_only=True)
class RoceAccess:
    """The queue pairs of a site in user space, and the gateways that carry them."""

    nic: str
    doors: Sequence[GatewayDoor]
    mtu_bytes: int = 1024
    round_trip_s: float = 0.1


@dataclass(frozen=True)
class ProxyConfig:
    """A proxy of `site`. Raises `InputError` for what contradicts itself."""

    site: str
    peers: Mapping[str, Sequence[Address]]
    """The proxies of each other site that this one dials."""
    keys: Mapping[str, bytes] = field(repr=False)
    """The key shared with each other site that dials or is dialled."""
    listen: Address | None = None
    """Where proxies of other sites dial this one; None if it only dials."""
    workers: str = "127.0.0.1"
    """Address at which workers of this site find their routes."""
    clients: Sequence[Network] = LOOPBACK
    """Networks whose hosts may use the routes."""
    allow: Sequence[Network] = LOOPBACK
    """Networks that other sites may connect to through this proxy."""
    num_legs: int = 2
    transport: LegTransport = "tcp"
    """What the legs that this proxy dials are made of."""
    error_correction: bool = False
    """Whether frames on these legs have parity."""
    redirect: Mapping[str, Sequence[Network]] = field(default_factory=dict)
    """Networks of other sites whose connections the kernel hands to this proxy, without a route."""
    legs_to: Mapping[str, LinkLegs] = field(default_factory=dict)
    """Legs to and from a site, where they are not `num_legs` of `transport`."""
    worker_ports: Mapping[str, int] = field(default_factory=dict)
    """Port of the route to a site; any free one where none is stated."""
    via: Path | None = None
    """File of routes through which TCP legs are dialled, as `isthmus links` writes it."""
    roce: RoceAccess | None = None

    def __post_init__(self) -> None:
        for name in (self.site, *self.keys):
            if not re.fullmatch(NAME_PATTERN, name):
                raise InputError(f"{name!r} is no name of a site", hint="letters, digits, `.`, `_` and `-`")
        if self.site in self.keys:
            raise InputError(f"{self.site} is this site itself", hint="name the key and the proxies of other sites")
        if missing := sorted(self.peers.keys() - self.keys.keys()):
            raise InputError(
                f"no key for {', '.join(missing)}", hint=f"--key {missing[0]}=FILE; both sites have the same file"
            )
        if unknown := sorted(self.redirect.keys() - self.peers.keys()):
            raise InputError(
                f"connections to {unknown[0]} are redirected, and no proxy of it is dialled",
                hint=f"--peer {unknown[0]}=HOST:PORT",
            )
        if not self.peers and self.listen is None:
            raise InputError(
                "nothing to do", hint="--peer SITE=HOST:PORT to dial another site, --listen HOST:PORT to be dialled"
            )
        for legs in (self.num_legs, *(one.num_legs for one in self.legs_to.values())):
            if not 1 <= legs <= MAX_LEGS:
                raise InputError(f"{legs} legs", hint=f"1 to {MAX_LEGS}")
        self._check_transports()
        if not is_loopback(self.workers) and tuple(self.clients) == LOOPBACK:
            raise InputError(
                f"routes at {self.workers} are open to other hosts, and no network of clients is named",
                hint="--clients 10.1.0.0/16: the hosts of this site that may connect through it",
            )

    def legs(self, site: str) -> LinkLegs:
        """Return what the legs to `site` are made of."""
        return self.legs_to.get(site) or LinkLegs(
            num_legs=self.num_legs, transport=self.transport, error_correction=self.error_correction
        )

    def _check_transports(self) -> None:
        for site in self.peers:
            legs = self.legs(site)
            if legs.transport == "datagram" and self.via is not None:
                raise InputError(
                    f"datagrams to {site} cannot pass through routes", hint="transport tcp, or no file of routes"
                )
            if legs.error_correction and legs.transport != "datagram":
                raise InputError(
                    f"legs of {legs.transport} to {site} have no error correction", hint="transport datagram has it"
                )
            if legs.transport == "roce" and (self.roce is None or not legs.far_nic):
                raise InputError(
                    f"no queue pairs reach {site}",
                    hint="state transport roce and gateways in pool.yaml, and start the proxy by `isthmus crossing`",
                )


def read_proxy_key(file: Path) -> bytes:
    """Return the key in `file`, one line of 64 hexadecimal digits; raise `FileError` if others may read it.

    No error shows the content.
    """
    try:
        mode, text = file.stat().st_mode, read_within(file, 1024).decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not ASCII"
        raise FileError(f"cannot be read: {reason}", file=str(file)) from error
    if mode & 0o077:
        raise FileError("other accounts may read or write the key", file=str(file), hint=f"chmod 600 {file}")
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise FileError(
            f"is not one line of {KEY_BYTES} bytes in hexadecimal",
            file=str(file),
            hint=f"create it: (umask 077; openssl rand -hex 32 > {file}); copy it to the other site",
        )
    return key


def parse_network(text: str) -> Network:
    """Return the network in `text`, such as `10.1.0.0/16`; raise `InputError`."""
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise InputError(f"invalid network {text!r}: {error}", hint="such as 10.1.0.0/16") from None
