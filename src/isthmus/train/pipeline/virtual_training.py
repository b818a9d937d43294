"""`run_virtual_training`: virtual training (`compute: virtual`), in which stages sleep instead of computing.

Schedule, executor, messages and transport are those of training, and tensors between stages and clusters have
their real sizes. The sleeps take the times predicted by the plan: forward and backward per micro-batch, then
the gradient reduction inside the cluster and the update.
"""

from __future__ import annotations

import time
from functools import partial

import torch

from isthmus.comm.group.group_work import SendWork
from isthmus.core.errors import PlanError
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerSpec
from isthmus.core.model import Model, load_model
from isthmus.core.plan import StageTime
from isthmus.core.units import format_seconds
from isthmus.schedule import Schedule
from isthmus.train.communication.communicator import Communicator, CommWork
from isthmus.train.communication.exact_sleep import sleep_exactly
from isthmus.train.communication.send_thread import unwrap_work
from isthmus.train.communication.step_metrics import MetricsLog, StepTimer
from isthmus.train.kernels.working_precision import message_dtype
from isthmus.train.liveness.checkpoint_requests import CheckpointRequests
from isthmus.train.model.model_chunks import ModelChunks
from isthmus.train.model.virtual_compute_stage import VirtualComputeStage
from isthmus.train.pipeline.micro_batches import MicroBatches
from isthmus.train.pipeline.stage_executor import StageExecutor
from isthmus.train.update.gradient_options import gradient_options
from isthmus.train.update.virtual_gradients import VirtualGradients, parameter_counter


def run_virtual_training(
    spec: WorkerSpec, schedule: Schedule, folder: WorkerFolder, switch_key: bytes | None = None
) -> None:
    """Run all steps of the job from the first one and log their times, without loss, checkpoint or export.

    Needs the default process group. Raises `PeerError` if a rank is lost. `switch_key` is that of packets to switches.
    """
    num_steps, requests = spec.job.training.steps, CheckpointRequests(folder)
    trainer = VirtualTrainer(spec, schedule, load_model(spec.job.model), switch_key)
    print(trainer.describe(), flush=True)
    with MetricsLog(folder.metrics_path, spec, None, 0) as log:
        for step in range(num_steps):
            timer = StepTimer(is_traced=step in spec.trace_steps)
            trainer.communicator.checkpoint_requested = requests.is_requested(step)
            values = trainer.step(step, timer)
            if trainer.communicator.any_requested:  # there is no state to save
                requests.report_verified(step + 1, 0)
            log.write(step, values, timer)
            if trainer.model_chunks.is_last:
                duration = format_seconds(values["step_s"])
                print(f"step {step + 1} of {num_steps}: {duration}, virtual", flush=True)
    trainer.close()


class BlockingCommunicator(Communicator):
    """Communicator whose sends wait for the receiver's acknowledgement (`transport: rendezvous`)."""

    def _wait(self, work: CommWork, *, until_delivered: bool) -> None:
        if isinstance(unwrap_work(work), SendWork):
            start_s = self.timer.clock()
            work.wait()
            self.timer.add_wait(start_s, self.timer.clock(), None)
        else:
            super()._wait(work, until_delivered=until_delivered)


class VirtualTrainer:
    """One rank of virtual training: one stage of its replica's pipeline."""

    def __init__(self, spec: WorkerSpec, schedule: Schedule, model: Model, switch_key: bytes | None = None) -> None:
        if spec.stage_time is None:
            raise PlanError(f"the plan predicts no stage time for rank {spec.rank}", hint="plan again")
        self._spec, self._schedule, self._model = spec, schedule, model
        self._stage_time: StageTime = spec.stage_time
        plan = spec.plan
        stages = [i for i, stage in enumerate(plan.stages) if stage.replica == spec.stage.replica]
        self._ranks = [plan.ranks_of(i)[0] for i in stages]
        self._stage = stages.index(plan.ranks[spec.rank].stage)
        self.model_chunks = self._make_model_chunks()
        exchange_type = BlockingCommunicator if plan.transport == "rendezvous" else Communicator
        self.communicator = exchange_type(plan.rank_clusters, spec.rank)
        self._executor = StageExecutor(
            self.model_chunks,
            self._stage,
            self._ranks,
            self.communicator,
            dtype=self.model_chunks.first_chunk.dtype,
            stage_time=self._stage_time,
        )
        self._batches = self._zero_batches()
        count, tied = parameter_counter(model), model.tied_embeddings
        self._gradients = VirtualGradients(
            plan, count, tied, spec.rank, self.communicator, gradient_options(spec, switch_key)
        )

    def close(self) -> None:
        """Free what the sums of gradients hold."""
        self._gradients.close()

    def describe(self) -> str:
        """Return the first line of the worker's log."""
        layers = " and ".join(f"{piece.layers[0]} to {piece.layers[1] - 1}" for piece in self.model_chunks.chunks)
        times = ", ".join(
            f"{kind} {format_seconds(seconds)}"
            for kind, seconds in (
                ("forward", self._stage_time.forward_s),
                ("backward", self._stage_time.backward_s),
                ("update", self._stage_time.update_s),
            )
        )
        where = f"rank {self._spec.rank}: layers {layers} in cluster {self._spec.cluster}"
        return f"{where}, virtual: sleeps instead of computing ({times}); no loss, no checkpoint, no model"

    def step(self, step: int, timer: StepTimer) -> dict[str, float]:
        """Run `step`, from 0; return this rank's metrics."""
        plan, start_s = self._spec.plan, time.time()
        self._executor.run(self._schedule, self._batches, timer, partial(self._update, step))
        step_s = time.time() - start_s
        values = {name: value for name, value in timer.values().items() if value is not None}
        rate = plan.num_samples / step_s
        return values | {
            "step_s": step_s,
            "samples_per_s": rate,
            "tokens_per_s": rate * plan.sequence_length,
        }

    def _make_model_chunks(self) -> ModelChunks:
        dtype = message_dtype(self._spec.plan, self._spec.job.training.precision)
        model, device = self._model, torch.device("cpu")
        cuts = self._spec.plan.chunk_layers(self._spec.stage.replica)[self._stage]
        return ModelChunks(
            [VirtualComputeStage(cut, model.num_layers, model.hidden_size, dtype=dtype, device=device) for cut in cuts],
            self._spec.plan.num_model_copies,
        )

    def _zero_batches(self) -> MicroBatches:
        """Return micro-batches of the plan's shape, with zeros as tokens on the first and last stage."""
        plan, replica = self._spec.plan, self._spec.stage.replica
        count, size = plan.micro_batches_of(replica), plan.micro_batch_size_of(replica)
        tokens = torch.zeros((size, plan.sequence_length), dtype=torch.int64)
        return MicroBatches(
            sizes=(size,) * count,
            sequence_length=plan.sequence_length,
            num_samples=plan.num_samples,
            inputs=(tokens,) * count if self.model_chunks.is_first else (),
            labels=(tokens[:, :1],) * count if self.model_chunks.is_last else (),
        )

    def _update(self, step: int) -> None:
        """Reduce the gradients, synchronise as for the gradient norm, then sleep for the update."""
        self._gradients.reduce(step, self._spec.job.training.steps)
        self.communicator.sum_over_all(torch.zeros(1, dtype=torch.float64))
        with self.communicator.timer.measure_compute():
            sleep_exactly(self._stage_time.update_s)
