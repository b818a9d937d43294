"""`choose_transport`: how the gateways of two sites carry a flow of RoCEv2, and which rates are set where.

Source: the report on cross-domain pooling, 4.2.7: gateways register what they can do, links are measured, and the
controller chooses pass-through (with the near acknowledgements of RoCE gateways), QUIC or TCP. With the required
bandwidth n and the efficiencies a of the gateways and b of the wide-area network, the rate at the gateway is n / a and
that at the edge n / (a b); the report's "a / n" is misprinted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from isthmus.core.errors import InputError

Transport = Literal["pass-through", "roce", "quic", "tcp"]
"""Packets as they are; RoCE with near acknowledgements and selective resends; proxies over QUIC or TCP."""

HEADER_BYTES: Mapping[Transport, int] = {"pass-through": 44, "roce": 124, "quic": 92, "tcp": 52}
"""Bytes of headers of a packet, from IP on: RoCE 44; a gateway's datagram adds 80; QUIC has 64 above IP and UDP."""

ORDER: tuple[Transport, ...] = ("pass-through", "roce", "tcp", "quic")
"""All transports, those with the fewest parts first."""

MIN_PACKET_BYTES = 576
ROCE_HEADROOM_BYTES = 160
"""Headers of a RoCE packet in a gateway's datagram, at most."""

_ROCE_PAYLOADS = (4096, 2048, 1024, 512, 256)
_NIC_WINDOW_BYTES = 2**20
_NIC_RESEND_S = 4e-3


@dataclass(frozen=True, kw_only=True)
class GatewayAbility:
    """What a gateway has registered; a rate of 0 means that it cannot."""

    name: str
    roce_gbps: float = 0.0
    """Near acknowledgements and near CNPs of RoCEv2."""
    quic_gbps: float = 0.0
    tcp_gbps: float = 0.0

    def rate_gbps(self, transport: Transport) -> float:
        """Return the rate at which it carries `transport`; every gateway passes packets on."""
        rates = {"roce": self.roce_gbps, "quic": self.quic_gbps, "tcp": self.tcp_gbps}
        return rates.get(transport, math.inf)


@dataclass(frozen=True, kw_only=True)
class MeasuredLink:
    """The wide-area link between two sites, as measured or promised."""

    bandwidth_gbps: float
    round_trip_s: float
    loss: float = 0.0
    jitter_s: float = 0.0
    mtu_bytes: int = 1500

    def __post_init__(self) -> None:
        good = self.bandwidth_gbps > 0 and self.round_trip_s >= 0 and 0 <= self.loss < 1 and self.jitter_s >= 0
        if not (good and self.mtu_bytes >= MIN_PACKET_BYTES):
            raise InputError(f"no link has {self}", hint="bandwidth above 0, loss below 1, an MTU from 576 bytes")


@dataclass(frozen=True, kw_only=True)
class RoceFlow:
    """What servers report of a flow when its first packet comes."""

    source: str
    target: str
    source_port: int
    required_gbps: float
    num_flows: int = 1
    """Queue pairs that share the required bandwidth."""


@dataclass(frozen=True, kw_only=True)
class TransportChoice:
    """How a flow is carried, and the rates that the controller sets."""

    transport: Transport
    goodput_gbps: float
    """What the flow is expected to reach."""
    gateway_gbps: float
    """n / a, set at both gateways."""
    edge_gbps: float
    """n / (a b), asked of the network's edge."""
    is_enough: bool
    """Whether the required bandwidth is expected."""
    reason: str


def choose_transport(
    flow: RoceFlow,
    gateways: tuple[GatewayAbility, GatewayAbility],
    link: MeasuredLink,
    among: Collection[Transport] = ORDER,
) -> TransportChoice:
    """Return the transport of `among` with the highest expected goodput; of equal ones that with the fewest parts.

    Two transports within 1 % count as equal, so that a choice does not swing with every measurement.
    """
    if not 0 < flow.required_gbps < math.inf or flow.num_flows < 1:
        raise InputError(f"a flow of {flow.required_gbps} Gbit/s over {flow.num_flows} queue pairs")
    best: tuple[Transport, float] | None = None
    for transport in (one for one in ORDER if one in among):
        rate = _goodput_gbps(transport, flow, gateways, link)
        if best is None or rate > best[1] * 1.01:
            best = transport, rate
    if best is None:
        raise InputError("no transport is known", hint="pass-through, roce, tcp or quic")
    transport, goodput_gbps = best
    a, b = _header_share(transport, link), 1 - link.loss
    gateway_gbps = flow.required_gbps / a
    is_enough = goodput_gbps >= flow.required_gbps * 0.999
    reason = f"{transport} is expected to reach {goodput_gbps:.3g} Gbit/s of {flow.required_gbps:.3g} required"
    return TransportChoice(
        transport=transport,
        goodput_gbps=goodput_gbps,
        gateway_gbps=gateway_gbps,
        edge_gbps=gateway_gbps / b,
        is_enough=is_enough,
        reason=reason,
    )


def roce_payload_bytes(mtu_bytes: int) -> int:
    """Return the largest payload of a RoCE packet (its path MTU) that fits an MTU in a gateway's datagram."""
    found = next((one for one in _ROCE_PAYLOADS if one + ROCE_HEADROOM_BYTES <= mtu_bytes), None)
    if found is None:
        raise InputError(f"no RoCE packet fits an MTU of {mtu_bytes} bytes", hint="mtu_bytes from 576")
    return found


def _header_share(transport: Transport, link: MeasuredLink) -> float:
    """Return the share of payload in a full packet; RoCE's are of a path MTU, not of the link's."""
    if transport in ("pass-through", "roce"):
        payload_bytes = roce_payload_bytes(link.mtu_bytes)
        return payload_bytes / (payload_bytes + HEADER_BYTES[transport])
    return 1 - HEADER_BYTES[transport] / link.mtu_bytes


def _goodput_gbps(
    transport: Transport, flow: RoceFlow, gateways: tuple[GatewayAbility, GatewayAbility], link: MeasuredLink
) -> float:
    """Return what the flow reaches: the least of the link, the gateways, and the transport's own bound.

    Pass-through leaves the NICs to themselves: their window goes once a round trip, and each loss costs go-back-N all
    that is in flight and a resend time. The others keep their rate apart from loss and resend what was lost.
    """
    wire_gbps = link.bandwidth_gbps * _header_share(transport, link)
    carried = min(gateway.rate_gbps(transport) for gateway in gateways)
    if transport != "pass-through":
        return min(wire_gbps * (1 - link.loss), carried)
    window_gbps = flow.num_flows * _NIC_WINDOW_BYTES * 8e-9 / max(link.round_trip_s, 1e-6)
    rate_gbps = min(wire_gbps, window_gbps) / flow.num_flows
    packets_per_s = rate_gbps * 1e9 / 8 / roce_payload_bytes(link.mtu_bytes)
    lost_share = link.loss * packets_per_s * (link.round_trip_s + _NIC_RESEND_S)
    return flow.num_flows * rate_gbps * (1 - link.loss) / (1 + lost_share)
