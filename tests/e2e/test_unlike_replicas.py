"""Unlike replicas, the whole way with real processes: planned, chosen, preempted at both owners, restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isthmus.cli.demo.demo_pool import DemoPool
from isthmus.core.job import Job
from isthmus.core.plan import Plan
from tests.e2e.site import (
    all_metrics,
    as_one_process,
    at_step,
    choose,
    clusters_of,
    make_job,
    make_model,
    running,
    state_is,
    submit,
    wait_until,
)

pytestmark = pytest.mark.slow

STEPS = 24


def two_and_one() -> dict[str, Any]:
    """Two owners: at the first two cores with room for half of the model each, at the other one for all."""
    pool = clusters_of({"north": 2, "south": 1}, 1e-3)
    pool["clusters"][0]["node_groups"][0]["virtual"]["memory_scale"] = 2.5e-4
    return pool


def job_of(folder: Path, name: str, **changes: Any) -> Job:
    """A job of 24 short samples a step."""
    job = make_job(folder, name, steps=STEPS, every_steps=0, **changes)
    sizes = {"sequence_length": 64, "global_batch_size": 24}
    return job.model_copy(update={"training": job.training.model_copy(update=sizes)})


def is_unlike(plan: Plan) -> bool:
    """Return whether one replica has two stages in the north and the other is one in the south."""
    pipelines = [[stage.cluster for stage in plan.pipeline(replica)] for replica in range(plan.dp)]
    return sorted(pipelines) == [["north", "north"], ["south"]]


def test_unlike_replicas_train_what_one_process_trains(tmp_path: Path, whole: bool) -> None:
    """Replicas of two stages and of one, at two owners, with unlike numbers of micro-batches: losses of one process.

    1. The job is offered such a plan and its user takes it: all three workers start. With `--whole`: 2. The user of
    another, planned for the south, chooses: nothing is ended before its work is safe, then both owners are left.
    3. The rest trains afterwards. `test_preemption.py` preempts like replicas in every run.
    """
    with running(tmp_path, two_and_one()) as site:
        client = site.client
        urgent = _plan_urgent(site) if whole else ""
        unlike_job = job_of(tmp_path, "unlike", policy="manual", priority="low")
        unlike = submit(client, unlike_job).id
        plan = choose(client, unlike, is_unlike)
        assert len(set(plan.replica_micro_batches)) == 2
        assert plan.predicted is not None
        assert set(plan.predicted.gradient_gbps) == {"north>south", "south>north"}
        if whole:
            _preempt(site, unlike, urgent)
        view, metrics = state_is(client, unlike, "succeeded"), all_metrics(client, unlike)
    assert view.plan is not None
    assert is_unlike(view.plan)
    assert (view.attempt > 1, view.restarts) == (whole, 0), "to be preempted is no failure"
    assert {one.rank for one in metrics} == {0, 1, 2}
    as_one_process(unlike_job, metrics, tmp_path / "alone")


def _plan_urgent(site: DemoPool) -> str:
    """Submit a job that is planned for the south and waits for its user's choice; return its id."""
    job = make_job(
        site.folder, "urgent", steps=4, model=make_model(site.folder, "small", num_hidden_layers=1),
        priority="high", placement={"clusters": ["south"]}, policy="manual",
    )  # fmt: skip
    urgent = submit(site.client, job).id
    state_is(site.client, urgent, "choosing")
    return urgent


def _preempt(site: DemoPool, unlike: str, urgent: str) -> None:
    """Preempt the running job `unlike` for the job `urgent`, which trains to its end."""
    at_step(site.client, unlike, 3)
    choose(site.client, urgent)
    offered = wait_until("an offer", lambda: site.client.job(urgent).offer)
    assert {(victim.job, victim.cluster) for victim in offered} == {(unlike, "south")}
    site.client.preempt(urgent, offered)
    state_is(site.client, urgent, "succeeded")
