"""The time of collectives: alpha-beta models by topology tier, with the faster algorithm for each size.

A group of `size` chips, `stride` positions apart, spans one or several nodes. Each chip has a link inside its
node and a share of the network between nodes. A collective over several nodes is hierarchical: reduce-scatter
inside, all-reduce of each chip's part between nodes, all-gather inside. Source: R. Thakur, R. Rabenseifner,
W. Gropp, "Optimization of collective communication operations in MPICH", 2005.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from isthmus.plan.profile.mean_places import Routing, mean_places

NODE_HOP_S = 4e-6
"""Seconds of one step of a collective inside a node, without its start-up latency."""

NETWORK_HOP_S = 8e-6
"""Seconds of one step of a collective between nodes."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Achieved rates per chip and direction, and start-up latencies, inside a node and between nodes."""

    chips_per_node: int
    """Chips that the fast link joins: those of a node, or of a larger domain."""
    link_bytes_per_s: float
    link_latency_s: float
    network_bytes_per_s: float
    network_latency_s: float

    def tiers(self, size: int, stride: int = 1) -> tuple[int, int]:
        """Return (chips per node, nodes) of a group of `size` chips that are `stride` positions apart."""
        inside = min(size, max(1, self.chips_per_node // stride))
        return inside, -(-size // inside)


def ring_all_reduce_s(num_bytes: float, size: int, bytes_per_s: float, hop_s: float) -> float:
    """Return 2 (p - 1) a + 2 (p - 1) / p B b, which is bandwidth-optimal."""
    return 2 * (size - 1) * hop_s + 2 * (size - 1) / size * num_bytes / bytes_per_s


def tree_all_reduce_s(num_bytes: float, size: int, bytes_per_s: float, hop_s: float) -> float:
    """Return 2 log2(p) a + 2 B b, for a pipelined double tree, which is faster for small messages."""
    return 2 * math.ceil(math.log2(size)) * hop_s + 2 * num_bytes / bytes_per_s


def all_reduce_s(topology: Topology, num_bytes: float, size: int, stride: int = 1) -> float:
    """Return the seconds of an all-reduce of `num_bytes` on each of `size` chips."""
    return sum(_all_reduce_parts_s(topology, num_bytes, size, stride))


def _all_reduce_parts_s(topology: Topology, num_bytes: float, size: int, stride: int) -> tuple[float, float]:
    """Return the seconds inside nodes and between them."""
    if size < 2:
        return 0.0, 0.0
    inside, nodes = topology.tiers(size, stride)
    local_s = between_s = 0.0
    if inside > 1:
        args = (num_bytes, inside, topology.link_bytes_per_s, NODE_HOP_S)
        local_s = topology.link_latency_s + min(ring_all_reduce_s(*args), tree_all_reduce_s(*args))
    if nodes > 1:
        args = (num_bytes / inside, nodes, topology.network_bytes_per_s, NETWORK_HOP_S)
        between_s = topology.network_latency_s + min(ring_all_reduce_s(*args), tree_all_reduce_s(*args))
    return local_s, between_s


def all_gather_s(topology: Topology, num_bytes: float, size: int, stride: int = 1) -> float:
    """Return the seconds of an all-gather of `size` parts to `num_bytes` (or of the inverse reduce-scatter).

    It is half of a ring all-reduce; each chip first gathers its share between nodes, then inside its node.
    """
    if size < 2:
        return 0.0
    inside, nodes = topology.tiers(size, stride)
    seconds = 0.0
    if inside > 1:
        seconds += topology.link_latency_s + (inside - 1) * NODE_HOP_S
        seconds += (inside - 1) / inside * num_bytes / topology.link_bytes_per_s
    if nodes > 1:
        seconds += topology.network_latency_s + (nodes - 1) * NETWORK_HOP_S
        seconds += (nodes - 1) / nodes * num_bytes / inside / topology.network_bytes_per_s
    return seconds


def all_to_all_s(topology: Topology, num_bytes: float, size: int, stride: int = 1) -> float:
    """Return the seconds of an all-to-all in which each of `size` chips sends `num_bytes`, evenly to all.

    Traffic inside the node and between nodes uses separate links in parallel.
    """
    if size < 2:
        return 0.0
    inside, nodes = topology.tiers(size, stride)
    local_s = between_s = 0.0
    if inside > 1:
        local_s = topology.link_latency_s + num_bytes * (inside - 1) / size / topology.link_bytes_per_s
    if nodes > 1:
        away = num_bytes * (size - inside) / size
        between_s = topology.network_latency_s + away / topology.network_bytes_per_s
    return max(local_s, between_s)


def node_all_to_all_s(topology: Topology, num_bytes: float, size: int, stride: int, routing: Routing) -> float:
    """Return the seconds of sending `num_bytes` of tokens to their experts, once to each node that has one.

    The node's links spread what arrived to the chips of the node. Both kinds of links work at once. Source:
    deepseek-ai/DeepEP, normal kernels; to how many nodes and chips a token goes is `mean_places`.
    """
    if size < 2:
        return 0.0
    inside, nodes = topology.tiers(size, stride)
    local_s = between_s = 0.0
    if inside > 1:
        copies = mean_places(size, routing) * (inside - 1) / inside
        local_s = topology.link_latency_s + copies * num_bytes / topology.link_bytes_per_s
    if nodes > 1:
        copies = mean_places(nodes, routing) * (nodes - 1) / nodes
        between_s = topology.network_latency_s + copies * num_bytes / topology.network_bytes_per_s
    return max(local_s, between_s)


def ring_pass_s(topology: Topology, num_bytes: float, size: int, stride: int = 1) -> float:
    """Return the seconds in which `num_bytes` of each chip have gone round a ring; the slowest hop sets the pace."""
    return (size - 1) * send_s(topology, num_bytes, same_node=topology.tiers(size, stride)[1] == 1)


def send_s(topology: Topology, num_bytes: float, *, same_node: bool, target: Topology | None = None) -> float:
    """Return the seconds of one message between two chips; `target` is the receiver's, if it differs.

    Between nodes the slower of their networks carries it.
    """
    if same_node:
        return topology.link_latency_s + num_bytes / topology.link_bytes_per_s
    other = target or topology
    rate = min(topology.network_bytes_per_s, other.network_bytes_per_s)
    return max(topology.network_latency_s, other.network_latency_s) + num_bytes / rate


@cache
def all_reduce_bytes_per_s(topology: Topology, size: int, stride: int = 1) -> float:
    """Return the rate R of a large all-reduce, which takes 2 (p - 1) / p x bytes / R seconds."""
    if size < 2:
        return math.inf
    num_bytes = 1e12
    return 2 * (size - 1) / size * num_bytes / all_reduce_s(topology, num_bytes, size, stride)
