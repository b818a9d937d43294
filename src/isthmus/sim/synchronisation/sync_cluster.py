"""`SyncCluster`: the servers, rates and delays between which gradients are summed."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.core.errors import InputError


@dataclass(frozen=True, kw_only=True)
class SyncCluster:
    """Training servers of equal chips, with `num_aggregators` parameter servers or switches.

    Rates are in bytes per second and direction. The chips of a server form a ring over PCIe and UPI; a server reaches
    the network over one NIC and a link, and so does each parameter server.
    """

    num_servers: int
    chips_per_server: int
    num_aggregators: int
    pcie_bytes_per_s: float
    upi_bytes_per_s: float
    nic_bytes_per_s: float
    link_bytes_per_s: float
    network_delay_s: float = 0.0
    """Seconds of a message between servers, or between a server and an aggregator, without its bytes."""
    ring_delay_s: float = 0.0
    """Seconds of a message between two chips of a server, without its bytes."""
    switch_bytes_per_s: float | None = None
    """Rate at which a switch receives, and sends, on all its ports together; None: line rate on each port."""
    slot_pool_bytes: float | None = None
    """Bytes in all slots of a switch; None: enough for all elements. A slot is taken for a round trip."""
    server_bytes_per_s: float | None = None
    """Rate of a parameter server's NIC; None: that of the training servers."""

    def __post_init__(self) -> None:
        counts = min(self.num_servers, self.chips_per_server, self.num_aggregators)
        rates = [self.pcie_bytes_per_s, self.upi_bytes_per_s, self.nic_bytes_per_s, self.link_bytes_per_s]
        rates += [x for x in (self.switch_bytes_per_s, self.slot_pool_bytes, self.server_bytes_per_s) if x is not None]
        if counts < 1 or not min(rates) > 0:
            raise InputError(f"invalid {self}", hint="counts must be at least 1, rates above 0")
        if not min(self.network_delay_s, self.ring_delay_s) >= 0:
            raise InputError(f"invalid {self}", hint="delays must be at least 0")

    @property
    def ring_bytes_per_s(self) -> float:
        """Rate of the ring inside a server."""
        return min(self.pcie_bytes_per_s, self.upi_bytes_per_s)

    @property
    def network_bytes_per_s(self) -> float:
        """Rate between servers."""
        return min(self.nic_bytes_per_s, self.link_bytes_per_s)
