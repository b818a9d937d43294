"""`label_topology`: the topology of nodes from their labels.

Of each level the first label that any node of the group has counts: ours (`isthmus site topology`), those that NVIDIA's
Topograph and GPU feature discovery write, those of clouds, and the well-known zone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from isthmus.core.base_model import NAME_PATTERN
from isthmus.core.pool_parts.found_topology import found_topology
from isthmus.core.pool_parts.group_topology import GroupTopology
from isthmus.core.pool_parts.scheduler_topology import LABEL

LEVEL_LABELS = {
    "super_nodes": (f"{LABEL}/super-node", "network.topology.nvidia.com/accelerator", "nvidia.com/gpu.clique"),
    "tors": (
        f"{LABEL}/tor", "network.topology.nvidia.com/leaf", "topology.k8s.aws/network-node-layer-3",
        "cloud.google.com/gce-topology-subblock",
    ),
    "spines": (
        f"{LABEL}/spine", "network.topology.nvidia.com/spine", "topology.k8s.aws/network-node-layer-2",
        "cloud.google.com/gce-topology-block", "topology.kubernetes.io/zone",
    ),
}  # fmt: skip
"""By level of `GroupTopology`: labels whose value names the domain of a node."""


def label_topology(labels: Mapping[str, Mapping[str, str]]) -> GroupTopology | None:
    """Return the topology of the nodes whose labels are given; None if none names a domain.

    Raises `InputError` for domains that form no tree.
    """
    levels: dict[str, dict[str, list[str]]] = {}
    for level, keys in LEVEL_LABELS.items():
        key = next((one for one in keys if any(one in own for own in labels.values())), "")
        domains = levels.setdefault(level, {})
        for node, own in labels.items():
            if re.fullmatch(NAME_PATTERN, own.get(key, "")):
                domains.setdefault(own[key], []).append(node)
    return found_topology(labels.keys(), **levels)
