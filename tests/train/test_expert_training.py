"""Rules of training with shared experts: loss, gradients and state are those of one process, whatever the cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isthmus.core.errors import PlanError
from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.core.plan import Plan
from isthmus.plan.search.finish.runtime_support import runtime_incompatibility
from isthmus.train.comparison import check_parallel
from isthmus.train.process.check_plan_supported import check_plan_supported
from tests.train.replica_threads import Cut, curve, make_plan
from tests.train.small_models import write_config
from tests.train.test_context_training import shared
from tests.train.test_executor import make_training as make_executor_training
from tests.train.test_replicas import LENGTH, close, make_training
from tests.train.test_tensor_training import alone
from tests.train.worker_jobs import fork_worker, make_job

TWO = Cut(ends=[2, 4], clusters="aa", micro_batches=4, size=1)


def changed(plan: Plan, **stage: Any) -> Plan:
    """Return `plan` with these settings of every stage."""
    stages = [one.model_dump() | stage for one in plan.stages]
    return Plan.model_validate(plan.model_dump() | {"stages": stages})


def stages_plan(stages: list[dict[str, Any]], **changes: Any) -> Plan:
    """Return a plan of `stages` in cluster a."""
    return Plan.model_validate(
        {
            "id": "p", "micro_batches": 2, "micro_batch_size": 2, "sequence_length": 16,
            "stages": [{"cluster": "a", "node_group": "cpu", "layers": (0, 4), **stage} for stage in stages], **changes,
        }
    )  # fmt: skip


@pytest.mark.integration
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("variant", "changes", "stage"),
    [
        ("mixtral", {}, {}),
        ("qwen3-moe", {"zero": 1, "overlap_gradients": True}, {"recompute": "full"}),
        ("qwen3-moe-tied-sparse", {"schedule": "zero_bubble"}, {}),
        ("qwen2-moe", {"schedule": "zero_bubble"}, {"recompute": "moe"}),
        ("qwen2-moe", {"overlap_gradients": True}, {"recompute": "full"}),
        ("mixtral", {"schedule": "interleaved", "zero": 1}, {"recompute": "moe"}),
        ("mixtral", {"schedule": "dualpipe"}, {}),
    ],
)
def test_replicas_that_share_experts_train_as_if_they_did_not(
    tmp_path: Path, variant: str, changes: dict[str, Any], stage: dict[str, Any]
) -> None:
    """Every kind of schedule, of recomputation and of reduction: the curve of replicas that hold all experts.

    Micro-batches of the replicas are of unlike sizes.
    """
    model = write_config(tmp_path, variant, **({"num_local_experts": 8} if variant == "mixtral" else {}))
    sizes, training = [1, 2], make_training(steps=4, global_batch_size=12)
    cuts = [Cut(ends=TWO.ends, clusters=TWO.clusters, micro_batches=4, size=size) for size in sizes]
    plan = changed(make_plan(cuts, LENGTH, **changes), **stage)
    apart = curve(model, plan, training)
    close(curve(model, changed(plan, ep=2), training), apart, 1e-5)
    assert apart[-1].loss < apart[0].loss


@pytest.mark.integration
@pytest.mark.usefixtures("one_thread")
def test_experts_are_summed_over_those_that_hold_them_only(tmp_path: Path) -> None:
    """Four replicas of ep 2; two of them, one with all experts, one in another cluster: the curve of one process."""
    model, training = write_config(tmp_path, "mixtral"), make_training(steps=4)
    whole = Cut(ends=[4], clusters="a", micro_batches=2, size=1)
    plan = make_plan([whole] * 4, LENGTH, zero=1)
    one = curve(model, make_plan([Cut(ends=[4], clusters="a", micro_batches=8, size=1)], LENGTH), training)
    close(curve(model, changed(plan, ep=2), training), one, 1e-5)
    places = [{"ep": 2}, {"ep": 2}, {}, {"cluster": "b"}]
    far = [stage.model_dump() | place for stage, place in zip(plan.stages, places, strict=True)]
    mixed = Plan.model_validate(plan.model_dump() | {"stages": far})
    close(curve(model, mixed, training), one, 1e-5)


@pytest.mark.integration
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("stage", [{"tp": 2}, {"tp": 2, "sp": True}, {"cp": 2, "tp": 2, "sp": True}])
@pytest.mark.parametrize("balance", [0.0, 0.5])
@pytest.mark.parametrize("variant", ["mixtral", "qwen2-moe"])
def test_chips_that_share_tensors_share_experts_too(
    tmp_path: Path, stage: dict[str, Any], balance: float, variant: str
) -> None:
    """Of tokens that they share or cut, with the balance loss of one process and without it."""
    fields = {"output_router_logits": balance > 0, "router_aux_loss_coef": balance}
    model, training = write_config(tmp_path, variant, **fields), make_executor_training(steps=3)
    stages = [stage | {"ep": stage["tp"] * stage.get("cp", 1)}]
    assert shared(model, [4], stages, training) == pytest.approx(alone(model, training), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "plan"),
    [
        ("qwen3-moe", stages_plan([{"cp": 2, "ep": 2}])),
        (
            "mixtral",
            stages_plan([{"layers": (0, 2), "cp": 2, "ep": 2}, {"layers": (2, 4), "tp": 2, "sp": True, "ep": 2}]),
        ),
        ("mixtral", stages_plan([{"ep": 2}, {"ep": 2, "replica": 1}], dp=2, micro_batches=1, zero=1)),
    ],
    ids=["ep 2", "ep 2 x pp 2", "ep 2 x dp 2"],
)
def test_processes_that_share_experts_compute_what_one_computes(variant: str, plan: Plan, tmp_path: Path) -> None:
    """Inside a stage, by chips that share sequences or tensors, and across replicas."""
    model = write_config(tmp_path / "model", variant, vocab_size=272, pad_token_id=None)
    assert runtime_incompatibility(plan) is None
    found = check_parallel(plan, model, tmp_path / "runs", start=fork_worker)
    assert found.losses[-1] != found.losses[0]
    assert found.loss_error < 1e-4
    assert found.gradient_error < 1e-4
    assert found.state_error < 1e-3


@pytest.mark.parametrize(
    ("variant", "stage", "reason"),
    [
        ("mixtral", {"cp": 8, "ep": 8}, r"ep 8, which does not divide the model's 4 experts.*nearest valid: ep 4"),
        ("llama", {"cp": 2, "ep": 2}, r"ep 2, which has no use in a model without any.*nearest valid: ep 1"),
        ("mixtral", {"ep": 2}, r"ep 2, which does not divide the 1 chips of cluster a"),
        ("mixtral", {"cp": 2, "ep": 2, "recompute": "selective"}, r"selective recomputation"),
    ],
)
def test_experts_that_cannot_be_dealt_out_are_refused(
    tmp_path: Path, variant: str, stage: dict[str, Any], reason: str
) -> None:
    """Before start: by what, which value, and what instead."""
    job = make_job(tmp_path, variant, training={"global_batch_size": 4})
    spec = WorkerSpec(run="r", attempt=1, rank=0, job=job, plan=stages_plan([stage]))
    with pytest.raises(PlanError, match=reason):
        check_plan_supported(spec)


def test_replicas_that_share_experts_evaluate_together(tmp_path: Path) -> None:
    """Numbers of samples by which one would have more micro-batches than the other are refused; the nearest is not."""
    plan = stages_plan([{"ep": 2}, {"ep": 2, "replica": 1}], dp=2, micro_batches=1)
    for samples, is_refused in ((5, True), (1, True), (6, False), (16, False)):
        fields = {"global_batch_size": 4, "evaluate_every": 2, "evaluate_samples": samples}
        spec = WorkerSpec(run="r", attempt=1, rank=0, job=make_job(tmp_path, "mixtral", training=fields), plan=plan)
        if is_refused:
            with pytest.raises(PlanError, match=f"evaluate_samples is {samples}") as caught:
                check_plan_supported(spec)
            assert caught.value.hint in ("nearest valid: 6", "nearest valid: 2")
        else:
            assert check_plan_supported(spec).trains
