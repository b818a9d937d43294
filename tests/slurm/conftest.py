"""A real Slurm cluster for the tests of this folder; skipped, and said so, where Slurm is not installed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.slurm.slurm_cluster import SlurmCluster, missing_programs


@pytest.fixture(scope="session")
def alpha(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Two nodes with four cards each."""
    yield from _cluster("alpha", tmp_path_factory)


@pytest.fixture(scope="session")
def beta(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Another cluster, with keys and ports of its own."""
    yield from _cluster("beta", tmp_path_factory)


def _cluster(name: str, folders: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    missing = missing_programs()
    if missing or os.geteuid() != 0:
        packages = "slurmctld slurmd slurm-client munge"
        pytest.skip(f"needs root and Slurm ({', '.join(missing)}): apt-get install -y {packages}")
    cluster = SlurmCluster(name, folders.mktemp(name))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()
