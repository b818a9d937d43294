"""The host runs ahead of a device: inside a step it waits for the loss alone, and times come from the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isthmus.core.errors import PlanError
from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.schedule import make_schedule
from isthmus.train.communication.communicator import Communicator
from isthmus.train.communication.step_metrics import StepTimer
from isthmus.train.model.model_chunks import ModelChunks
from isthmus.train.model.stage_model import build_stage
from isthmus.train.pipeline.micro_batches import MicroBatches
from isthmus.train.pipeline.stage_executor import StageExecutor
from isthmus.train.process.check_plan_supported import check_plan_supported
from isthmus.train.update.optimizer import Optimizer
from tests.train.asynchronous_device import EXECUTION_S, AsynchronousDevice
from tests.train.small_models import NUM_LAYERS, write_config
from tests.train.test_replicas import make_training
from tests.train.threads import random_batch
from tests.train.worker_jobs import make_job, whole

NUM_STEPS, NUM_MICRO_BATCHES = 3, 4


@pytest.mark.parametrize(("precision", "schedule"), [("fp32", "1f1b"), ("bf16", "gpipe"), ("fp32", "zero_bubble")])
def test_the_host_waits_for_the_loss_alone(tmp_path: Path, precision: str, schedule: str) -> None:
    """One wait a step, where loss and gradient norm are read; computing before it is timed then, the update later."""
    training = make_training(precision=precision)
    folder = write_config(tmp_path, "llama")
    stage = build_stage(folder, (0, NUM_LAYERS), dtype=torch.float32, device="cpu", seed=3, weights="random")
    chunks, device = ModelChunks([stage]), AsynchronousDevice()
    optimizer = Optimizer(chunks.global_named_parameters(), training)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    executor = StageExecutor(chunks, 0, [0], Communicator("a", 0), dtype=dtype, timeline=device)
    plan, found = make_schedule(schedule, 1, NUM_MICRO_BATCHES), []
    for step in range(NUM_STEPS):
        input_ids, labels = random_batch(training, step)
        batches = MicroBatches.split(len(input_ids), 2, input_ids.shape[1], input_ids, labels)
        timer = StepTimer(is_traced=True)

        def update(step: int = step, timer: StepTimer = timer) -> None:
            start = device.record()
            found.append(optimizer.apply(step, lambda: executor.losses.loss or 0.0))
            timer.add_device_compute("", -1, (start, device.record()), device)

        before = device.num_queued
        with device:
            losses = executor.run(plan, batches, timer, update)
        assert device.waits == ["read"] * (step + 1)
        assert losses.loss == found[-1].loss
        assert len(timer.pending) == 1, "the update is queued behind the loss"
        assert 0 < timer.compute_s <= (device.num_executed - before) * EXECUTION_S
        assert {one.kind for one in timer.spans} >= {"forward"}
        assert all(one.start_s <= one.end_s for one in timer.spans)
    assert found[-1].loss < found[0].loss * 1.1


def test_a_sequence_longer_than_the_models_positions_is_refused(tmp_path: Path) -> None:
    """Of 64 positions, 65 tokens are refused before start, by both values and what to set."""
    job = make_job(tmp_path, training={"sequence_length": 65})
    with pytest.raises(PlanError, match=r"sequence_length is 65, and .* has 64 positions") as caught:
        check_plan_supported(WorkerSpec(run="r", attempt=1, rank=0, job=job, plan=whole(job)))
    assert "to 64 at most" in caught.value.hint
    job = make_job(tmp_path, training={"sequence_length": 64})
    assert check_plan_supported(WorkerSpec(run="r", attempt=1, rank=0, job=job, plan=whole(job))).trains
