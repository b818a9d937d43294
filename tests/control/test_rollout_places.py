"""Rules of plans of reinforcement learning: each cluster does what `placement` says of it."""

from __future__ import annotations

from pathlib import Path

from isthmus.control.placement.plan_request import PlanRequest
from isthmus.control.placement.propose_plans import propose_plans
from isthmus.core.model import load_model
from isthmus.core.pool import Pool
from tests.e2e.site import clusters_of
from tests.rl.rl_jobs import make_rl_job


def test_named_clusters_train_and_decode(tmp_path: Path) -> None:
    """No plan trains at a cluster that `train` does not name, also none that was moved; all of `rollouts` decode."""
    job = make_rl_job(tmp_path, steps=4, placement={"train": ["a"], "rollouts": ["b", "c"]})
    pool = Pool.model_validate(clusters_of({"a": 1, "b": 1, "c": 1}, 1.0))
    free = {one.name: {group.name: group.num_chips for group in one.node_groups} for one in pool.clusters}
    request = PlanRequest(job=job, pool=pool, model=load_model(job.model), free_chips=free)
    plans = propose_plans(request).plans
    assert plans
    for plan in plans:
        assert {stage.cluster for stage in plan.stages} == {"a"}
        assert [one.cluster for one in plan.rollouts] == ["b", "c"]
