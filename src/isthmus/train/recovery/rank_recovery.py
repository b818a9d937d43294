"""`RankRecovery`: recovery of one rank from lost ranks, at the cost of at most one step.

After each step every rank snapshots its state to shared memory, which outlives its process. When a rank is
lost, the others abort the step, keep process, model and optimizer, and form a new group with its replacement.
All ranks then restore the newest snapshot that every rank has.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping

import torch

from isthmus.core.errors import PeerError, UnavailableError
from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.train.checkpoint.memory_checkpoint import MemoryCheckpoint
from isthmus.train.checkpoint.memory_slot import Snapshot
from isthmus.train.communication.communicator import Communicator
from isthmus.train.liveness.heartbeat import Heartbeat
from isthmus.train.liveness.straggler import StragglerDetector
from isthmus.train.liveness.worker_events import EventLog
from isthmus.train.recovery.group_membership import GroupMembership

MAX_LOSSES = 20
"""Consecutive losses without a completed step, after which the attempt fails."""

_NUM_SLOTS = 2
_NO_STEP = -1


class RankRecovery:
    """Recovery state of one rank, used by the training thread.

    `memory` holds the rank's snapshots, including those of its earlier processes. `heartbeat` reports progress to
    the supervisor.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        membership: GroupMembership,
        memory: MemoryCheckpoint,
        heartbeat: Heartbeat,
        events: EventLog,
        *,
        max_losses: int = MAX_LOSSES,
    ) -> None:
        self._max_losses = max_losses
        self._membership, self.memory, self._heartbeat, self._events = membership, memory, heartbeat, events
        self._rank = spec.rank
        self._straggler = StragglerDetector(_planned_compute_s(spec))
        self._lost_at_s: float | None = None
        self._consecutive_losses = self._last_step = 0
        self._takes_snapshots, self._weights_changed = True, False
        self._recovery_metrics: dict[str, float | None] = {}

    def run_with_recovery(self, attempt: Callable[[], None], drain: Callable[[], None]) -> None:
        """Call `attempt`, then leave the group; after a lost peer, rejoin and call it again.

        `drain` waits until no message queued before the loss can start after it. Raises `PeerError` if a rank
        is lost for good, or after `max_losses` consecutive losses.
        """
        while True:
            # Step 1: train to the end.
            try:
                attempt()
                self._heartbeat.set_finished()
                return self._membership.leave()
            except PeerError as error:
                self._lost_at_s = self._lost_at_s or time.monotonic()
                self._heartbeat.clear_step()
                loss = error
            # Step 2: form a new group.
            self._consecutive_losses += 1
            try:
                if self._consecutive_losses > self._max_losses:
                    raise PeerError(
                        f"{self._max_losses} losses in a row without a completed step, last: {loss.message}",
                        hint="see the logs of all ranks for their losses; the job restarts automatically",
                    )
                self._membership.rejoin(loss, drain)
            except PeerError:
                if self._heartbeat.read().is_finished:  # the lost rank had already finished
                    return None
                raise
            # Step 3: free the tensors of the aborted step, which the error's frames hold, in part in cycles.
            del loss
            gc.collect()

    @property
    def has_rejoined(self) -> bool:
        """Whether this attempt has lost a rank and formed a new group."""
        return self._heartbeat.incarnation > 0

    def restore_common_state(
        self,
        communicator: Communicator,
        restore: Callable[[Snapshot], None],
        load_checkpoint: Callable[[], int],
        checkpoint_step: int,
        share: Callable[[], None] = lambda: None,
    ) -> int:
        """Restore the newest state that every rank has; return its number of completed steps.

        `restore` loads a snapshot, and `share` takes part in it on a rank that is at its start still. If the ranks have
        none in common, or only one older than the checkpoint after `checkpoint_step` steps, `load_checkpoint` loads the
        newest checkpoint. After a loss a common snapshot takes precedence even over a newer checkpoint: the lost rank
        may lack metrics of the steps between. Raises `UnavailableError` if there is no checkpoint and this rank's
        weights have already changed.
        """
        # Step 1: find the newest snapshot that all ranks have.
        local = self.memory.steps()
        padded = [*local, *[_NO_STEP] * (_NUM_SLOTS - len(local))]
        by_rank = communicator.all_gather(torch.tensor(padded, dtype=torch.int64))
        common = set.intersection(*({int(step) for step in steps} for steps in by_rank)) - {_NO_STEP}
        # Step 2: restore it, or else the newest checkpoint, or else the initial state.
        if common and ((step := max(common)) >= checkpoint_step or self.has_rejoined):
            restore(self.memory.load(step))
        elif (step := load_checkpoint()) == 0:
            self._restore_initial_state(restore, share)
        self.memory.drop_after(step)
        self._weights_changed = step > 0
        self._report_resumed(step)
        return step

    def begin_step(self, step: int) -> None:
        """Record the start of `step`."""
        self._last_step = step
        self._heartbeat.begin_step(step)

    def wait_for_snapshot(self) -> None:
        """Wait until the last snapshot is complete; call it before weights change."""
        self._weights_changed = True
        if self._takes_snapshots:
            self._disable_if_full(self.memory.wait)

    def take_snapshot(self, step: int, samples: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Start a snapshot of the state after `step` steps: `tensors` of any shape."""
        self._last_step = step
        if self._takes_snapshots and step not in self.memory.steps():
            self._disable_if_full(lambda: self.memory.begin_snapshot(step, samples, tensors))

    def release_older_snapshot(self) -> None:
        """Give the memory of the older snapshot back; call it once all ranks have the newer one."""
        if self._takes_snapshots:
            self._disable_if_full(self.memory.release_older)

    def end_step(self, compute_s: float) -> dict[str, float | None]:
        """Record the end of a step that computed for `compute_s`; return metrics of a recovery."""
        self._heartbeat.end_step()
        self._consecutive_losses = 0
        if (message := self._straggler.add_step(compute_s)) is not None:
            self._events.record("slow", message)
        metrics, self._recovery_metrics = self._recovery_metrics, {}
        return metrics

    def _restore_initial_state(self, restore: Callable[[Snapshot], None], share: Callable[[], None]) -> None:
        """Restore the initial state, if this rank has left it; there is no later state in common."""
        if 0 in self.memory.steps():
            restore(self.memory.load(0))
        elif self._weights_changed:
            raise UnavailableError(
                "a rank has lost its snapshots, and there is no checkpoint",
                hint="the job restarts automatically; lower checkpoints.every_steps",
            )
        elif self.has_rejoined:
            share()

    def _report_resumed(self, step: int) -> None:
        """Record that training continues: after a loss its duration (s) and number of repeated steps."""
        if self._lost_at_s is None:
            if step > 0 and self._rank == 0 and not self.has_rejoined:
                self._events.record("resumed", f"training continues after step {step} of an earlier attempt", step=step)
            return
        seconds, self._lost_at_s = time.monotonic() - self._lost_at_s, None
        repeated = max(self._last_step - step, 0)
        self._recovery_metrics = {"recovery_s": seconds, "repeated_steps": float(repeated)}
        self._events.record(
            "resumed",
            f"all ranks continue after step {step}, {seconds:.2f} s after the loss",
            seconds=seconds,
            step=step,
        )

    def _disable_if_full(self, action: Callable[[], object]) -> None:
        """Call `action`; disable snapshots if shared memory is full."""
        try:
            action()
        except UnavailableError as error:
            self._takes_snapshots = False
            print(f"warning: snapshots are disabled, a loss will cost more than a step: {error}", flush=True)


def _planned_compute_s(spec: WorkerSpec) -> float | None:
    """Return the predicted compute time per step of this rank's stage in seconds, if the plan has one."""
    predicted, stage = spec.plan.predicted, spec.plan.ranks[spec.rank].stage
    if predicted is None or stage >= len(predicted.stage_times):
        return None
    times = predicted.stage_times[stage]
    return (times.forward_s + times.backward_s) * spec.plan.micro_batches_of(spec.stage.replica)
