"""`Run`: one rank's state of a run: its steps, evaluations and checkpoints."""

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
"""Name in a snapshot of the state of torch's random numbers."""

MAX_SKIPPED = 10
"""Updates in a row that may be skipped because the gradient is not finite."""


class Run:
    """One rank's state of the run."""

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
        """Meet the ranks that share the stage, and learn what all hold."""
        spec, shard = self.spec, self.spec.plan.zero == 1
        meet_sharers(spec.plan, spec.rank, self.group, backend=spec.backend, host=spec.host)
        return meet_owners(
            self.prepared.pieces, spec.rank, spec.plan.rank_clusters, self.exchange, shard=shard
        )

    def resume(self) -> int:
        """Load the newest checkpoint that the ranks find whole; return the number of steps done."""
        shapes = {name: one.shape for name, one in self.prepared.pieces.global_named_parameters()}
        found = self.saver.load(shapes)
        if found is None:
            return 0
        self.samples = found.samples
        self.optimizer.load(found.tensors)
        return found.step

    def state(self) -> dict[str, torch.Tensor]:
        """Return all that this rank needs to go on from here; the tensors are those it trains."""
        return self.optimizer.own_state() | {_GENERATOR: torch.get_rng_state()}

    def keep(self, step: int) -> None:
        """Keep the state after `step` steps in memory, here and at a peer, unless copies are on their way."""
        if not self.copies.delayed:
            self.recovery.keep(step, self.samples, self.state())
            self.copies.send(step)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to what `state` was."""
        self.samples = snapshot.samples
        self.optimizer.load_own(snapshot.tensors)
        torch.set_rng_state(snapshot.tensors[_GENERATOR].clone())

    def begin_again(self) -> None:
        """Drop what a step that was given up has left behind, and meet the others as `__init__` does."""
        self.num_skipped = 0
        self.optimizer.drop_gradients()
        self._meet()

    def step(self, step: int) -> tuple[dict[str, float | None], Account]:
        """Train on one global batch; return this rank's figures."""
        start_s = time.time()
        account = Account(traced=step in self.spec.trace_steps)
        batch_size = self.training.global_batch_size
        batches = self.batches.of_step(self.samples)
        done: list[Update] = []
        shared_s = self.group.waited_s
        losses = self.executor.run(self.schedule, batches, account, lambda: done.append(self._update(step)))
        shared_s = self.group.waited_s - shared_s
        account.compute_s -= shared_s
        account.exposed_communication_s += shared_s
        self.samples += batch_size
        step_s = time.time() - start_s
        samples_per_s = batch_size / step_s
        values = account.values()
        values |= {
            "step_s": step_s,
            "samples_per_s": samples_per_s,
            "tokens_per_s": samples_per_s * self.training.sequence_length,
            "learning_rate": done[0].learning_rate,
            "gradient_norm": done[0].gradient_norm,
            "update_skipped": float(done[0].skipped),
        }
        self.num_skipped = self.num_skipped + 1 if done[0].skipped else 0
        if self.tells_loss:
            values["loss"] = done[0].loss
        if losses.balance_loss is not None and self.group.index == 0:
            values["balance_loss"] = losses.balance_loss
        return values, account

    def stop_if_lost(self, step: int) -> None:
        """Raise `InputError` where so many updates in a row were skipped that no later batch will mend it."""
        if self.num_skipped >= MAX_SKIPPED:
            raise InputError(
                f"step {step + 1}: the gradient was not finite in {MAX_SKIPPED} steps in a row",
                hint="lower training.learning_rate, lengthen warmup_steps, or look at the weights",
            )

    def evaluate(self) -> dict[str, float | None]:
        """Measure the loss on the held-out samples; the last stage of the first replica tells it."""
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
        """Begin to write a checkpoint after `step` steps."""
        start_s = time.time()
        self.saver.save(step, self.samples, self.optimizer.state())
        return {"checkpoint_s": time.time() - start_s}

    def protect(self, step: int) -> dict[str, float | None]:
        """Read the checkpoint after `step` steps back; tell the agent if all ranks found it whole.

        Training goes on in any case: a damaged checkpoint is one that the run does not resume from.
        """
        start_s, num_bytes = time.time(), 0
        self.saver.wait()
        try:
            num_bytes = self.saver.read_back(step)
        except UnavailableError as error:
            print(f"warning: {error}", flush=True)
        found = self.exchange.gather(torch.tensor([num_bytes], dtype=torch.int64))
        if all(int(one) > 0 for one in found):
            self.guard.protected(step, num_bytes)
        else:
            self.guard.failed(step)
        return {"protect_s": time.time() - start_s}

    def _update(self, step: int) -> Update:
        account = self.exchange.account
        self.saver.settle()
        self.exchange.wish = self.guard.asked(step)
        self.recovery.settle()
        waited_s = account.exposed_communication_s + account.idle_s
        with account.computing():
            update = self.optimizer.apply(step, self._counted(self.executor.losses.loss))
            synchronize(self.prepared.pieces.device)
        account.compute_s -= account.exposed_communication_s + account.idle_s - waited_s
        return update

    def _counted(self, loss: float | None) -> float:
        """Return this rank's part of a loss; of those that share a stage all know it, the first counts."""
        return loss or 0.0 if self.group.index == 0 else 0.0
