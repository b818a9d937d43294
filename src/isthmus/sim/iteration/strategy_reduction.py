"""The time of summing the gradients of a segment by a named strategy, and by default."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from isthmus.core.errors import InputError
from isthmus.sim.iteration.layer_segment import LayerSegment
from isthmus.sim.links.simulated_link import SimulatedLink
from isthmus.sim.synchronisation import SyncCluster, SyncServers, SyncTime, seconds

LinkOf = Callable[[str, str], SimulatedLink]
"""Returns the link from one cluster to another."""


def segment_servers(segment: LayerSegment, link_of: LinkOf) -> SyncServers:
    """Return where the holders of `segment` in several clusters sum: each cluster is one server.

    Its chips are the most replicas that a cluster has, and its ring the collective rate of the slowest cluster. The
    network is the slowest link between clusters that follow each other. No aggregator serves several clusters.
    """
    clusters = segment.members_by_cluster
    links = _ring_links(list(clusters), link_of)
    inside = min(holder.local_bytes_per_s for holder in segment.holders)
    rate = min(link.bytes_per_s for link in links)
    return SyncServers(
        place="a group of several clusters",
        alone=SyncCluster(
            num_servers=len(clusters),
            chips_per_server=max(clusters.values()),
            num_aggregators=1,
            pcie_bytes_per_s=inside,
            upi_bytes_per_s=inside,
            nic_bytes_per_s=rate,
            link_bytes_per_s=rate,
            network_delay_s=max(link.delay_s for link in links),
        ),
    )


def strategy_time(segment: LayerSegment, strategy: str, link_of: LinkOf) -> SyncTime:
    """Return the time of summing the segment's gradients by `strategy`, alone on its links.

    Raises `PlanError` if the strategy needs an aggregator that is not there, `InputError` for an unknown strategy.
    """
    if len(segment.members_by_cluster) > 1:
        places = [segment_servers(segment, link_of)]
    else:
        places = list(dict.fromkeys(holder.servers for holder in segment.holders if holder.servers is not None))
        if not places:
            raise InputError(f"no servers for strategy '{strategy}'", hint="give `StageLoad.servers`")
    times = [seconds(strategy, segment.num_bytes(), one.for_strategy(strategy)) for one in places]
    return max(times, key=lambda time: time.total_s)


def default_time_s(segment: LayerSegment, link_of: LinkOf) -> float:
    """Return the time of the sum that the runtime executes: inside each cluster first, then a ring of the clusters."""
    clusters, between_s = segment.members_by_cluster, 0.0
    if len(clusters) > 1:
        links, share = _ring_links(list(clusters), link_of), 2 * (len(clusters) - 1)
        between_s = segment.num_bytes() * share / len(clusters) / min(link.bytes_per_s for link in links)
        between_s += share * max(link.delay_s for link in links)
    return 2 * segment.local_s() + between_s


def _ring_links(names: list[str], link_of: LinkOf) -> list[SimulatedLink]:
    return [link_of(source, target) for source, target in pairwise([*names, names[0]])]
