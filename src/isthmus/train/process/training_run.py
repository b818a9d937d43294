"""`Run`: the trainer of one rank: steps, evaluations and checkpoints."""

from __future__ import annotations

import time

import torch

from isthmus.core.errors import InputError, UnavailableError
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerSpec
from isthmus.schedule import Schedule, forward_only
from isthmus.train.checkpoint.memory_slot import Snapshot
from isthmus.train.checkpoint.saver import Saver
from isthmus.train.liveness.checkpoint_requests import Guard
from isthmus.train.messages.device import synchronize
from isthmus.train.messages.exchange import exchange_of
from isthmus.train.messages.metrics import Account
from isthmus.train.model.recompute import Recomputation
from isthmus.train.pipeline.executor import Executor
from isthmus.train.process.batches import Batches
from isthmus.train.process.prepare import Prepared
from isthmus.train.recovery.peer_snapshots import Copies
from isthmus.train.recovery.recover import Recovery
from isthmus.train.tensor_parallel.tp_exchange import SharedExchange
from isthmus.train.tensor_parallel.tp_process_group import meet_sharers
from isthmus.train.update.optimizer import Optimizer, Update
from isthmus.train.update.ownership import Ownership
from isthmus.train.update.reduce import Reducer
from isthmus.train.update.replicas import Place, meet_owners

_GENERATOR = "generator"
"""Name of torch's random generator state in a snapshot."""

MAX_SKIPPED = 10
"""Consecutive updates skipped for a gradient that is not finite, after which training stops."""


class Run:
    """Holds and trains one rank's part of the model."""

    def __init__(
        self,
        spec: WorkerSpec,
        schedule: Schedule,
        prepared: Prepared,
        folder: WorkerFolder,
        recovery: Recovery,
    ) -> None:
        self.spec, self.schedule, self.prepared = spec, schedule, prepared
        self.folder, self.guard, self.recovery = folder, Guard(folder), recovery
        self.training, self.place = spec.job.training, Place.of(spec.plan, spec.rank)
        self.group = prepared.pieces.group
        self.tells_loss = prepared.pieces.tells_loss and self.place.replica == 0 and self.group.index == 0
        self.samples = self.num_skipped = 0
        self.batches = Batches(prepared, spec.plan, self.place, self.training)
        self.exchange = exchange_of(spec, prepared.pieces.device)
        self.ownership = self._meet()
        self.saver = Saver(spec, folder, self.ownership, self.exchange)
        self.copies = Copies(spec, folder, recovery, self.exchange)
        self.optimizer = Optimizer(
            prepared.pieces.global_named_parameters(),
            self.training,
            sum_over_all=self.copies.sum_over_all,
            ownership=self.ownership,
            reducer=Reducer(self.ownership.buckets, spec.rank, self.exchange),
            on_host=spec.plan.optimizer_on_host,
        )
        self.executor = Executor(
            prepared.pieces,
            self.place.stage,
            self.place.ranks,
            SharedExchange(self.exchange, self.group) if self.group.size > 1 else self.exchange,
            dtype=torch.bfloat16 if self.training.precision == "bf16" else torch.float32,
            stage_time=spec.stage_time,
            again=Recomputation(spec.stage.recompute, spec.stage.recompute_layers),
        )

    def _meet(self) -> Ownership:
        """Join the tensor-parallel group; return the ownership of all parameters."""
        spec, shard = self.spec, self.spec.plan.zero == 1
        meet_sharers(spec.plan, spec.rank, self.group, backend=spec.backend, host=spec.host)
        return meet_owners(
            self.prepared.pieces, spec.rank, spec.plan.rank_clusters, self.exchange, shard=shard
        )

    def resume(self) -> int:
        """Load the newest valid checkpoint, if any; return its number of completed steps."""
        shapes = {name: one.shape for name, one in self.prepared.pieces.global_named_parameters()}
        found = self.saver.load(shapes)
        if found is None:
            return 0
        self.samples = found.samples
        self.optimizer.load(found.tensors)
        return found.step

    def state(self) -> dict[str, torch.Tensor]:
        """Return this rank's complete training state, by reference (not copied)."""
        return self.optimizer.own_state() | {_GENERATOR: torch.get_rng_state()}

    def keep(self, step: int) -> None:
        """Snapshot the state after `step` steps to memory, here and at a peer, unless copies are delayed."""
        if not self.copies.delayed:
            self.recovery.keep(step, self.samples, self.state())
            self.copies.send(step)

    def restore(self, snapshot: Snapshot) -> None:
        """Restore the state of a snapshot."""
        self.samples = snapshot.samples
        self.optimizer.load_own(snapshot.tensors)
        torch.set_rng_state(snapshot.tensors[_GENERATOR].clone())

    def begin_again(self) -> None:
        """Drop the gradients of an aborted step and form the groups again."""
        self.num_skipped = 0
        self.optimizer.drop_gradients()
        self._meet()

    def step(self, step: int) -> tuple[dict[str, float | None], Account]:
        """Train on one global batch; return this rank's metrics and timing."""
        start_s = time.time()
        timer = Account(traced=step in self.spec.trace_steps)
        batch_size = self.training.global_batch_size
        batches = self.batches.of_step(self.samples)
        updates: list[Update] = []
        group_s = self.group.waited_s
        losses = self.executor.run(self.schedule, batches, timer, lambda: updates.append(self._update(step)))
        # Tensor-parallel collectives run inside the computation: count them as communication.
        group_s = self.group.waited_s - group_s
        timer.compute_s -= group_s
        timer.exposed_communication_s += group_s
        update = updates[0]
        self.samples += batch_size
        step_s = time.time() - start_s
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
        self.num_skipped = self.num_skipped + 1 if update.skipped else 0
        if self.tells_loss:
            values["loss"] = update.loss
        if losses.balance_loss is not None and self.group.index == 0:
            values["balance_loss"] = losses.balance_loss
        return values, timer

    def stop_if_lost(self, step: int) -> None:
        """Raise `InputError` after `MAX_SKIPPED` consecutive skipped updates."""
        if self.num_skipped >= MAX_SKIPPED:
            raise InputError(
                f"step {step + 1}: the gradient was not finite in {MAX_SKIPPED} consecutive steps",
                hint="lower training.learning_rate, increase warmup_steps, or check the weights",
            )

    def evaluate(self) -> dict[str, float | None]:
        """Compute the held-out loss; the last stage of the first replica reports it."""
        start_s, batches = time.time(), self.batches.held_out()
        loss = None
        if batches.sizes:
            chunks = len(self.prepared.pieces.own)
            schedule = forward_only(len(self.place.ranks), len(batches.sizes), chunks)
            loss = self.executor.run(schedule, batches, Account()).loss
        if self.spec.plan.dp > 1:
            parts = torch.tensor([self._counted(loss)], dtype=torch.float64)
            loss = float(self.exchange.sum_over_all(parts))
        values: dict[str, float | None] = {"evaluate_s": time.time() - start_s}
        if self.tells_loss:
            values["validation_loss"] = loss
        return values

    def save(self, step: int) -> dict[str, float | None]:
        """Start writing a checkpoint of the state after `step` steps."""
        start_s = time.time()
        self.saver.save(step, self.samples, self.optimizer.state())
        return {"checkpoint_s": time.time() - start_s}

    def protect(self, step: int) -> dict[str, float | None]:
        """Read back the checkpoint after `step` steps; report it to the agent if it is valid on all ranks.

        A damaged checkpoint is not an error: the run does not resume from it.
        """
        start_s, num_bytes = time.time(), 0
        self.saver.wait()
        try:
            num_bytes = self.saver.read_back(step)
        except UnavailableError as error:
            print(f"warning: {error}", flush=True)
        sizes = self.exchange.gather(torch.tensor([num_bytes], dtype=torch.int64))
        if all(int(one) > 0 for one in sizes):
            self.guard.protected(step, num_bytes)
        else:
            self.guard.failed(step)
        return {"protect_s": time.time() - start_s}

    def _update(self, step: int) -> Update:
        timer = self.exchange.account
        self.saver.settle()
        self.exchange.wish = self.guard.asked(step)
        self.recovery.settle()
        waited_s = timer.exposed_communication_s + timer.idle_s
        with timer.computing():
            update = self.optimizer.apply(step, self._counted(self.executor.losses.loss))
            synchronize(self.prepared.pieces.device)
        timer.compute_s -= timer.exposed_communication_s + timer.idle_s - waited_s
        return update

    def _counted(self, loss: float | None) -> float:
        """Return the loss on the first tensor-parallel rank, else 0: a sum over ranks counts it once."""
        return loss or 0.0 if self.group.index == 0 else 0.0
