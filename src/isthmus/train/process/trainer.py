"""`Trainer`: the trainer of one rank: steps, evaluations and checkpoints, of a `TrainingMethod`."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from isthmus.core.errors import InputError, UnavailableError
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerSpec
from isthmus.schedule import Schedule
from isthmus.train.checkpoint.checkpoint_manager import CheckpointManager
from isthmus.train.checkpoint.memory_slot import Snapshot
from isthmus.train.communication.communicator import make_communicator
from isthmus.train.communication.step_metrics import PendingCompute, StepTimer
from isthmus.train.context_parallel.cp_communicator import CpCommunicator
from isthmus.train.context_parallel.cp_process_group import join_cp_group
from isthmus.train.expert_parallel.ep_process_group import join_ep_group
from isthmus.train.kernels.working_precision import message_dtype, plan_precisions, stage_precision
from isthmus.train.liveness.checkpoint_requests import CheckpointRequests
from isthmus.train.model.model_chunks import ModelChunks
from isthmus.train.model.recompute import RecomputePolicy
from isthmus.train.pipeline.micro_batches import MicroBatches
from isthmus.train.pipeline.stage_executor import StageExecutor
from isthmus.train.process.prepare_stage import JobData, PreparedStage
from isthmus.train.process.take_rank_keys import RankKeys
from isthmus.train.recovery.peer_snapshots import PeerSnapshots
from isthmus.train.recovery.rank_recovery import RankRecovery
from isthmus.train.tensor_parallel.tp_communicator import StageCommunicator, TpCommunicator
from isthmus.train.tensor_parallel.tp_process_group import join_tp_group
from isthmus.train.update.gradient_options import gradient_options
from isthmus.train.update.gradient_reducer import GradientReducer
from isthmus.train.update.local_steps.make_local_steps import make_local_steps
from isthmus.train.update.loss_scale import MIN_SCALE
from isthmus.train.update.optimizer import Optimizer, UpdateResult
from isthmus.train.update.ownership import Ownership
from isthmus.train.update.replica_layout import (
    PipelinePosition,
    exchange_ownership,
    rank_groups,
)
from isthmus.train.update.sharding.layer_gathering import layer_gathering
from isthmus.train.update.sharding.shard_exchange import ShardExchange, summed_buckets

_GENERATOR = "generator"
"""Name of torch's random generator state in a snapshot."""

MAX_SKIPPED = 10
"""Consecutive updates skipped for a gradient that is not finite, after which training stops."""


class TrainingMethod(Protocol):
    """The batches and losses of a run, for one rank. All ranks make the same calls in the same order."""

    def open_data(self, spec: WorkerSpec, pieces: ModelChunks, /) -> JobData | None:
        """Return the data of a rank that holds `pieces`, None if it needs none; raises `InputError`."""
        ...

    def begin(self, trainer: Trainer, step: int, /) -> None:
        """Begin to train at `step`, after all ranks have restored a common state; called again after a loss."""
        ...

    def next_batches(self, trainer: Trainer, /) -> MicroBatches:
        """Return the micro-batches of the replica for the step that begins."""
        ...

    def end_step(self, trainer: Trainer, step: int, /) -> dict[str, float | None]:
        """Return the method's own metrics of `step`, whose update is done."""
        ...

    def evaluate(self, trainer: Trainer, /) -> dict[str, float | None]:
        """Return the metrics of an evaluation on held-out data; the rank that reports the loss has them."""
        ...

    def end_save(self, trainer: Trainer, step: int, /) -> None:
        """Note that a checkpoint of the state after `step` steps is being written."""
        ...

    def close(self, trainer: Trainer, /) -> None:
        """End after the last step."""
        ...


class Trainer:
    """Holds and trains one rank's part of the model."""

    def __init__(
        self,
        spec: WorkerSpec,
        schedule: Schedule,
        prepared: PreparedStage,
        folder: WorkerFolder,
        recovery: RankRecovery,
        keys: RankKeys,
        method: TrainingMethod,
    ) -> None:
        self.spec, self.schedule, self.prepared, self.method = spec, schedule, prepared, method
        self.keys = keys
        self.folder, self.checkpoint_requests, self.recovery = folder, CheckpointRequests(folder), recovery
        self.training, self.position = spec.job.training, PipelinePosition.of_rank(spec.plan, spec.rank)
        self.group = prepared.model_chunks.group
        self.context, self.experts = prepared.model_chunks.context, prepared.model_chunks.experts
        self.reports_loss = (
            prepared.model_chunks.reports_loss and self.position.replica == 0 and self.group.tp_rank == 0
            and (self.context is None or self.context.cp_rank == 0)
        )  # fmt: skip
        self.samples = self.num_skipped = 0
        self._unsettled: list[PendingCompute] = []
        self.communicator = make_communicator(spec, prepared.model_chunks.device)
        self.ownership = self._form_groups()
        self.exchange = self._shard_exchange()
        self.checkpoint_manager = CheckpointManager(spec, folder, self.ownership, self.communicator, keys.copies)
        self.peer_snapshots = PeerSnapshots(spec, folder, recovery, self.communicator)
        options = gradient_options(spec, keys.switch)
        self.optimizer = Optimizer(
            prepared.model_chunks.global_named_parameters(),
            self.training,
            sum_over_all=self.peer_snapshots.sum_over_all,
            ownership=self.ownership,
            reducer=GradientReducer(
                summed_buckets(self.ownership, spec.plan.zero), spec.rank, self.communicator, options=options
            ),
            exchange=self.exchange,
            late=prepared.model_chunks.late_names,
            gathers=spec.plan.zero == 3,
            on_host=spec.plan.optimizer_on_host,
            overlap_reduction=spec.plan.overlap_gradients,
            precision=stage_precision(spec.stage, self.training.precision),
            scales_loss="fp16" in plan_precisions(spec.plan, self.training.precision),
            local=make_local_steps(spec.plan, self.ownership, self.communicator, options),
        )
        if spec.plan.sharding is None or spec.plan.sharding.reshard:
            self.optimizer.by_layer = layer_gathering(self.optimizer.gatherer, prepared.model_chunks)
        self.executor = StageExecutor(
            prepared.model_chunks,
            self.position.stage,
            self.position.ranks,
            self._stage_communicator(),
            dtype=message_dtype(spec.plan, self.training.precision),
            stage_time=spec.stage_time,
            recompute=RecomputePolicy(spec.stage.recompute, spec.stage.recompute_layers),
            final_backward=lambda chunk: self.optimizer.final_backward(prepared.model_chunks.names_of(chunk)),
        )

    def _shard_exchange(self) -> ShardExchange | None:
        """Return the exchange of gradients that are sharded; None if they are not."""
        if self.spec.plan.zero < 2:
            return None
        exchange = ShardExchange(self.ownership.buckets, self.spec.rank, self.communicator)
        exchange.form_groups()
        return exchange

    def _stage_communicator(self) -> StageCommunicator:
        """Return what carries messages between stages, in the parts of this rank."""
        plan, communicator = self.spec.plan, self.communicator
        shared = any(stage.cp > 1 for stage in plan.pipeline(self.position.replica))
        parts = CpCommunicator(communicator, plan, self.spec.rank) if shared else communicator
        return TpCommunicator(parts, self.group) if self.group.size > 1 else parts

    def _waited_s(self) -> float:
        """Return the seconds spent so far in collectives inside the stage's computation."""
        shared = (self.group, self.context, self.experts)
        return sum(group.waited_s for group in shared if group is not None)

    def _expert_bytes(self) -> int:
        """Return the bytes of tokens sent so far to experts of other ranks, and back."""
        return 0 if self.experts is None else self.experts.sent_bytes

    def _form_groups(self) -> Ownership:
        """Join the groups of the stage; return the ownership of all parameters."""
        spec = self.spec
        device = self.prepared.model_chunks.device
        join_tp_group(spec.plan, spec.rank, self.group, backend=spec.backend, device=device)
        join_cp_group(spec.plan, spec.rank, self.context, backend=spec.backend)
        join_ep_group(spec.plan, spec.rank, self.experts, backend=spec.backend)
        return exchange_ownership(
            self.prepared.model_chunks,
            spec.rank,
            spec.plan.rank_clusters,
            self.communicator,
            zero=spec.plan.zero,
            groups=rank_groups(spec.plan),
        )

    def load_checkpoint(self) -> int:
        """Load the newest valid checkpoint, if any; return its number of completed steps."""
        shapes = {name: one.shape for name, one in self.prepared.model_chunks.global_named_parameters()}
        found = self.checkpoint_manager.load(shapes, self.optimizer.extra_state())
        if found is None:
            return 0
        self.samples = found.samples
        self.optimizer.load_checkpoint_state(found.tensors)
        return found.step

    def local_state(self) -> dict[str, torch.Tensor]:
        """Return this rank's complete training state in its local shapes, by reference (not copied)."""
        return self.optimizer.local_state() | {_GENERATOR: torch.get_rng_state()}

    def take_snapshot(self, step: int, *, with_checkpoint: bool = False) -> None:
        """Snapshot the state after `step` steps to memory, here and at a peer, if due and no copy is delayed.

        `with_checkpoint`: a checkpoint has the same state, so that a loss costs no step that is on the disk.
        """
        snapshots = self.peer_snapshots
        if (with_checkpoint or snapshots.interval.is_due(step)) and not snapshots.is_delayed:
            snapshots.interval.begin(step)
            self.recovery.take_snapshot(step, self.samples, self.local_state())
            snapshots.send(step)

    def restore_snapshot(self, snapshot: Snapshot) -> None:
        """Restore the state of a snapshot, with all ranks."""
        self.samples = snapshot.samples
        self.optimizer.load_local_state(snapshot.tensors)
        torch.set_rng_state(snapshot.tensors[_GENERATOR].clone())

    def reset(self) -> None:
        """Drop the gradients of an aborted step and form the groups again."""
        self.num_skipped = 0
        self.optimizer.clear_gradients()
        self._form_groups()
        if self.exchange is not None:
            self.exchange.form_groups()

    def step(self, step: int) -> tuple[dict[str, float | None], StepTimer]:
        """Train on one global batch; return this rank's metrics and timing.

        A device may still execute the update when this returns: its time then counts in the next step.
        """
        start_s = time.time()
        timer = StepTimer(is_traced=step in self.spec.trace_steps, pending=self._unsettled)
        batch_size = self.training.global_batch_size
        batches = self.method.next_batches(self)
        updates: list[UpdateResult] = []
        group_s, expert_bytes = self._waited_s(), self._expert_bytes()
        self.communicator.timer = timer
        self.optimizer.begin_step()
        self.executor.gradient_scale = self.optimizer.gradient_scale
        losses = self.executor.run(self.schedule, batches, timer, lambda: updates.append(self._update(step)))
        # The collectives of a stage run inside the computation: count them as communication.
        self._unsettled = timer.pending
        group_s = self._waited_s() - group_s
        timer.compute_s -= group_s
        timer.exposed_communication_s += group_s
        update = updates[0]
        self.samples += batch_size
        step_s = time.time() - start_s
        self.peer_snapshots.end_step(step_s)
        samples_per_s = batch_size / step_s
        values = timer.values()
        values |= {
            "step_s": step_s,
            "samples_per_s": samples_per_s,
            "tokens_per_s": samples_per_s * self.training.sequence_length,
            "learning_rate": update.learning_rate,
            "gradient_norm": update.gradient_norm,
            "update_skipped": float(update.skipped),
        }
        if update.loss_scale != 1.0:
            values["loss_scale"] = update.loss_scale
        is_last_scale = update.loss_scale <= MIN_SCALE  # a larger one is halved, and may do
        self.num_skipped = self.num_skipped + is_last_scale if update.skipped else 0
        if self.experts is not None:
            values["expert_bytes"] = float(self._expert_bytes() - expert_bytes)
        if self.reports_loss:
            values["loss"] = update.loss
        if losses.balance_loss is not None and self.group.tp_rank == 0:
            values["balance_loss"] = losses.balance_loss
        return values, timer

    def raise_if_diverged(self, step: int) -> None:
        """Raise `InputError` after `MAX_SKIPPED` consecutive skipped updates."""
        if self.num_skipped >= MAX_SKIPPED:
            raise InputError(
                f"step {step + 1}: the gradient was not finite in {MAX_SKIPPED} consecutive steps",
                hint="lower training.learning_rate, increase warmup_steps, or check the weights",
            )

    def evaluate(self) -> dict[str, float | None]:
        """Evaluate on held-out data; the last stage of the first replica reports it."""
        start_s = time.time()
        found = self.method.evaluate(self)
        return {"evaluate_s": time.time() - start_s} | (found if self.reports_loss else {})

    def sum_of_losses(self, loss: float | None) -> float:
        """Return the sum of the losses of all ranks, those that share a tensor-parallel stage counted once."""
        return float(self.communicator.sum_over_all(torch.tensor([self._loss_share(loss)], dtype=torch.float64)))

    def save_checkpoint(self, step: int) -> dict[str, float | None]:
        """Start writing a checkpoint of the state after `step` steps."""
        start_s = time.time()
        self.checkpoint_manager.save(step, self.samples, self.optimizer.checkpoint_state())
        return {"checkpoint_s": time.time() - start_s}

    def verify_checkpoint(self, step: int) -> dict[str, float | None]:
        """Read back the checkpoint after `step` steps; report it to the agent if it is valid on all ranks.

        A damaged checkpoint is not an error: the run does not resume from it.
        """
        start_s, num_bytes = time.time(), 0
        self.checkpoint_manager.wait()
        try:
            num_bytes = self.checkpoint_manager.verify(step)
        except UnavailableError as error:
            print(f"warning: {error}", flush=True)
        sizes = self.communicator.all_gather(torch.tensor([num_bytes], dtype=torch.int64))
        if all(int(one) > 0 for one in sizes):
            self.checkpoint_requests.report_verified(step, num_bytes)
        else:
            self.checkpoint_requests.report_failed(step)
        return {"protect_s": time.time() - start_s}

    def _update(self, step: int) -> UpdateResult:
        timer = self.communicator.timer
        self.checkpoint_manager.wait_copied()
        self.communicator.checkpoint_requested = self.checkpoint_requests.is_requested(step)
        start_s = timer.clock()
        self.recovery.wait_for_snapshot()
        self.peer_snapshots.waited_s += timer.clock() - start_s
        waited_s, timeline = timer.exposed_communication_s + timer.idle_s, self.executor.timeline(timer)
        start = timeline.record()
        update = self.optimizer.apply(step, lambda: self._loss_share(self.executor.losses.loss))
        timer.add_device_compute("", -1, (start, timeline.record()), timeline)
        timer.compute_s -= timer.exposed_communication_s + timer.idle_s - waited_s
        if self.peer_snapshots.interval.steps > 1 and not self.peer_snapshots.is_delayed:
            self.recovery.release_older_snapshot()
        return update

    def _loss_share(self, loss: float | None) -> float:
        """Return the loss on the first tensor-parallel rank, else 0: a sum over ranks counts it once."""
        return loss or 0.0 if self.group.tp_rank == 0 else 0.0
