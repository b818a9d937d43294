"""Precision by stage: fp16 with one loss scale at all ranks, fp8, unlike precisions in one pipeline, resumed alike."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from isthmus.core.errors import PlanError, UnavailableError
from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.train.process.check_plan_supported import check_plan_supported
from isthmus.train.update.gradient_reducer import GradientReducer, SegmentView
from isthmus.train.update.loss_scale import GROWTH_STEPS, INITIAL_SCALE, MAX_SCALE, MIN_SCALE, LossScale
from isthmus.train.update.optimizer import LOSS_SCALE, Optimizer
from tests.train.replica_threads import Cut, Replicas, curve, make_plan
from tests.train.small_models import write_config
from tests.train.test_replicas import LENGTH, make_training
from tests.train.threads import training_threads
from tests.train.worker_jobs import make_job, run_job
from tests.train.worker_jobs import make_plan as make_worker_plan

pytestmark = pytest.mark.usefixtures("one_thread")
PIPELINES = (Cut(ends=[2, 4], clusters="ab", micro_batches=2, size=2),) * 2


@given(finite=st.lists(st.tuples(st.booleans(), st.integers(1, GROWTH_STEPS)), max_size=30))
def test_a_loss_scale_is_halved_by_overflows_and_doubled_after_many_steps(finite: list[tuple[bool, int]]) -> None:
    """It stays a power of two within its bounds, and its state restores it."""
    scale = LossScale()
    for is_finite, count in finite:
        before, since = scale.value, scale.num_finite
        for _ in range(count if is_finite else 1):
            scale.add_step(is_finite=is_finite)
        if is_finite:
            assert scale.value == min(before * 2 ** ((since + count) // GROWTH_STEPS), MAX_SCALE)
        else:
            assert scale.value == max(before / 2, MIN_SCALE)
        assert math.frexp(scale.value)[0] == 0.5
        other = LossScale()
        other.load_state(scale.state())
        assert (other.value, other.num_finite) == (scale.value, scale.num_finite)


@pytest.mark.parametrize("state", [[3.0, 0.0], [0.5, 0.0], [math.inf, 0.0], [math.nan, 1.0], [2.0, -1.0], [2.0, 0.5]])
def test_a_state_that_no_run_has_is_refused(state: list[float]) -> None:
    """A forged or damaged scale is an error, not a factor of gradients."""
    with pytest.raises(UnavailableError, match="no state of a run"):
        LossScale().load_state(torch.tensor(state))


class RecordingReducer(GradientReducer):
    """A reducer of one rank, which shares nothing, that records by what its rounding errors are multiplied."""

    def __init__(self) -> None:
        self.factors: list[float] = []

    def reduce(self, view: SegmentView, *, to_all_owners: bool) -> None:
        pass

    def rescale_errors(self, factor: float) -> None:
        self.factors.append(factor)


def overflowed() -> tuple[Optimizer, RecordingReducer, dict[str, torch.Tensor]]:
    """Return an optimizer after a step that overflowed, its reducer, and a checkpoint from before."""
    weight, reducer = nn.Parameter(torch.ones(2, 3)), RecordingReducer()
    optimizer = Optimizer([("w", weight)], make_training(precision="fp16"), reducer=reducer)
    before = {name: one.clone() for name, one in optimizer.checkpoint_state().items()}
    (weight.sum() * math.inf).backward()
    assert optimizer.apply(0).skipped
    return optimizer, reducer, before


def test_a_change_of_the_loss_scale_reaches_the_rounding_errors_of_sums() -> None:
    """They are in units of scaled gradients, which the next step sums in the new scale."""
    optimizer, reducer, _ = overflowed()
    assert (optimizer.gradient_scale, reducer.factors) == (INITIAL_SCALE / 2, [0.5])


def test_a_checkpoint_without_a_loss_scale_restores_the_first_one() -> None:
    """Ranks that go back to a checkpoint of a bf16 run after a loss have the scale of the process that replaced one."""
    optimizer, _, before = overflowed()
    assert before.pop(LOSS_SCALE)[0] == INITIAL_SCALE
    optimizer.load_checkpoint_state(before)
    assert optimizer.gradient_scale == INITIAL_SCALE


@pytest.mark.integration
@pytest.mark.parametrize("changes", [{}, {"zero": 1, "overlap_gradients": True}])
def test_fp16_trains_like_fp32_and_skips_overflows_at_all_ranks_alike(changes: dict[str, Any], tmp_path: Path) -> None:
    """Losses within 1 % of fp32; with too large a scale steps are skipped, by all ranks, until it is small enough."""
    model = write_config(tmp_path, "llama-tied")
    plan, training = make_plan(PIPELINES, LENGTH, **changes), make_training(precision="fp16")
    expected = curve(model, plan, make_training(), 4)
    replicas = Replicas(model, plan, training)
    try:
        found = replicas.train(4)
        assert [one.loss for one in found] == pytest.approx([one.loss for one in expected], rel=1e-2)
        assert [one.gradient_norm for one in found] == pytest.approx([o.gradient_norm for o in expected], rel=5e-2)
        assert {one.loss_scale for one in found} == {INITIAL_SCALE}
        states = [
            rank.optimizer.local_state() | {"loss_scale": torch.tensor([MAX_SCALE, 5.0])} for rank in replicas.ranks
        ]
        before = {name: one.clone() for name, one in replicas.weights(0).items()}
        with training_threads(4) as pool:
            pairs = zip(replicas.ranks, states, strict=True)
            for one in [pool.submit(rank.optimizer.load_local_state, state) for rank, state in pairs]:
                one.result(60)
        (skipped,) = replicas.train(1)
        assert skipped.skipped
        assert skipped.loss_scale == MAX_SCALE
        assert all(torch.equal(one, before[name]) for name, one in replicas.weights(0).items())
        later = replicas.train(12)
        assert not later[-1].skipped
        assert later[-1].loss_scale < MAX_SCALE
        assert {rank.optimizer.gradient_scale for rank in replicas.ranks} == {later[-1].loss_scale}
    finally:
        replicas.close()


@pytest.mark.integration
@pytest.mark.parametrize(
    "precisions", [("bf16", "fp32"), ("fp16", "bf16"), ("fp32", "fp16"), ("fp8", "bf16"), ("fp32", "fp8")]
)
def test_stages_of_unlike_precision_train_one_model(precisions: tuple[Any, Any], tmp_path: Path) -> None:
    """Between them messages are fp32; the curve is within 2 % of that of fp32, also of two replicas."""
    model, training = write_config(tmp_path, "llama-tied"), make_training()
    plan = make_plan(PIPELINES, LENGTH)
    stages = [one.model_copy(update={"precision": precisions[n % 2]}) for n, one in enumerate(plan.stages)]
    expected = curve(model, plan, training, 4)
    found = curve(model, plan.model_copy(update={"stages": tuple(stages)}), training, 4)
    assert [one.loss for one in found] == pytest.approx([one.loss for one in expected], rel=2e-2)
    assert [one.loss for one in found] != [one.loss for one in expected]


EIGHT_BITS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero-bubble": ("llama", {"schedule": "zero_bubble"}),
    "experts, ZeRO-1": ("mixtral", {"zero": 1, "overlap_gradients": True}),
    "ZeRO-3": ("llama-tied", {"zero": 3}),
}


@pytest.mark.integration
@pytest.mark.parametrize("case", EIGHT_BITS)
def test_fp8_trains_like_fp32(case: str, tmp_path: Path) -> None:
    """Losses within 2 %; weights stay in bf16, and those of replicas equal; ZeRO changes no loss by more than 1e-3."""
    variant, changes = EIGHT_BITS[case]
    model, training = write_config(tmp_path, variant), make_training(precision="fp8")
    clusters = "aa" if changes.get("zero") == 3 else "ab"
    plan = make_plan((Cut(ends=[2, 4], clusters=clusters, micro_batches=2, size=2),) * 2, LENGTH, **changes)
    expected = curve(model, plan, make_training(), 4)
    plain = curve(model, plan.model_copy(update={"zero": 0, "schedule": "1f1b"}), training, 4)
    replicas = Replicas(model, plan, training)
    try:
        found = replicas.train(4)
        assert {one.dtype for one in replicas.weights(0).values()} == {torch.bfloat16}
    finally:
        replicas.close()
    assert [one.loss for one in found] == pytest.approx([one.loss for one in expected], rel=2e-2)
    assert [one.loss for one in found] == pytest.approx([one.loss for one in plain], rel=1e-3)
    assert [one.loss for one in found] != [one.loss for one in expected]


def test_unlike_precisions_under_zero_are_refused(tmp_path: Path) -> None:
    """Replicas that share updates exchange working weights, so all have one dtype; else the plan runs."""
    job = make_job(tmp_path)
    plan = make_worker_plan(job, [2, 4])
    unlike = (plan.stages[0], plan.stages[1].model_copy(update={"precision": "bf16"}))
    mixed = plan.model_copy(update={"stages": unlike})
    assert check_plan_supported(WorkerSpec(run="r", attempt=1, rank=0, job=job, plan=mixed)).trains
    sharded = mixed.model_copy(update={"zero": 1})
    with pytest.raises(PlanError, match="zero 1 with stages of precision bf16 and fp32"):
        check_plan_supported(WorkerSpec(run="r", attempt=1, rank=0, job=job, plan=sharded))
    both = tuple(
        one.model_copy(update={"precision": own}) for one, own in zip(plan.stages, ("fp8", "bf16"), strict=True)
    )
    sharded = sharded.model_copy(update={"stages": both})
    assert check_plan_supported(WorkerSpec(run="r", attempt=1, rank=0, job=job, plan=sharded)).trains


@pytest.mark.slow
def test_a_checkpoint_has_the_loss_scale(tmp_path: Path) -> None:
    """Train 6 steps in fp16; without the last checkpoint, resume after step 3 in one process: the same losses."""
    job = make_job(tmp_path, training={"precision": "fp16"}, checkpoints={"every_steps": 3})
    plan = make_worker_plan(job, [2, 4])
    first = run_job(tmp_path / "first", job, plan)
    scales = {one.step: one.values["loss_scale"] for one in first.metrics(0)}
    assert set(scales.values()) == {INITIAL_SCALE}
    (last,) = Path(job.checkpoints.folder).glob("step-*6")
    shutil.rmtree(last)
    shutil.rmtree(job.output)
    again = run_job(tmp_path / "again", job, plan, attempt=2)
    losses = [{one.step: one.values["loss"] for one in run.metrics(1)} for run in (first, again)]
    assert losses[1] == {step: losses[0][step] for step in (3, 4, 5)}
    assert {one.values["loss_scale"] for one in again.metrics(0)} == {INITIAL_SCALE}


@pytest.mark.slow
def test_workers_train_in_fp8_and_say_how(tmp_path: Path) -> None:
    """Two tensor-parallel ranks in fp8 and one in bf16: within 2 % of bf16 alone; those in fp8 name the device."""
    job = make_job(tmp_path / "narrow", training={"precision": "fp8", "steps": 4})
    plan = make_worker_plan(job, [2, 4])
    stages = (
        plan.stages[0].model_copy(update={"tp": 2}),
        plan.stages[1].model_copy(update={"precision": "bf16"}),
    )
    narrow = run_job(tmp_path / "run", job, plan.model_copy(update={"stages": stages}))
    says = ["fp8: cpu has no kernel" in narrow.log(rank) for rank in range(3)]
    assert says == [True, True, False]
    usual = make_job(tmp_path / "usual", training={"precision": "bf16", "steps": 4})
    wide = run_job(tmp_path / "again", usual, make_worker_plan(usual, [2, 4]))
    losses = [[one.values["loss"] for one in run.metrics(last)] for run, last in ((narrow, 2), (wide, 1))]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)
    assert losses[0] != losses[1]
