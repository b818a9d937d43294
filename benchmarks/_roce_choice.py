"""`choose_transport` beside the best of all transports, each played on a virtual clock over the same link.

NICs alone (pass-through) go back N, with a resend time above the round trip and a rate of their share of the link each,
which favours them; gateways answer near and resend over datagrams. Proxies over TCP are not played: they count with
the emulator's published formula, the link's rate less headers and loss, as BBR has it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks._roce_lab import RoceLab, goodput_mbps
from benchmarks.table import Row
from isthmus.core.link_throughput import effective_bytes_per_s
from isthmus.core.pool import Link
from isthmus.wan.control.choose_transport import (
    GatewayAbility,
    MeasuredLink,
    RoceFlow,
    Transport,
    choose_transport,
    roce_payload_bytes,
)
from isthmus.wan.roce import GatewaySettings

GBPS = 0.2
"""What a gateway in Python carries."""
ROUND_TRIPS_S = (0.001, 0.04, 0.1)
LOSSES = (0.0, 1e-3, 1e-2)
MTUS_BYTES = (1500, 9000)
NUM_FLOWS = (1, 16)
NIC_WINDOW_BYTES = 2**20
RESEND_S, ACK_PACKETS = 4e-3, 4
LEAST_QUEUE_BYTES = 2**18
"""Queue of short links: one of a bandwidth-delay product would not hold a packet of each queue pair."""

WITHIN = 0.95

ABILITY = GatewayAbility(name="both", roce_gbps=GBPS, tcp_gbps=GBPS)


@dataclass(frozen=True)
class Cell:
    """A link, and how many queue pairs share it."""

    round_trip_s: float
    loss: float
    mtu_bytes: int
    num_flows: int

    def told(self) -> str:
        """Return the cell in words."""
        link = f"{1000 * self.round_trip_s:g} ms, loss {self.loss:.1%}, MTU {self.mtu_bytes}"
        return f"{link}, {self.num_flows} queue pairs"

    def choice(self, among: tuple[Transport, ...]) -> Transport:
        """Return the transport that is chosen."""
        flow = RoceFlow(
            source="10.1.0.1", target="10.2.0.1", source_port=49_152, required_gbps=GBPS, num_flows=self.num_flows
        )
        link = MeasuredLink(
            bandwidth_gbps=GBPS, round_trip_s=self.round_trip_s, loss=self.loss, mtu_bytes=self.mtu_bytes
        )
        return choose_transport(flow, (ABILITY, ABILITY), link, among).transport

    def played(self) -> Mapping[Transport, float]:
        """Return the goodput of each transport, of all queue pairs together, in Mbit/s."""
        window_s = max(1.0, 8 * self.round_trip_s)
        skip_s = 0.3 + 6 * self.round_trip_s
        settings = GatewaySettings(link_gbps=GBPS, nic_gbps=10.0, acknowledge_near=True, round_trip_s=self.round_trip_s)
        link = Link.model_validate(
            {"from": "a", "to": "b", "bandwidth_gbps": GBPS, "delay_ms": 500 * self.round_trip_s, "loss": self.loss,
             "mtu_bytes": self.mtu_bytes}
        )  # fmt: skip
        return {
            "pass-through": sum(goodput_mbps(self._lab(None, 0.98 * GBPS / self.num_flows), skip_s, window_s)),
            "roce": sum(goodput_mbps(self._lab(settings, 10.0), skip_s, window_s)),
            "tcp": effective_bytes_per_s(link) * 8e-6,
        }

    def _lab(self, settings: GatewaySettings | None, port_gbps: float) -> RoceLab:
        payload_bytes = roce_payload_bytes(self.mtu_bytes)
        ack_s = 2 * ACK_PACKETS * payload_bytes * 8e-9 * self.num_flows / GBPS
        return RoceLab(
            gbps=GBPS, round_trip_s=self.round_trip_s, loss=self.loss, settings=settings, num_pairs=self.num_flows,
            port_gbps=port_gbps, window_bytes=NIC_WINDOW_BYTES, mtu_bytes=payload_bytes,
            resend_s=RESEND_S + ack_s + 2 * self.round_trip_s, ack_packets=ACK_PACKETS,
            least_queue_bytes=LEAST_QUEUE_BYTES,
        )  # fmt: skip


CANDIDATES: Mapping[str, tuple[Transport, ...]] = {
    "NICs: pass-through or gateways": ("pass-through", "roce"),
    "pass-through, gateways or TCP by formula": ("pass-through", "roce", "tcp"),
}


def choice_rows(quick: bool) -> Iterator[Row]:
    """The share of cells where what is chosen reaches 95 % of the best, and the time to choose again for all."""
    axes = ((0.001, 0.04), (0.0, 1e-2), (9000,), (1,)) if quick else (ROUND_TRIPS_S, LOSSES, MTUS_BYTES, NUM_FLOWS)
    cells = [Cell(*found) for found in itertools.product(*axes)]
    goodputs = [cell.played() for cell in cells]
    for name, among in CANDIDATES.items():
        shares = [
            goodput[cell.choice(among)] / max(goodput[one] for one in among)
            for cell, goodput in zip(cells, goodputs, strict=True)
        ]
        worst = min(range(len(cells)), key=shares.__getitem__)
        within = 100 * sum(share >= WITHIN for share in shares) / len(cells)
        yield Row(
            what=f"choice, {name}: {len(cells)} cells, goodput within 5 % of the best "
            f"(worst {100 * shares[worst]:.1f} % of it, {cells[worst].choice(among)}: {cells[worst].told()})",
            ours=within, unit="% of cells", target="98", met=within >= 98,
        )  # fmt: skip
    start_s = time.process_time()
    for cell, among in itertools.product(cells, CANDIDATES.values()):
        cell.choice(among)
    spent_ms = 1000 * (time.process_time() - start_s)
    yield Row(
        what=f"choice: links of {len(cells)} cells have changed: CPU from their measurements to all choices",
        ours=spent_ms, unit="ms", target="1,000", met=spent_ms <= 1000,
    )  # fmt: skip
