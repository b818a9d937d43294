"""`plan_site`: the processes that carry the traffic of a cluster across its links, as `pool.yaml` states it."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from isthmus.core.errors import InputError
from isthmus.core.pool import Link, Pool
from isthmus.core.pool_parts.crossing import GatewayAccess, SiteAccess
from isthmus.wan.control.choose_transport import roce_payload_bytes
from isthmus.wan.control.wan_topology import Booking, FlowMatch, PathRequest
from isthmus.wan.crossing.choose_crossing import CrossingChoice, choose_crossing, paired_gateways
from isthmus.wan.crossing.part_spec import DoorSpec, FarGateway, FarProxy, GatewaySpec, ProxySpec
from isthmus.wan.dial import parse_address
from isthmus.wan.edge.edge_settings import EdgeSettings, edge_settings
from isthmus.wan.tunnel.tunnel_legs import PING_S, SILENCE_S

QUICK_SILENCE_S = 0.5
"""Silence after which a queue pair's leg is left, where another gateway can take it."""

PATIENT_SILENCE_S = 15.0
"""The same where there is one gateway only: a new leg would go the same way, and a busy gateway may need seconds."""

PortOf = Callable[[str], int]
"""Returns the port on loopback that belongs to a name, the same one each time."""


@dataclass(frozen=True, kw_only=True)
class SitePlan:
    """What a site starts; without a proxy none of its links states a crossing."""

    proxy: ProxySpec | None
    gateways: tuple[GatewaySpec, ...]
    choices: tuple[CrossingChoice, ...]
    edge_device: str | None = None
    edge: EdgeSettings | None = None

    def routes(self) -> dict[str, str]:
        """Return {other site: "host:port"} for this site's workers."""
        if self.proxy is None:
            return {}
        host = f"[{self.proxy.workers}]" if ":" in self.proxy.workers else self.proxy.workers
        return {site: f"{host}:{one.worker_port}" for site, one in self.proxy.sites.items() if one.dial is not None}


def plan_site(pool: Pool, cluster: str, folder: Path, port_of: PortOf, via: Path | None = None) -> SitePlan:
    """Return the processes of `cluster`; key files are relative to `folder`, that of the pool file.

    `via` is a file of routes through which TCP legs are dialled. Raises `InputError` for what cannot be carried out.
    """
    access = pool.cluster(cluster).access
    links = [link for link in pool.links if link.source == cluster and link.crossing is not None]
    if access is None or not links:
        return SitePlan(proxy=None, gateways=(), choices=())
    choices = tuple(choose_crossing(pool, cluster, link.target) for link in links)
    far = {link.target: one for link in links if (one := pool.cluster(link.target).access) is not None}
    sites = {
        choice.target: _far_proxy(link, choice, access, far[link.target], folder, port_of)
        for link, choice in zip(links, choices, strict=True)
    }
    queue_pairs = [link for link, one in zip(links, choices, strict=True) if one.legs == "roce"]
    gateways = _gateways(cluster, access, far, links, choices, folder, port_of)
    doors = tuple(
        DoorSpec(name=one.name, frames=one.frames, nic=one.nic_place, weight=_weight(access, one.name))
        for one in gateways
        if one.frames is not None and one.nic_place is not None
    )
    proxy = ProxySpec(
        site=cluster,
        listen=access.proxy.listen,
        workers=access.proxy.workers,
        clients=access.proxy.clients,
        allow=access.proxy.allow,
        sites=sites,
        via=None if via is None else str(via),
        nic=_nic_of(access) if queue_pairs else None,
        doors=doors if queue_pairs else (),
        mtu_bytes=min((roce_payload_bytes(link.mtu_bytes) for link in queue_pairs), default=1024),
        round_trip_s=max((2 * link.delay_s for link in queue_pairs), default=0.1) or 1e-3,
    )
    edge = _edge(cluster, access, far, choices) if access.edge is not None else None
    return SitePlan(
        proxy=proxy,
        gateways=gateways,
        choices=choices,
        edge_device=access.edge.device if access.edge is not None else None,
        edge=edge,
    )


def _far_proxy(
    link: Link, choice: CrossingChoice, here: SiteAccess, there: SiteAccess, folder: Path, port_of: PortOf
) -> FarProxy:
    if link.crossing is None:
        raise InputError(f"the link to {link.target} states no crossing")
    num_ways = len(paired_gateways(here, there, has_device=False))
    is_quick = choice.legs == "roce" and num_ways > 1
    far_nic = _nic_of(there) if choice.legs == "roce" else ""
    return FarProxy(
        key=str(folder / link.crossing.key),
        dial=(f"[{far_nic}]:4791" if ":" in far_nic else f"{far_nic}:4791") if far_nic else there.proxy.listen,
        transport=choice.legs,
        streams=choice.streams,
        gbps=choice.choice.gateway_gbps if choice.legs == "tcp" else None,
        silence_s=_silence_s(link, choice, num_ways),
        ping_s=0.1 if is_quick else PING_S,
        far_nic=far_nic,
        error_correction=link.crossing.error_correction,
        worker_port=port_of(f"route to {link.target}"),
    )


def _silence_s(link: Link, choice: CrossingChoice, num_ways: int) -> float:
    if choice.legs != "roce":
        return SILENCE_S
    return max(QUICK_SILENCE_S, 6 * link.delay_s) if num_ways > 1 else PATIENT_SILENCE_S


def _nic_of(access: SiteAccess) -> str:
    """Return the address of the site's queue pairs: the first one of its gateways' first network."""
    gateway = next(one for one in access.gateways if one.device is None)
    network = ipaddress.ip_network(gateway.networks[0])
    return str(network[1] if network.num_addresses > 1 else network[0])


def _weight(access: SiteAccess, name: str) -> float:
    return next(one.weight for one in access.gateways if one.name == name)


def _gateways(
    cluster: str,
    access: SiteAccess,
    far: dict[str, SiteAccess],
    links: list[Link],
    choices: tuple[CrossingChoice, ...],
    folder: Path,
    port_of: PortOf,
) -> tuple[GatewaySpec, ...]:
    found = []
    for gateway in access.gateways:
        sites = {
            link.target: _far_gateway(cluster, link, choice, gateway, access, far[link.target], folder)
            for link, choice in zip(links, choices, strict=True)
            if _uses(choice, gateway) and any(one.name == gateway.name for one in far[link.target].gateways)
        }
        if not sites:
            continue
        used = {link.target: link for link in links if link.target in sites}
        is_user = gateway.device is None
        found.append(
            GatewaySpec(
                site=cluster,
                name=gateway.name,
                listen=gateway.listen,
                networks=gateway.networks,
                sites=sites,
                device=gateway.device,
                device_mtu_bytes=min(roce_payload_bytes(one.mtu_bytes) for one in used.values()) + 100,
                frames=f"127.0.0.1:{port_of(f'frames of {gateway.name}')}" if is_user else None,
                nic=_nic_of(access) if is_user else None,
                nic_place=f"127.0.0.1:{port_of(f'nic of {gateway.name}')}" if is_user else None,
            )
        )
    return tuple(found)


def _uses(choice: CrossingChoice, gateway: GatewayAccess) -> bool:
    if gateway.device is None:
        return choice.legs == "roce"
    return choice.nics is not None and choice.nics.transport == "roce"


def _far_gateway(
    cluster: str,
    link: Link,
    choice: CrossingChoice,
    gateway: GatewayAccess,
    here: SiteAccess,
    there: SiteAccess,
    folder: Path,
) -> FarGateway:
    if link.crossing is None:
        raise InputError(f"the link to {link.target} states no crossing")
    other = next(one for one in there.gateways if one.name == gateway.name)
    made = choice.choice if gateway.device is None else choice.nics or choice.choice
    mates = paired_gateways(here, there, has_device=gateway.device is not None)
    share = gateway.weight / (sum(one.weight for one in mates) or 1.0) if len(mates) > 1 else 1.0
    return FarGateway(
        key=str(folder / link.crossing.key),
        dial=other.listen if cluster > link.target else None,
        networks=other.networks,
        gbps=max(made.gateway_gbps * share, 1e-6),
        round_trip_s=2 * link.delay_s or 1e-3,
    )


def _edge(
    cluster: str, access: SiteAccess, far: dict[str, SiteAccess], choices: tuple[CrossingChoice, ...]
) -> EdgeSettings | None:
    """Return the rates n / (a b) of all crossings at the site's device."""
    bookings = []
    for choice in choices:
        there = far[choice.target]
        if choice.legs == "roce":
            pairs = paired_gateways(access, there, has_device=False)
            others = {one.name: one for one in there.gateways}
            flows = [flow for one in pairs for flow in _flows(one.listen, others[one.name].listen, "udp")]
        else:
            flows = _flows(access.proxy.listen, there.proxy.listen, "udp" if choice.legs == "datagram" else "tcp")
        request = PathRequest(
            name=f"crossing-{choice.target}",
            source=cluster,
            target=choice.target,
            bandwidth_gbps=choice.choice.edge_gbps,
            flows=tuple(flows),
        )
        rate = choice.choice.edge_gbps
        bookings.append(
            Booking(request=request, pipes=("wan",), rates_gbps=(rate,), delay_ms=0.0, jitter_ms=0.0, loss=0.0)
        )
    return None if access.edge is None else edge_settings(bookings, cluster, 0.0, access.edge.gbps)


def _flows(near: str | None, far: str | None, protocol: str) -> list[FlowMatch]:
    """Return the packets of legs that leave for the far listener, and of those that came to the near one."""
    found = []
    for endpoint, side in ((far, "to"), (near, "from")):
        if endpoint is None:
            continue
        host, port = parse_address(endpoint)
        try:
            network = str(ipaddress.ip_network(host))
        except ValueError:
            raise InputError(
                f"an edge cannot shape what goes to the name {host!r}",
                hint="state IP addresses in `listen`, or leave `edge` out",
            ) from None
        found.append(FlowMatch.model_validate({f"{side}_network": network, f"{side}_port": port, "protocol": protocol}))
    return found
