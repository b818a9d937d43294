"""`choose_crossing`: what carries workers' connections across a link of a pool, and the rates at gateway and edge.

Source: the report on cross-domain pooling, 4.2.7. The sites' proxies and gateways are what has registered, with the
rates that `access` states; the link is the one of `pool.yaml`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from isthmus.core.errors import NotFoundError
from isthmus.core.pool import Link, Pool
from isthmus.core.pool_parts.crossing import GatewayAccess, SiteAccess
from isthmus.wan.control.choose_transport import (
    GatewayAbility,
    MeasuredLink,
    RoceFlow,
    Transport,
    TransportChoice,
    choose_transport,
)
from isthmus.wan.proxy.proxy_config import LegTransport

_OF_TRANSPORT: dict[str, Transport] = {"tcp": "tcp", "datagram": "quic", "roce": "roce"}
_LEGS: dict[Transport, LegTransport] = {"tcp": "tcp", "quic": "datagram", "roce": "roce"}
_NO_ADDRESS = "0.0.0.0"  # noqa: S104 - of a flow that stands for all of a link; nothing is bound


@dataclass(frozen=True, kw_only=True)
class CrossingChoice:
    """How the connections of a link's workers cross it, and whether NICs of both sites need their gateways."""

    source: str
    target: str
    legs: LegTransport
    streams: int
    choice: TransportChoice
    nics: TransportChoice | None = None
    """Pass-through or gateways, where gateways of both sites have a device; None without such."""


def choose_crossing(pool: Pool, source: str, target: str) -> CrossingChoice:
    """Return how `source` reaches `target`; raise `NotFoundError` if the link between them states no crossing."""
    link = pool.link(source, target)
    there, here = pool.cluster(target).access, pool.cluster(source).access
    if link is None or link.crossing is None or here is None or there is None:
        raise NotFoundError(
            f"the pool states no crossing from {source} to {target}", hint="state `crossing` for the link in pool.yaml"
        )
    asked = link.crossing.transport
    among: tuple[Transport, ...] = ("roce", "tcp", "quic") if asked == "auto" else (_OF_TRANSPORT[asked],)
    ends = (_ability(source, here, there, has_device=False), _ability(target, there, here, has_device=False))
    choice = _choose(link, ends, among)
    nics: TransportChoice | None = None
    if paired_gateways(here, there, has_device=True):
        ends = (_ability(source, here, there, has_device=True), _ability(target, there, here, has_device=True))
        nics = _choose(link, ends, ("pass-through", "roce"))
    return CrossingChoice(
        source=source,
        target=target,
        legs=_LEGS[choice.transport],
        streams=link.crossing.streams,
        choice=choice,
        nics=nics,
    )


def paired_gateways(here: SiteAccess, there: SiteAccess, *, has_device: bool) -> list[GatewayAccess]:
    """Return the gateways of `here` that have one of the same name and kind at the other site."""
    names = {one.name for one in there.gateways if (one.device is not None) == has_device}
    return [one for one in here.gateways if one.name in names and (one.device is not None) == has_device]


def _ability(site: str, access: SiteAccess, other: SiteAccess, *, has_device: bool) -> GatewayAbility:
    gateways = paired_gateways(access, other, has_device=has_device)
    return GatewayAbility(
        name=site,
        roce_gbps=sum(one.roce_gbps for one in gateways if one.weight > 0),
        quic_gbps=access.proxy.datagram_gbps,
        tcp_gbps=access.proxy.tcp_gbps,
    )


def _choose(link: Link, ends: tuple[GatewayAbility, GatewayAbility], among: tuple[Transport, ...]) -> TransportChoice:
    measured = MeasuredLink(
        bandwidth_gbps=link.bandwidth_gbps,
        round_trip_s=2 * link.delay_s,
        loss=link.loss,
        jitter_s=link.jitter_ms / 1e3,
        mtu_bytes=link.mtu_bytes,
    )
    required = link.crossing.required_gbps if link.crossing is not None else None
    flow = RoceFlow(
        source=_NO_ADDRESS, target=_NO_ADDRESS, source_port=0, required_gbps=required or link.bandwidth_gbps
    )
    choice = choose_transport(flow, ends, measured, among)
    if required is None and choice.goodput_gbps > 0:  # all that it can carry
        flow = replace(flow, required_gbps=choice.goodput_gbps)
        choice = choose_transport(flow, ends, measured, (choice.transport,))
    return choice
