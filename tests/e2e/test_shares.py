"""A job whose stages are shared by two cards each, the whole way with real processes, in one curve."""

import json
from pathlib import Path
from typing import Any

import pytest

from isthmus.cli.demo_site import DemoPool
from tests.e2e.site import (
    CONFIG,
    all_metrics,
    losses,
    make_folder,
    make_job,
    submit,
    three_clusters,
    train_alone,
    wait_until,
)

pytestmark = pytest.mark.slow


def two_clusters() -> dict[str, Any]:
    """Two owners with a node of two cores each, with all their memory."""
    pool = three_clusters()
    pool["clusters"] = pool["clusters"][:2]
    names = [cluster["name"] for cluster in pool["clusters"]]
    pool["links"] = [link for link in pool["links"] if link["between"] == names]
    for cluster in pool["clusters"]:
        cluster["node_groups"][0] |= {"chips_per_node": 2, "virtual": {"memory_scale": 1.0}}
    return pool


def test_stages_shared_by_two_cards_train_what_one_process_trains(tmp_path: Path) -> None:
    """Two sites of two cards, tensor parallelism 2 fixed by the job: four workers, one loss, one result."""
    pool = make_folder(tmp_path, two_clusters())
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG | {"num_key_value_heads": 2}))
    with DemoPool(tmp_path, pool) as site:
        job = make_job(tmp_path, "shares", steps=12, policy="manual", parallel={"tp": 2, "pp": 2})
        view = submit(site.client, job)
        wait_until("plans are there", lambda: site.client.job(view.id).state == "choosing")
        plan = next(one for one in site.client.plans(view.id).plans if len(one.clusters) == 2)
        assert [(stage.tp, stage.sp) for stage in plan.stages] == [(2, True), (2, True)]
        site.client.choose(view.id, plan.id)
        wait_until(
            "the job ends",
            lambda: site.client.job(view.id).state in ("succeeded", "failed", "cancelled"),
        )
        assert site.client.job(view.id).state == "succeeded", site.client.job(view.id).reason
        metrics = all_metrics(site.client, view.id)
    assert {one.rank for one in metrics} == {0, 1, 2, 3}
    assert {one.rank for one in metrics if "loss" in one.values} == {2}, "one rank tells the loss"
    alone = train_alone(make_job(tmp_path, "alone", steps=12), tmp_path / "alone" / "worker")
    together = losses(metrics)
    assert together.keys() == alone.keys()
    assert max(abs(together[step] - alone[step]) / alone[step] for step in alone) < 1e-4
    assert (tmp_path / "shares" / "result" / "model.safetensors.index.json").exists()
