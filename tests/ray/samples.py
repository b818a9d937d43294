"""A site whose scheduler is a test's Ray cluster."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from isthmus.agent.adapters.ray.ray_adapter import RayAdapter
from isthmus.agent.adapters.ray.ray_rest import RayRest
from isthmus.agent.adapters.ray.ray_site import RaySite
from isthmus.agent.courier.courier import Courier
from isthmus.core.owner.site_file import SiteFile
from isthmus.core.pool import Cluster, NodeGroup
from tests.ray.ray_cluster import RayCluster

NUM_NODES = 2


def cluster_of(ray: RayCluster) -> Cluster:
    """Return the cluster as `pool.yaml` has it."""
    group = NodeGroup(name="h20", chip="H20", nodes=NUM_NODES, chips_per_node=ray.num_cards)
    return Cluster(name="east", owner="o", node_groups=(group,))


def adapter_of(
    ray: RayCluster, state: Path, courier: Courier, command: Sequence[str], rest: RayRest | None = None,
    python: str = sys.executable,
) -> RayAdapter:  # fmt: skip
    """Return an adapter of the cluster whose workers run `command`; `rest` is another way to it."""
    file = SiteFile(kind="ray", options={"address": ray.address, "python": python})
    rest = rest or RayRest(ray.address, timeout_s=30.0)
    return RayAdapter(RaySite(file, cluster_of(ray)), state, rest, courier, tuple(command))
