"""`GatewaySettings`: rates, bounds and timers of a gateway."""

from __future__ import annotations

import math
from dataclasses import dataclass

from isthmus.core.errors import InputError

MIN_QUEUE_BYTES = 16_384
"""Least mark of a queue: some packets of slow links."""


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """What a gateway is made with. Raises `InputError` for a value that makes no sense."""

    link_gbps: float
    """Rate that is reserved on the link, headers included; loss does not lower it."""
    nic_gbps: float = 100.0
    """Rate of a NIC of this site."""
    acknowledge_near: bool = False
    """Acknowledge SENDs and WRITEs before the far NIC has them. If that fails afterwards, the queue pair fails."""
    round_trip_s: float = 0.1
    """Round trip of the link until it is measured; timers of the link are above it."""
    max_flow_bytes: int = 32 * 2**20
    """Most bytes kept for a direction of a queue pair."""
    max_total_bytes: int = 2**30
    """Most bytes kept for all of them, each way."""
    max_queue_pairs: int = 16_384
    """Most directions of queue pairs, each way."""
    max_tries: int = 12
    """Most times a frame is sent, to the far gateway or to the NIC; then its queue pair fails."""
    queue_mark_s: float = 1e-3
    """Time at the link's rate that a queue may take: that of a near NIC beyond its share brings it congestion
    notifications, that of a flow at the far gateway slows the flow down."""
    near_notify_interval_s: float = 0.5e-3
    """Shortest time between two of them."""
    feedback_interval_s: float = 5e-3
    """Longest wait of feedback to the far gateway."""
    reorder_s: float = 1e-3
    """How long a frame that is missing may still be late; then it is asked for."""
    nic_timeout_s: float = 10e-3
    """Wait for a NIC's acknowledgement; doubled after each try."""
    suspect_s: float = 5.0
    """After a restart of the far gateway: how long a queue pair that it acknowledged may stay unproven."""
    idle_s: float = 60.0
    """Time after which a flow without frames is forgotten."""
    datagram_overhead_bytes: int = 60
    """Bytes of a datagram on the link beyond those that the gateway builds: IP, UDP, encryption."""

    def __post_init__(self) -> None:
        times = "round_trip_s", "feedback_interval_s", "nic_timeout_s", "idle_s", "queue_mark_s"
        for name in ("link_gbps", "nic_gbps", *times):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise InputError(f"{name} is {value}", hint="a number above 0")
        for name in ("max_flow_bytes", "max_total_bytes", "max_queue_pairs", "max_tries"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}", hint="at least 1")
        if not 0 <= self.reorder_s < math.inf:
            raise InputError(f"reorder_s is {self.reorder_s}", hint="0 or more")

    @property
    def link_bytes_per_s(self) -> float:
        """The link's rate in bytes."""
        return self.link_gbps * 1e9 / 8

    @property
    def queue_mark_bytes(self) -> float:
        """The bytes of a queue at its mark."""
        return max(MIN_QUEUE_BYTES, self.link_bytes_per_s * self.queue_mark_s)

    @property
    def nic_bytes_per_s(self) -> float:
        """A NIC's rate in bytes."""
        return self.nic_gbps * 1e9 / 8
