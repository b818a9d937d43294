"""The equations of the PASSING paper, section 4: known answers for `seconds`, which prices any strategy.

Symbols: `K` bytes of parameters, `s` servers of `n` chips each, `p` parameter servers (or switches). Chips of
a server form a ring over PCIe and UPI; a server reaches the network over a NIC and a link. Rates are in bytes
per second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isthmus.sim.synchronisation.sync_cluster import SyncCluster


@dataclass(frozen=True, kw_only=True)
class NetworkTime:
    """Time of the communication between servers, at the aggregators and at the workers."""

    aggregator_s: float
    worker_s: float

    @property
    def total_s(self) -> float:
        """The longer of the two; both ends work in parallel."""
        return max(self.aggregator_s, self.worker_s)

    @property
    def bound(self) -> Literal["aggregator", "worker"]:
        """The slower end."""
        return "aggregator" if self.aggregator_s >= self.worker_s else "worker"


def reduce_scatter_s(num_bytes: float, cluster: SyncCluster) -> float:
    """Return the time of the reduce-scatter inside a server: equation (1), (n - 1) K / (n min(PCIe, UPI))."""
    n = cluster.chips_per_server
    return (n - 1) * num_bytes / (n * cluster.ring_bytes_per_s)


def psring_network(num_bytes: float, cluster: SyncCluster) -> NetworkTime:
    """Return the time of push and broadcast between servers: equation (2), 2 s K / (p min(NIC, link)).

    The equation counts the aggregators' NICs only; a worker's NIC moves 2 K and is the bottleneck if there
    are more aggregators than servers.
    """
    rate = cluster.network_bytes_per_s
    share = cluster.num_servers / cluster.num_aggregators
    return NetworkTime(aggregator_s=2 * share * num_bytes / rate, worker_s=2 * num_bytes / rate)


def psring_s(num_bytes: float, cluster: SyncCluster) -> float:
    """Return the time with a ring inside servers and parameter servers outside: equation (3), (1) + (2)."""
    return reduce_scatter_s(num_bytes, cluster) + psring_network(num_bytes, cluster).total_s


def parameter_server_network(num_bytes: float, cluster: SyncCluster) -> NetworkTime:
    """Return the time if every chip uses the parameter servers directly: equation (4), 2 s n K / (p B)."""
    one = psring_network(num_bytes, cluster)
    n = cluster.chips_per_server
    return NetworkTime(aggregator_s=n * one.aggregator_s, worker_s=n * one.worker_s)


def parameter_server_s(num_bytes: float, cluster: SyncCluster) -> float:
    """Return the total time of `parameter_server_network`."""
    return parameter_server_network(num_bytes, cluster).total_s


def passing_s(num_bytes: float, cluster: SyncCluster) -> float:
    """Return the time with a ring inside servers and aggregation in the switches.

    A switch adds at line rate and multicasts, so the bottleneck is a worker's NIC, which sends and receives K
    at once. The paper gives no equation; this expresses section 4.2 in the terms of (1) and (2).
    """
    return reduce_scatter_s(num_bytes, cluster) + num_bytes / cluster.network_bytes_per_s
