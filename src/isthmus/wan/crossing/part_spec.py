"""`ProxySpec`, `GatewaySpec`: what a proxy and a gateway of a site are started with, as files without secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from isthmus.core.base_model import FrozenModel, Name, PositiveFloat
from isthmus.core.pool_parts.crossing import AddressText, Endpoint, Networks
from isthmus.wan.dial import parse_address
from isthmus.wan.gateway.gateway_config import FarSite, GatewayConfig
from isthmus.wan.legs.roce_host import GatewayDoor
from isthmus.wan.proxy.proxy_config import (
    LinkLegs,
    ProxyConfig,
    RoceAccess,
    parse_network,
    read_proxy_key,
)
from isthmus.wan.roce.gateway.gateway_settings import GatewaySettings

MAX_SPEC_BYTES = 2**20
USER_NIC_TIMEOUT_S = 0.5
"""Wait for a queue pair in user space, whose process may wait for a core: frames sent twice would cost it more."""
STARTED_FILE = "started.json"
"""The addresses of a part, in its folder; exists while it serves."""


class FarProxy(FrozenModel):
    """Another site, as a proxy sees it; `dial` is where it is dialled, None if it only dials."""

    key: str
    dial: Endpoint | None
    transport: Literal["tcp", "datagram", "roce"]
    streams: Annotated[int, Field(ge=1, le=16)]
    gbps: PositiveFloat | None
    silence_s: PositiveFloat
    ping_s: PositiveFloat
    far_nic: str = ""
    error_correction: bool = False
    worker_port: Annotated[int, Field(ge=0, le=65535)] = 0


class DoorSpec(FrozenModel):
    """A gateway of the site, as the proxy's queue pairs see it."""

    name: Name
    frames: Endpoint
    nic: Endpoint
    weight: float


class ProxySpec(FrozenModel):
    """The proxy of `site`; `via` is a file of routes through which it dials."""

    kind: Literal["proxy"] = "proxy"
    site: Name
    listen: Endpoint | None
    workers: AddressText
    clients: Networks
    allow: Networks
    sites: dict[Name, FarProxy]
    via: str | None = None
    nic: AddressText | None = None
    doors: tuple[DoorSpec, ...] = ()
    mtu_bytes: Annotated[int, Field(ge=256, le=4096)] = 1024
    round_trip_s: PositiveFloat = 0.1

    def config(self) -> ProxyConfig:
        """Return the configuration with the keys read; raise `FileError` or `InputError`."""
        roce = None
        if self.nic is not None and self.doors:
            doors = [
                GatewayDoor(
                    name=one.name, frames=parse_address(one.frames), nic=parse_address(one.nic), weight=one.weight
                )
                for one in self.doors
            ]
            roce = RoceAccess(nic=self.nic, doors=doors, mtu_bytes=self.mtu_bytes, round_trip_s=self.round_trip_s)
        return ProxyConfig(
            site=self.site,
            peers={name: [parse_address(one.dial)] for name, one in self.sites.items() if one.dial is not None},
            keys={name: read_proxy_key(Path(one.key)) for name, one in self.sites.items()},
            listen=None if self.listen is None else parse_address(self.listen),
            workers=self.workers,
            clients=[parse_network(one) for one in self.clients],
            allow=[parse_network(one) for one in self.allow],
            legs_to={
                name: LinkLegs(
                    num_legs=one.streams, transport=one.transport, gbps=one.gbps, silence_s=one.silence_s,
                    ping_s=one.ping_s, far_nic=one.far_nic, error_correction=one.error_correction,
                )
                for name, one in self.sites.items()
            },
            worker_ports={name: one.worker_port for name, one in self.sites.items()},
            via=None if self.via is None else Path(self.via),
            roce=roce,
        )  # fmt: skip


class FarGateway(FrozenModel):
    """The gateway of another site; `dial` is where it is dialled, None if it dials."""

    key: str
    dial: Endpoint | None
    networks: Networks
    gbps: PositiveFloat
    round_trip_s: PositiveFloat


class GatewaySpec(FrozenModel):
    """The gateway `name` of `site`: its frames come from `device`, or from the proxy's queue pairs at `nic_place`."""

    kind: Literal["gateway"] = "gateway"
    site: Name
    name: Name
    listen: Endpoint
    networks: Networks
    sites: dict[Name, FarGateway]
    device: str | None = None
    device_mtu_bytes: int = 1500
    frames: Endpoint | None = None
    nic: AddressText | None = None
    nic_place: Endpoint | None = None

    def config(self) -> GatewayConfig:
        """Return the configuration with the keys read; raise `FileError` or `InputError`."""
        timeout_s = GatewaySettings.nic_timeout_s if self.nic_place is None else USER_NIC_TIMEOUT_S
        settings = {
            name: GatewaySettings(
                link_gbps=one.gbps, round_trip_s=one.round_trip_s, acknowledge_near=True, nic_timeout_s=timeout_s
            )
            for name, one in self.sites.items()
        }
        nics = {}
        if self.nic is not None and self.nic_place is not None:
            nics = {self.nic: parse_address(self.nic_place)}
        return GatewayConfig(
            site=self.site,
            near=[parse_network(one) for one in self.networks],
            sites={
                name: FarSite(
                    key=read_proxy_key(Path(one.key)),
                    networks=[parse_network(text) for text in one.networks],
                    address=None if one.dial is None else parse_address(one.dial),
                    settings=settings[name],
                )
                for name, one in self.sites.items()
            },
            settings=next(iter(settings.values())),
            listen=parse_address(self.listen),
            frames=None if self.frames is None else parse_address(self.frames),
            nics=nics,
            tun=self.device,
        )
