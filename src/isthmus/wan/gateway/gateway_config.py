"""`GatewayConfig`: what a gateway process is started with."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from isthmus.core.base_model import NAME_PATTERN
from isthmus.core.errors import InputError
from isthmus.core.loopback import is_loopback
from isthmus.wan.roce.gateway.gateway_settings import GatewaySettings

Address = tuple[str, int]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_DEVICE_PATTERN = r"[a-zA-Z0-9_.-]{1,15}"


@dataclass(frozen=True, kw_only=True)
class FarSite:
    """Another site: its key, the networks of its NICs, and where its gateway is dialled, if this one dials."""

    key: bytes = field(repr=False)
    networks: Sequence[Network]
    address: Address | None = None
    settings: GatewaySettings | None = None
    """Of the link to it; None: those of all links."""


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """A gateway of `site`. Raises `InputError` for what contradicts itself."""

    site: str
    near: Sequence[Network]
    """Networks of this site's NICs; frames from and to other addresses are refused."""
    sites: Mapping[str, FarSite]
    settings: GatewaySettings
    """Of each link."""
    listen: Address = ("127.0.0.1", 0)
    """Where datagrams of other gateways come."""
    frames: Address | None = None
    """Loopback address of frames in datagrams; None for a TUN device."""
    nics: Mapping[str, Address] = field(default_factory=dict)
    """Where frames for a NIC's IP address go, on loopback."""
    tun: str | None = None
    """Name of the TUN device that the site routes to."""

    def __post_init__(self) -> None:
        for name in (self.site, *self.sites):
            if not re.fullmatch(NAME_PATTERN, name):
                raise InputError(f"{name!r} is no name of a site", hint="letters, digits, `.`, `_` and `-`")
        if not self.sites or self.site in self.sites:
            raise InputError(
                f"the gateway of {self.site} has no other site" if not self.sites else f"{self.site} is this site",
                hint="--key SITE=FILE and --far SITE=NETWORK for each other site",
            )
        if (self.tun is None) == (self.frames is None):
            raise InputError("frames come from a TUN device or from datagrams", hint="either --tun NAME or --frames")
        if self.tun is not None and not re.fullmatch(_DEVICE_PATTERN, self.tun):
            raise InputError(f"{self.tun!r} is no name of a device", hint="up to 15 letters and digits, such as roce0")
        places = (self.frames, *self.nics.values())
        for place in places:
            if place is not None and not is_loopback(place[0]):
                raise InputError(
                    f"frames at {place[0]} would be taken from any host, without authentication",
                    hint="a loopback address; NICs on a network reach the gateway through --tun",
                )
        self._check_networks()

    def _check_networks(self) -> None:
        if not self.near:
            raise InputError("no network of this site's NICs is named", hint="--near 10.1.0.0/16")
        named = [(self.site, network) for network in self.near]
        for site, far in self.sites.items():
            if not far.networks:
                raise InputError(f"no network of {site}'s NICs is named", hint=f"--far {site}=10.2.0.0/16")
            named += [(site, network) for network in far.networks]
        for place, (site, network) in enumerate(named):
            for other, known in named[:place]:
                if network.version == known.version and network.overlaps(known):
                    raise InputError(
                        f"{network} of {site} overlaps {known} of {other}", hint="each network belongs to one site"
                    )
