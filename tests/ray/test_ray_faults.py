"""Seeded faults on a real Ray: requests and replies lost, agents that forget everything, the dashboard out of reach."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.agent.courier.courier import Courier
from tests.ray.faulty_run import FaultyRun
from tests.ray.ray_cluster import RayCluster

NUM_FAULTS, NUM_STEPS = 200, 12


@pytest.fixture
def courier(tmp_path: Path) -> Iterator[Courier]:
    made = Courier(tmp_path / "state")
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_fault_doubles_or_leaves_anything(whole: bool, ray: RayCluster, courier: Courier, tmp_path: Path) -> None:
    """Random steps with losses between them; every run ends with an empty cluster."""
    if not whole:
        pytest.skip("minutes: --whole tries it; the fault rules of the kit are the short form")
    num_faults = num_runs = 0
    while num_faults < NUM_FAULTS:
        folder = tmp_path / str(num_runs)
        folder.mkdir()
        run = FaultyRun(ray, folder, courier, tmp_path / "state", seed=num_runs)
        run.run(NUM_STEPS)
        assert not +run.problems, f"seed {num_runs}: {run.problems}, {run.steps}"
        num_faults, num_runs = num_faults + run.num_faults, num_runs + 1
