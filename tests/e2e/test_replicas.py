"""A job with replicas, the whole way with real processes: planned, chosen, run at two sites, in one curve."""

from pathlib import Path

import pytest

from isthmus.cli.demo.demo_pool import DemoPool
from tests.e2e.site import all_metrics, as_one_process, choose, make_job, state_is, submit

pytestmark = pytest.mark.slow


def test_replicas_across_two_sites_train_what_one_process_trains(pairs: DemoPool, tmp_path: Path) -> None:
    """Two replicas of two stages, fixed by the job: four workers, one loss a step, one result."""
    fixed = {"parallel": {"dp": 2, "pp": 2}}
    job = make_job(pairs.folder, "replicas", steps=12, policy="manual", **fixed)
    view = submit(pairs.client, job)
    plan = choose(pairs.client, view.id, lambda one: len(one.clusters) == 2)
    assert (plan.dp, len(plan.stages), plan.zero) == (2, 4, 1)
    state_is(pairs.client, view.id, "succeeded")
    metrics = all_metrics(pairs.client, view.id)
    assert {one.rank for one in metrics} == {0, 1, 2, 3}
    assert len([one for one in metrics if "loss" in one.values]) == 12
    as_one_process(job, metrics, tmp_path)
    assert (Path(job.output) / "model.safetensors.index.json").exists()
