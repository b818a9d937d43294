"""`make_allocator`: the device allocator of a cluster, by what is known of its devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from isthmus.core.pool import Cluster
from isthmus.site.devices.device_allocator import DeviceAllocator
from isthmus.site.devices.device_count_allocator import DeviceCountAllocator
from isthmus.site.devices.device_id_allocator import DeviceIdAllocator
from isthmus.site.devices.topology_allocator import TopologyAllocator
from isthmus.site.topology.tree_of_group import node_names


def make_allocator(cluster: Cluster, ids: Mapping[str, Sequence[str]] | None = None) -> DeviceAllocator:
    """Return the allocator of `cluster`; `ids` are its devices by node group (None: those of `pool.yaml`, simulated).

    Simulated devices are only counted, unless a node group has a topology, by which they are placed.
    """
    has_topology = any(group.topology is not None for group in cluster.node_groups)
    if ids is None and not has_topology:
        return DeviceCountAllocator({group.name: group.num_chips for group in cluster.node_groups})
    if ids is None:
        ids = {
            group.name: [f"{group.name}/{node}/{card}" for node in node_names(cluster, group.name)
                         for card in range(group.chips_per_node)]
            for group in cluster.node_groups
        }  # fmt: skip
    return TopologyAllocator(cluster.name, cluster.node_groups, ids) if has_topology else DeviceIdAllocator(ids)
