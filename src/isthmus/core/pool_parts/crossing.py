"""`SiteAccess` of a cluster and `Crossing` of a link: how workers' traffic crosses wide-area links, in `pool.yaml`.

Source: the report on cross-domain pooling, 4.2.4 to 4.2.7: proxies, RoCE gateways, and the choice between them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from isthmus.core.base_model import FrozenModel, Name
from isthmus.core.pool_parts.placed_error import PlacedError

MAX_GATEWAYS = 16
MAX_STREAMS = 16
MAX_NETWORKS = 64
CrossingTransport = Literal["auto", "tcp", "datagram", "roce"]
GatewayRate = Annotated[float, Field(ge=0, le=1e6)]


def _check_endpoint(text: str) -> str:
    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not bare or any(c.isspace() for c in text) or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"'{text}' is not an address and a port; an example: 10.0.0.2:7400")
    return text


def _check_network(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text))
    except ValueError as error:
        raise ValueError(f"'{text[:60]}' is no network ({error}); an example: 10.1.0.0/16") from error


def _check_address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError as error:
        raise ValueError(f"'{text[:60]}' is no IP address; an example: 10.1.0.1") from error


Endpoint = Annotated[str, Field(max_length=255), AfterValidator(_check_endpoint)]
"""`HOST:PORT`; an IPv6 address is in brackets."""
NetworkText = Annotated[str, Field(max_length=64), AfterValidator(_check_network)]
AddressText = Annotated[str, Field(max_length=64), AfterValidator(_check_address)]
Networks = Annotated[tuple[NetworkText, ...], Field(min_length=1, max_length=MAX_NETWORKS)]


class ProxyAccess(FrozenModel):
    """The proxy of a site. `listen` is where proxies of other sites dial it; a site without one only dials.

    Workers find their routes at `workers`, and the hosts of `clients` may use them. Other sites reach the networks of
    `allow` through it. `tcp_gbps` and `datagram_gbps` are what it carries over TCP streams and over datagrams.
    """

    listen: Endpoint | None = None
    workers: AddressText = "127.0.0.1"
    clients: Networks = ("127.0.0.0/8", "::1/128")
    allow: Networks = ("127.0.0.0/8", "::1/128")
    tcp_gbps: GatewayRate = 4.0
    datagram_gbps: GatewayRate = 0.2


class GatewayAccess(FrozenModel):
    """A RoCE gateway of a site, joined to the gateway of the same name at each other site.

    It listens at `listen`. NICs are in `networks`. Their frames come through the TUN device `device`, to which the
    agent routes the networks of other sites (root), or, without a device, from the workers' own queue pairs in user
    space. `weight` is its share of queue pairs, 0 for none; `roce_gbps` is what it carries.
    """

    name: Name
    listen: Endpoint
    networks: Networks
    device: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,15}$")] | None = None
    weight: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    roce_gbps: GatewayRate = 0.1


class EdgeAccess(FrozenModel):
    """The device by which a site's traffic leaves, and what it sends at most; rates of links are set on it (root)."""

    device: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,15}$")]
    gbps: Annotated[float, Field(ge=1e-6, le=1e6)]


class SiteAccess(FrozenModel):
    """How traffic of a cluster's workers leaves for other sites: its proxy, its gateways, its edge."""

    proxy: ProxyAccess = ProxyAccess()
    gateways: Annotated[tuple[GatewayAccess, ...], Field(max_length=MAX_GATEWAYS)] = ()
    edge: EdgeAccess | None = None

    @model_validator(mode="after")
    def _gateways_differ(self) -> SiteAccess:
        for field in ("name", "listen", "device"):
            values = [value for one in self.gateways if (value := getattr(one, field)) is not None]
            for at, value in enumerate(values):
                if value in values[:at]:
                    raise PlacedError(f"two gateways have the {field} '{value}'", ("gateways", at, field))
        for at, gateway in enumerate(self.gateways):
            if {gateway.device is None, self.gateways[0].device is None} == {True, False}:
                raise PlacedError(
                    "some gateways have a device, others none", ("gateways", at), "state `device` for all, or for none"
                )
        return self


class Crossing(FrozenModel):
    """How workers' connections cross a link: through the proxies of both sites, over `streams` encrypted streams.

    A stream is a TCP connection with BBR (`tcp`), our own datagrams (`datagram`), or a queue pair through the RoCE
    gateways of both sites (`roce`); `auto` takes the one with the highest expected goodput. `key` is the file with the
    32 bytes that both sites share, relative to the folder of the pool file. `required_gbps` is what the link has to
    carry for training, from which the rates at gateway and edge follow; without it, all that the link has.
    `error_correction` adds parity to datagrams, so that a lost packet costs no round trip.
    """

    key: Annotated[str, Field(min_length=1, max_length=4096)]
    transport: CrossingTransport = "auto"
    streams: Annotated[int, Field(ge=1, le=MAX_STREAMS)] = 2
    required_gbps: Annotated[float, Field(ge=1e-6, le=1e6)] | None = None
    error_correction: bool = False


def check_crossings(
    accesses: dict[str, SiteAccess | None], crossings: Iterable[tuple[str, str, Crossing | None]]
) -> None:
    """Raise `PlacedError` for a crossing that its sites cannot have; `crossings` are those of all links, in order."""
    links = list(crossings)
    ways = {(source, target): crossing for source, target, crossing in links}
    for at, (source, target, crossing) in enumerate(links):
        if crossing is None:
            continue
        place = ("links", at, "crossing")
        back = ways.get((target, source), crossing)
        if back is not None and back != crossing:
            raise PlacedError(
                f"{source} to {target} crosses otherwise than {target} to {source}", place, "state one `between` link"
            )
        ends = [accesses[source], accesses[target]]
        for name, access in zip((source, target), ends, strict=True):
            if access is None:
                raise PlacedError(
                    f"cluster '{name}' has no `access`", place, "state `access: {proxy: {listen: HOST:PORT}}` there"
                )
        named = [access for access in ends if access is not None]
        if all(access.proxy.listen is None for access in named):
            raise PlacedError(
                f"neither {source} nor {target} is dialled: no proxy has `listen`",
                place,
                "state `listen` for one of the two",
            )
        pairs = [{gateway.name for gateway in access.gateways if gateway.device is None} for access in named]
        if crossing.error_correction and crossing.transport != "datagram":
            raise PlacedError(
                f"{crossing.transport} has no error correction", (*place, "error_correction"), "transport: datagram"
            )
        if crossing.transport == "roce" and not set.intersection(*pairs):
            raise PlacedError(
                f"{source} and {target} have no gateways of the same name without `device`",
                (*place, "transport"),
                "state `gateways` under `access` of both clusters",
            )
    _check_nic_networks(accesses)


def _check_nic_networks(accesses: dict[str, SiteAccess | None]) -> None:
    """Raise `PlacedError` for NIC networks of two sites that overlap."""
    seen: list[tuple[str, ipaddress.IPv4Network | ipaddress.IPv6Network]] = []
    for at, (cluster, access) in enumerate(accesses.items()):
        for number, gateway in enumerate(access.gateways if access is not None else ()):
            for text in gateway.networks:
                network = ipaddress.ip_network(text)
                for other, known in seen:
                    if other != cluster and network.version == known.version and network.overlaps(known):
                        raise PlacedError(
                            f"{network} of {cluster} overlaps {known} of {other}",
                            ("clusters", at, "access", "gateways", number, "networks"),
                            "each network belongs to one site",
                        )
                seen.append((cluster, network))
