"""Rules of plans with the optimizer on the hosts, and of those that hold two copies of the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isthmus.core.errors import PlanError
from isthmus.core.job import Job
from isthmus.core.model import load_model
from isthmus.core.plan import Plan
from isthmus.plan import make_plans
from isthmus.plan.export.megatron import to_megatron
from isthmus.plan.export.torchtitan import to_torchtitan
from isthmus.plan.profile.model_profile import profile_model
from isthmus.plan.time.calibration import DATA_SHEET
from isthmus.plan.time.predict import predict
from isthmus.plan.time.stage_costs import StageCost, stage_costs
from tests.plan.hand import model_of, plan_of, pool_of
from tests.plan.test_search import CONFIG, job
from tests.plan.test_virtual_job import real_chips

POOL = pool_of("H20", "H20")


def costs(plan: Plan) -> tuple[StageCost, ...]:
    """Return what the stages of a plan cost."""
    return stage_costs(plan, POOL, profile_model(model_of()), DATA_SHEET)


def test_a_job_that_asks_gets_plans_that_say_so(tmp_path: Path) -> None:
    """Every plan for it carries it, and no other plan does."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    asked = job()
    training = asked.training.model_dump() | {"optimizer_on_host": True}
    host = Job.model_validate(asked.model_dump() | {"training": training})
    for plan in make_plans(host, load_model(file), real_chips()).plans:
        assert plan.optimizer_on_host
        assert plan.predicted is not None
        assert any("updates on the host" in note for note in plan.predicted.assumptions)
    assert not any(plan.optimizer_on_host for plan in make_plans(asked, load_model(file), real_chips()).plans)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_host_optimizer_costs_time_and_no_memory(precision: str) -> None:
    """Per stage: no optimizer bytes on the chip, the rest as it was, and more seconds for the update."""
    here, there = plan_of(precision=precision), plan_of(precision=precision, optimizer_on_host=True)
    for one, other in zip(costs(here), costs(there), strict=True):
        assert other.memory.optimizer_bytes == 0 < one.memory.optimizer_bytes
        assert other.memory.weights_bytes == one.memory.weights_bytes
        assert other.load.update_s > one.load.update_s
        assert other.load.forward_s == one.load.forward_s
    slower, usual = predict(there, POOL, model_of()), predict(here, POOL, model_of())
    assert slower.iteration_s > usual.iteration_s
    assert any("updates on the host" in note for note in slower.assumptions)
    assert not any("updates on the host" in note for note in usual.assumptions)


def test_exports_say_it_or_refuse() -> None:
    """Megatron-LM offloads its distributed optimizer; torchtitan would take the weights along."""
    alone = plan_of(optimizer_on_host=True)
    words = to_megatron(alone, model_of(), POOL).arguments
    assert "--optimizer-cpu-offload" in words
    assert "--use-precision-aware-optimizer" in words
    for export, plan in (
        (to_torchtitan, alone),
        (to_megatron, plan_of(clusters="aa", dp=2, zero=0, optimizer_on_host=True)),
    ):
        with pytest.raises(PlanError, match="the optimizer on the host"):
            export(plan, model_of(), POOL)


def test_a_bidirectional_stage_holds_two() -> None:
    """Weights, gradients and optimizer are those of a stage and of its mirror image."""
    uneven = plan_of(layers=8, clusters="ab", schedule="1f1b", micro_batches=8)
    stages = [
        stage.model_copy(update={"layers": layers})
        for stage, layers in zip(uneven.stages, ((0, 3), (3, 8)), strict=True)
    ]
    plain = uneven.model_copy(update={"stages": tuple(stages)})
    single = costs(Plan.model_validate(plain.model_dump()))
    both = costs(Plan.model_validate(plain.model_dump() | {"schedule": "dualpipe"}))
    for kind in ("weights_bytes", "gradients_bytes", "optimizer_bytes"):
        whole = sum(getattr(cost.memory, kind) for cost in single)
        assert all(getattr(cost.memory, kind) == whole for cost in both)
    most = max(cost.memory.activations_bytes for cost in single)
    assert all(cost.memory.activations_bytes == most for cost in both)
    assert both[0].load.update_s > single[0].load.update_s
