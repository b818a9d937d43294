"""A real Ray cluster for the tests of this folder; skipped, and said so, where Ray is not installed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ray.ray_cluster import RayCluster, missing_ray


@pytest.fixture(scope="package")
def ray() -> Iterator[RayCluster]:
    """Two nodes with two cards each, on loopback; Ray's sockets need a short path.

    It ends with the last test of this folder: its dozen processes use CPU time also while nothing is asked of them.
    """
    if missing_ray():
        pytest.skip(f"needs Ray: {missing_ray()}")
    cluster = RayCluster(Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp")))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()
