"""A job with replicas, the whole way with real processes: planned, chosen, run at two sites, in one curve."""

from pathlib import Path

import pytest

from isthmus.cli.demo_site import DemoPool
from tests.e2e.site import (
    all_metrics,
    clusters_of,
    losses,
    make_folder,
    make_job,
    submit,
    train_alone,
    wait_until,
)

pytestmark = pytest.mark.slow


def test_replicas_across_two_sites_train_what_one_process_trains(tmp_path: Path) -> None:
    """Two replicas of two stages, fixed by the job: four workers, one loss a step, one result."""
    with DemoPool(tmp_path, make_folder(tmp_path, clusters_of({"north": 2, "south": 2}, 1.0))) as site:
        fixed = {"parallel": {"dp": 2, "pp": 2}}
        job = make_job(tmp_path, "replicas", steps=12, policy="manual", **fixed)
        view = submit(site.client, job)
        wait_until("plans are there", lambda: site.client.job(view.id).state == "choosing")
        plan = next(one for one in site.client.plans(view.id).plans if len(one.clusters) == 2)
        assert (plan.dp, len(plan.stages), plan.zero) == (2, 4, 1)
        site.client.choose(view.id, plan.id)
        wait_until(
            "the job ends",
            lambda: site.client.job(view.id).state in ("succeeded", "failed", "cancelled"),
        )
        assert site.client.job(view.id).state == "succeeded", site.client.job(view.id).reason
        metrics = all_metrics(site.client, view.id)
    assert {one.rank for one in metrics} == {0, 1, 2, 3}
    assert len([one for one in metrics if "loss" in one.values]) == 12
    alone = train_alone(make_job(tmp_path, "alone", steps=12), tmp_path / "alone" / "worker")
    together = losses(metrics)
    assert together.keys() == alone.keys()
    assert max(abs(together[step] - alone[step]) / alone[step] for step in alone) < 1e-4
    assert (tmp_path / "replicas" / "result" / "model.safetensors.index.json").exists()
