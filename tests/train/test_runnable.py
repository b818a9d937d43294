"""Rule: what the planner calls runnable the runtime executes; what it cannot, it refuses before start."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from isthmus.core.errors import PlanError
from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.core.plan import Plan
from isthmus.plan.profile.component import Recompute
from isthmus.plan.search.finish.runtime_support import RUNTIME_SCHEDULES, runtime_incompatibility
from isthmus.schedule import SCHEDULES, SEARCHED
from isthmus.train.process.check_plan_supported import check_plan_supported
from tests.schedule.wan_orders import wan_orders
from tests.train.worker_jobs import make_job, make_plan


def both(folder: Path, fixed: dict[str, Any], variant: str = "llama", **changes: Any) -> tuple[Plan, WorkerSpec]:
    """Return a plan of two stages for a small job, and the specification of its first worker."""
    job = make_job(folder, variant)
    plan = make_plan(job, [2, 4], **changes).model_copy(update=fixed)
    return plan, WorkerSpec(run="r", attempt=1, rank=0, job=job, plan=plan)


@pytest.mark.parametrize("schedule", RUNTIME_SCHEDULES)
def test_every_schedule_is_executed(schedule: str, tmp_path: Path) -> None:
    """All that there are, with any kind of recomputation, and the optimizer on either side."""
    assert set(RUNTIME_SCHEDULES) == {*SCHEDULES, SEARCHED}
    count = make_job(tmp_path).training.num_micro_batches
    orders = [{"stages": wan_orders(2, count)}] if schedule == SEARCHED else []
    for kind, on_host in zip(get_args(Recompute), (False, True) * 2, strict=True):
        fixed = {"optimizer_on_host": on_host}
        plan, spec = both(tmp_path, fixed, schedule=schedule, orders=orders, stage={"recompute": kind})
        assert runtime_incompatibility(plan) is None
        assert check_plan_supported(spec).name == schedule


def test_a_searched_schedule_needs_its_orders(tmp_path: Path) -> None:
    """Without them every rank would search its own; both sides say how to add them."""
    plan, spec = both(tmp_path, {}, schedule=SEARCHED)
    assert "simulate --schedule searched" in str(runtime_incompatibility(plan))
    with pytest.raises(PlanError, match="without orders"):
        check_plan_supported(spec)


@pytest.mark.parametrize("more", [{}, {"cp_kind": "ring"}, {"cp_kind": "all_to_all"}, {"cp_rates": (1.0, 0.3)}])
def test_every_kind_of_context_parallelism_is_executed(more: dict[str, Any], tmp_path: Path) -> None:
    """Both sides accept the three kinds that a plan may name, and chips of unlike rates."""
    plan, spec = both(tmp_path, {}, stage={"cp": 2, **more})
    assert runtime_incompatibility(plan) is None
    assert check_plan_supported(spec).trains


def test_local_steps_are_executed(tmp_path: Path) -> None:
    """Both sides accept replicas that train apart, and the runtime only if the job admits it."""
    job = make_job(tmp_path, training={"local_steps": 3})
    stages = [{"replica": r, "cluster": "ab"[r], "node_group": "cpu", "layers": (0, 4)} for r in range(2)]
    fixed = {"stages": stages, "dp": 2, "micro_batches": 2, "local_steps": 3}
    plan = Plan.model_validate(make_plan(job, [4]).model_dump() | fixed)
    assert runtime_incompatibility(plan) is None
    spec = WorkerSpec(run="r", attempt=1, rank=1, job=job, plan=plan)
    assert check_plan_supported(spec).trains
    every_step = spec.model_copy(update={"job": make_job(tmp_path)})
    with pytest.raises(PlanError, match="local_steps is 3 in the plan and 1 in the job"):
        check_plan_supported(every_step)


def test_expert_parallelism_is_executed(tmp_path: Path) -> None:
    """Both sides accept experts that the chips of a stage share."""
    plan, spec = both(tmp_path, {}, variant="mixtral", stage={"tp": 2, "ep": 2})
    assert runtime_incompatibility(plan) is None
    assert check_plan_supported(spec).trains


@pytest.mark.parametrize(
    "stage", [{"cp": 2, "recompute": "selective"}, {"ep": 2}, {"cp": 2, "ep": 2, "recompute": "selective"}]
)
def test_what_is_refused_is_not_called_runnable(stage: dict[str, int], tmp_path: Path) -> None:
    """Both sides say no, each with its reason."""
    plan, spec = both(tmp_path, {}, stage=stage)
    assert runtime_incompatibility(plan)
    with pytest.raises(PlanError):
        check_plan_supported(spec)
