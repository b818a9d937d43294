"""The topology of a real Slurm's nodes, as its own command prints it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.agent.service.use_found_topology import use_found_topology
from isthmus.core.pool_parts.group_topology import GroupTopology, TopologyDomain
from isthmus.core.pool_parts.scheduler_topology import scheduler_topology
from tests.slurm.conftest import require_slurm
from tests.slurm.samples import adapter_of, cluster_of
from tests.slurm.slurm_cluster import SlurmCluster

NODES = ("gamma1", "gamma2")
TREE = GroupTopology(
    tors=(TopologyDomain(name="t0", nodes=("gamma1",)), TopologyDomain(name="t1", nodes=("gamma2",))),
    spines=(TopologyDomain(name="p0", nodes=NODES),),
)


@pytest.fixture
def gamma(tmp_path: Path) -> Iterator[SlurmCluster]:
    """A cluster with the `topology.conf` that `isthmus site topology` writes."""
    require_slurm()
    slurm = SlurmCluster("gamma", tmp_path / "slurm", topology=scheduler_topology("h20", NODES, TREE, "slurm-tree"))
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.end()


def test_a_slurm_without_a_topology_says_nothing(alpha: SlurmCluster, tmp_path: Path) -> None:
    """Its cluster stays as pool.yaml has it, without a warning."""
    cluster = cluster_of(alpha)
    assert use_found_topology(cluster, adapter_of(alpha, tmp_path, ())) is cluster


@pytest.mark.slow
def test_the_switches_of_a_slurm_are_those_of_its_node_group(gamma: SlurmCluster, tmp_path: Path) -> None:
    """What Isthmus wrote for Slurm, Slurm says again."""
    found = use_found_topology(cluster_of(gamma), adapter_of(gamma, tmp_path, ()))
    assert found.node_groups[0].topology == TREE
