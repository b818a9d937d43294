"""A real Slurm cluster for the tests of this folder; skipped, and said so, where Slurm is not installed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.slurm.slurm_cluster import SlurmCluster, missing_programs

EMPTY_S = 30.0
"""Time in which the jobs that a test has ended leave the queue."""


@pytest.fixture(scope="package")
def alpha(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Two nodes with four cards each."""
    yield from running_cluster("alpha", tmp_path_factory)


@pytest.fixture(scope="package")
def beta(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Another cluster, with keys and ports of its own."""
    yield from running_cluster("beta", tmp_path_factory)


@pytest.fixture(autouse=True)
def empty_clusters(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves jobs in a cluster, and end them, so that the next one finds all cards free."""
    yield
    for name in {"alpha", "beta"} & set(request.fixturenames):
        cluster: SlurmCluster = request.getfixturevalue(name)
        try:
            if cluster.num_kills:  # a slurmctld that was killed may show again what has ended
                cluster.run("scancel", "--user=root")
                cluster.save_state()
                cluster.num_kills = 0
            cluster.wait_empty(EMPTY_S)
        except AssertionError:
            left = cluster.run("squeue", "-h", "-o", "%A %t %j")
            cluster.run("scancel", "--user=root")
            cluster.wait_empty()
            pytest.fail(f"jobs left in {name}:\n{left}")


def require_slurm() -> None:
    """Skip the test where no Slurm cluster can be started."""
    missing = missing_programs()
    if missing or os.geteuid() != 0:
        packages = "slurmctld slurmd slurm-client munge"
        pytest.skip(f"needs root and Slurm ({', '.join(missing)}): apt-get install -y {packages}")


def running_cluster(name: str, folders: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Start a cluster, and end it where the generator is closed or goes on."""
    require_slurm()
    cluster = SlurmCluster(name, folders.mktemp(name))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()
