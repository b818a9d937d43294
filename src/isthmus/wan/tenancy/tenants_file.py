"""`TenantsFile`: the tenants of a gateway, and where their addresses are; the same file at every site but for `site`.

Source: the report on cross-domain pooling, 4.3.3 (1): a VNI and a VLAN one to one, a class with bandwidth, and rules of
ports for each tenant. Two tenants may have the same addresses.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from ipaddress import IPv4Address, IPv4Network, IPv6Network
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from isthmus.core.base_model import FrozenModel, Name, PositiveFloat
from isthmus.core.files.validation_errors import CLASH
from isthmus.wan.tenancy.packets.vxlan_header import MAX_VNI, OUTER_BYTES, VXLAN_PORT

MAX_TENANTS = 4_000
MAX_VLAN = 4094
MAX_SITES = 64
MAX_NETWORKS = 64
MAX_PORT_RULES = 64
MIN_MTU_BYTES = 576
DEVICE_PATTERN = r"^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,14}$"
OTHER_SHARE = 0.01
"""Share of the device that is left to packets that are not of a tenant."""

Vni = Annotated[int, Field(ge=1, le=MAX_VNI)]
TenantClass = Literal["training", "bulk"]
Dscp = Annotated[int, Field(ge=0, le=63)]
Protocol = Literal["tcp", "udp", "icmp"]


def _port_range(text: str | int) -> str:
    first, _, last = str(text).partition("-")
    if not (first.isdecimal() and (last.isdecimal() or not last) and 1 <= int(first) <= int(last or first) <= 65535):
        raise ValueError(f"{text!r} is no port or range of ports, such as 4791 or 29500-29600")
    return f"{int(first)}-{int(last or first)}"


PortRange = Annotated[Annotated[str, Field(max_length=11)] | int, AfterValidator(_port_range)]


class PortRule(FrozenModel):
    """Packets that a tenant may send; answers to them may come back."""

    protocol: Protocol
    to_ports: PortRange = "1-65535"
    from_ports: PortRange = "1-65535"

    @model_validator(mode="after")
    def _has_ports(self) -> PortRule:
        if self.protocol == "icmp" and self.model_fields_set & {"to_ports", "from_ports"}:
            raise ValueError("icmp has no ports")
        return self


class Tenant(FrozenModel):
    """A tenant: packets of its VLAN at a site go under its VNI to its networks at other sites, and nowhere else."""

    name: Name
    vni: Vni
    vlan: Annotated[int, Field(ge=1, le=MAX_VLAN)]
    port: Annotated[str, Field(pattern=DEVICE_PATTERN)] | None = None
    """A device of its own at this site, whose frames have no tag; without one, its frames come tagged by the trunk."""
    service: TenantClass = Field(default="training", alias="class")
    gbps: PositiveFloat
    """What it has of the device in any case."""
    max_gbps: PositiveFloat | None = None
    """What it may use while others leave it; without it, `gbps`."""
    max_flows: Annotated[int, Field(ge=1, le=1_000_000)] = 4096
    networks: Annotated[
        dict[Name, Annotated[tuple[IPv4Network | IPv6Network, ...], Field(max_length=MAX_NETWORKS)]],
        Field(min_length=1, max_length=MAX_SITES),
    ]
    """Its networks by site. Its own may not overlap; those of other tenants may be the same."""
    allow: Annotated[tuple[PortRule, ...], Field(min_length=1, max_length=MAX_PORT_RULES)]


class ControlTraffic(FrozenModel):
    """What gateways tell each other: a VNI and a class of its own, before all tenants."""

    vni: Vni = 1
    gbps: PositiveFloat = 0.01


class DscpMarks(FrozenModel):
    """Marks (DSCP) of outer headers by class, and of flows on a congested link.

    Defaults are those of RFC 4594, RFC 3246 and RFC 8622: network control; AF31, which RoCE NICs use; CS1; EF, for
    queues of low latency; lower effort, which gives way to all else.
    """

    control: Dscp = 48
    training: Dscp = 26
    bulk: Dscp = 8
    training_congested: Dscp = 46
    bulk_congested: Dscp = 1

    def of(self, service: TenantClass, is_congested: bool) -> int:
        """Return the mark of a class."""
        if service == "training":
            return self.training_congested if is_congested else self.training
        return self.bulk_congested if is_congested else self.bulk


class TenantsFile(FrozenModel):
    """The tenants and gateways that `isthmus wan tenants` runs one of."""

    site: Name
    gateways: Annotated[dict[Name, IPv4Address], Field(min_length=2, max_length=MAX_SITES)]
    """Address of each site's gateway on the network between them."""
    port: Annotated[int, Field(ge=1, le=65535)] = VXLAN_PORT
    gbps: PositiveFloat
    """What the device towards the other sites sends."""
    mtu_bytes: Annotated[int, Field(ge=MIN_MTU_BYTES, le=9216)] = 1500
    """Longest packet between the gateways; a tenant's may have 50 bytes less."""
    control: ControlTraffic = ControlTraffic()
    dscp: DscpMarks = DscpMarks()
    tenants: Annotated[tuple[Tenant, ...], Field(max_length=MAX_TENANTS)] = ()

    @model_validator(mode="after")
    def _nothing_clashes(self) -> TenantsFile:
        found = [
            InitErrorDetails(
                type=PydanticCustomError(CLASH, "{text}", {"text": text, "hint": hint}), loc=loc, input=value
            )
            for loc, value, text, hint in (*_site_clashes(self), *_number_clashes(self), *_rate_clashes(self))
        ]
        if found:
            raise ValidationError.from_exception_data("TenantsFile", found[:20])
        return self

    @property
    def max_tenant_bytes(self) -> int:
        """The longest Ethernet frame of a tenant, without a tag."""
        return self.mtu_bytes - OUTER_BYTES


_Clash = tuple[tuple[int | str, ...], Any, str, str]
"""Where, the value, what is wrong, and what to do."""


def _site_clashes(file: TenantsFile) -> Iterator[_Clash]:
    if file.site not in file.gateways:
        yield ("site",), file.site, f"{file.site} has no address under gateways", "add it there"
    owner_of: dict[IPv4Address, str] = {}
    for site, address in file.gateways.items():
        if owner_of.setdefault(address, site) != site:
            yield (
                ("gateways", site),
                str(address),
                f"{address} is that of {owner_of[address]} too",
                "one address a site",
            )
    for place, tenant in enumerate(file.tenants):
        known = list[tuple[str, IPv4Network | IPv6Network]]()
        for site, networks in tenant.networks.items():
            at = ("tenants", place, "networks", site)
            if site not in file.gateways:
                yield at, site, f"{site} has no address under gateways", "add it there"
            for network in networks:
                for other, one in known:
                    if one.version == network.version and one.overlaps(network):
                        text = f"{network} at {site} overlaps {one} at {other}, of the same tenant"
                        yield at, str(network), text, "an address of a tenant is at one site"
                known.append((site, network))


def _number_clashes(file: TenantsFile) -> Iterator[_Clash]:
    vnis, vlans = {one.vni for one in file.tenants}, {one.vlan for one in file.tenants}
    advice = {
        "vni": f"VNI {_first_free(vnis, {file.control.vni}, MAX_VNI)} is free",
        "vlan": f"VLAN {_first_free(vlans, set(), MAX_VLAN)} is free",
    }
    owners: Mapping[str, dict[Any, str]] = {
        "name": {}, "vni": {file.control.vni: "the gateways' control traffic"}, "vlan": {}, "port": {}
    }  # fmt: skip
    for place, tenant in enumerate(file.tenants):
        for field, owner_of in owners.items():
            value = getattr(tenant, field)
            if value is None:
                continue
            if value in owner_of:
                text = f"{field} {value} of {tenant.name} is that of {owner_of[value]} too"
                yield ("tenants", place, field), value, text, advice.get(field, "each tenant has its own")
            owner_of.setdefault(value, tenant.name)


def _first_free(used: set[int], kept: set[int], last: int) -> int | None:
    """Return a number beside those of the tenants."""
    first = min(used, default=1)
    return next(
        (one for one in itertools.chain(range(first, last + 1), range(1, first)) if one not in used | kept), None
    )


def _rate_clashes(file: TenantsFile) -> Iterator[_Clash]:
    total_gbps = file.control.gbps + sum(one.gbps for one in file.tenants)
    if total_gbps > file.gbps * (1 - OTHER_SHARE) * (1 + 1e-9):
        text = f"tenants and control have {total_gbps:g} Gbit/s, and the device sends {file.gbps:g}"
        yield ("gbps",), file.gbps, text, f"promise less; {OTHER_SHARE:.0%} is kept for other packets"
    for place, tenant in enumerate(file.tenants):
        if tenant.max_gbps is not None and not tenant.gbps <= tenant.max_gbps <= file.gbps:
            text = f"max_gbps of {tenant.name} is not between its gbps and that of the device, {file.gbps:g}"
            yield ("tenants", place, "max_gbps"), tenant.max_gbps, text, "it is the ceiling of `gbps`"
