"""Seeded faults on a real API server: nothing of a hold, a worker or an event is lost, doubled or left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.clusters import RealCluster
from tests.kubernetes.faulty_run import FaultyRun
from tests.kubernetes.watched_run import WatchedRun

NUM_WHOLE, NUM_SHORT = 200, 4
STEPS, SHARE_LOST = 24, 0.3


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_fault_doubles_or_leaves_anything(whole: bool, api_server: ApiServer, tmp_path: Path) -> None:
    """Random steps, lost replies among them and a kill in each run; every run ends with an empty namespace."""
    num_faults = num_runs = 0
    while num_faults < (NUM_WHOLE if whole else NUM_SHORT):
        folder = tmp_path / str(num_runs)
        cluster = RealCluster(folder, api_server, seed=num_runs, share_lost=SHARE_LOST)
        try:
            run = FaultyRun(cluster, folder, seed=num_runs)
            run.run(STEPS)
        finally:
            cluster.end()
        assert not +run.problems, f"seed {num_runs}: {+run.problems}, {run.steps}"
        num_faults, num_runs = num_faults + run.num_faults, num_runs + 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_event_is_lost_or_acted_on_twice(whole: bool, api_server: ApiServer) -> None:
    """Objects come, change and go while the server is killed and its log is compacted."""
    run = WatchedRun(api_server, seed=7)
    run.run(num_rounds=12 if whole else 2)
    assert not +run.problems, run.problems
    assert run.num_kills >= 1
