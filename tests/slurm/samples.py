"""A site whose scheduler is a test's Slurm cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from isthmus.agent.adapters.slurm.slurm_adapter import SlurmAdapter
from isthmus.agent.adapters.slurm.slurm_commands import SlurmCommands
from isthmus.agent.adapters.slurm.slurm_site import SlurmSite
from isthmus.core.owner.site_file import NodeSelector, SiteFile
from isthmus.core.pool import Cluster, NodeGroup
from tests.slurm.slurm_cluster import SlurmCluster


def site_of(slurm: SlurmCluster) -> SlurmSite:
    """Return the mapping of the cluster as `site.yaml` has it."""
    groups = {"h20": NodeSelector(partition="normal", resource=slurm.gres)}
    file = SiteFile(kind="slurm", node_groups=groups, options={"preempting_partition": "high"})
    return SlurmSite(file, cluster_of(slurm))


def cluster_of(slurm: SlurmCluster) -> Cluster:
    """Return the cluster as `pool.yaml` has it."""
    group = NodeGroup(name="h20", chip="H20", nodes=slurm.num_nodes, chips_per_node=slurm.num_cards)
    return Cluster(name=slurm.name, owner="o", node_groups=(group,))


def adapter_of(
    slurm: SlurmCluster, state: Path, command: Sequence[str], commands: SlurmCommands | None = None
) -> SlurmAdapter:
    """Return an adapter of the cluster whose workers run `command`, by `commands` if given."""
    own = commands or SlurmCommands(config=str(slurm.conf), timeout_s=5.0)
    return SlurmAdapter(site_of(slurm), state, own, tuple(command))
