"""`rehearse`: virtual training (`compute: virtual`), in which stages sleep instead of computing.

Schedule, executor, messages and transport are those of training, and tensors between stages and clusters have
their real sizes. The sleeps take the times predicted by the plan: forward and backward per micro-batch, then
the gradient reduction inside the cluster and the update.
"""

from __future__ import annotations

import time

import torch

from isthmus.comm.group.group_work import SendWork
from isthmus.core.errors import PlanError
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerSpec
from isthmus.core.model import Model, load_model
from isthmus.core.plan import StageTime
from isthmus.core.units import format_seconds
from isthmus.schedule import Schedule
from isthmus.train.liveness.checkpoint_requests import Guard
from isthmus.train.messages.exact_sleep import sleep_exactly
from isthmus.train.messages.exchange import Exchange, Work
from isthmus.train.messages.metrics import Account, MetricsLog
from isthmus.train.messages.send_thread import begun
from isthmus.train.model.stage_pieces import StagePieces
from isthmus.train.model.virtual_stage import VirtualStage
from isthmus.train.pipeline.executor import Executor
from isthmus.train.pipeline.micro_batches import MicroBatches
from isthmus.train.update.virtual_gradients import VirtualGradients, parameters_of


def rehearse(spec: WorkerSpec, schedule: Schedule, folder: WorkerFolder) -> None:
    """Run all steps of the job from the first one and log their times, without loss, checkpoint or export.

    Needs the default process group. Raises `PeerError` if a rank is lost.
    """
    num_steps, requests = spec.job.training.steps, Guard(folder)
    trainer = Rehearsal(spec, schedule, load_model(spec.job.model))
    print(trainer.describe(), flush=True)
    with MetricsLog(folder.metrics, spec, None, 0) as log:
        for step in range(num_steps):
            timer = Account(traced=step in spec.trace_steps)
            trainer.exchange.wish = requests.asked(step)
            values = trainer.step(timer)
            if trainer.exchange.wished:  # there is no state to save
                requests.protected(step + 1, 0)
            log.write(step, values, tuple(timer.spans))
            if trainer.pieces.is_last:
                duration = format_seconds(values["step_s"])
                print(f"step {step + 1} of {num_steps}: {duration}, virtual", flush=True)


class BlockingExchange(Exchange):
    """Communicator whose sends wait for the receiver's acknowledgement (`transport: rendezvous`)."""

    def wait(self, work: Work, *, arrived: bool = False) -> None:
        """Wait for a message or for the acknowledgement of a send; raises `PeerError` if the peer is lost."""
        if isinstance(begun(work), SendWork):
            start_s = self.account.clock()
            work.wait()
            self.account.waited(start_s, self.account.clock(), None)
        else:
            super().wait(work, arrived=arrived)


class Rehearsal:
    """One rank of virtual training: one stage of its replica's pipeline."""

    def __init__(self, spec: WorkerSpec, schedule: Schedule, model: Model) -> None:
        if spec.stage_time is None:
            raise PlanError(f"the plan predicts no stage time for rank {spec.rank}", hint="plan again")
        self._spec, self._schedule, self._model = spec, schedule, model
        self._time: StageTime = spec.stage_time
        plan = spec.plan
        stages = [i for i, stage in enumerate(plan.stages) if stage.replica == spec.stage.replica]
        self._ranks = [plan.ranks_of(i)[0] for i in stages]
        self._stage = stages.index(plan.ranks[spec.rank].stage)
        self.pieces = self._virtual_pieces()
        exchange_type = BlockingExchange if plan.transport == "rendezvous" else Exchange
        self.exchange = exchange_type(plan.rank_clusters, spec.rank)
        self._executor = Executor(
            self.pieces,
            self._stage,
            self._ranks,
            self.exchange,
            dtype=self.pieces.first.dtype,
            stage_time=self._time,
        )
        self._batches = self._nothing_to_read()
        count, tied = parameters_of(model), model.tied_embeddings
        self._gradients = VirtualGradients(plan, count, tied, spec.rank, self.exchange)

    def describe(self) -> str:
        """Return the first line of the worker's log."""
        layers = " and ".join(f"{piece.layers[0]} to {piece.layers[1] - 1}" for piece in self.pieces.models)
        times = ", ".join(
            f"{kind} {format_seconds(seconds)}"
            for kind, seconds in (
                ("forward", self._time.forward_s),
                ("backward", self._time.backward_s),
                ("update", self._time.update_s),
            )
        )
        where = f"rank {self._spec.rank}: layers {layers} in cluster {self._spec.cluster}"
        return f"{where}, virtual: sleeps instead of computing ({times}); no loss, no checkpoint, no model"

    def step(self, account: Account) -> dict[str, float]:
        """Run one step; return this rank's metrics."""
        plan, start_s = self._spec.plan, time.time()
        self._executor.run(self._schedule, self._batches, account, self._update)
        step_s = time.time() - start_s
        values = {name: value for name, value in account.values().items() if value is not None}
        rate = plan.samples / step_s
        return values | {
            "step_s": step_s,
            "samples_per_s": rate,
            "tokens_per_s": rate * plan.sequence_length,
        }

    def _virtual_pieces(self) -> StagePieces:
        precision = self._spec.job.training.precision
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        model, device = self._model, torch.device("cpu")
        cuts = self._spec.plan.pieces(self._spec.stage.replica)[self._stage]
        return StagePieces(
            [
                VirtualStage(cut, model.num_layers, model.hidden_size, dtype=dtype, device=device)
                for cut in cuts
            ],
            self._spec.plan.num_copies,
        )

    def _nothing_to_read(self) -> MicroBatches:
        """Return micro-batches of the plan's shape, with zeros as tokens on the first and last stage."""
        plan, replica = self._spec.plan, self._spec.stage.replica
        count, size = plan.micro_batches_of(replica), plan.micro_batch_size_of(replica)
        tokens = torch.zeros((size, plan.sequence_length), dtype=torch.int64)
        return MicroBatches(
            sizes=(size,) * count,
            sequence_length=plan.sequence_length,
            num_samples=plan.samples,
            inputs=(tokens,) * count if self.pieces.is_first else (),
            labels=(tokens[:, :1],) * count if self.pieces.is_last else (),
        )

    def _update(self) -> None:
        """Reduce the gradients, synchronise as for the gradient norm, then sleep for the update."""
        self._gradients.reduce()
        self.exchange.sum_over_all(torch.zeros(1, dtype=torch.float64))
        with self.exchange.account.computing():
            sleep_exactly(self._time.update_s)
