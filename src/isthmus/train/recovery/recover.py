"""`Recovery`: recovery of one rank from lost ranks, at the cost of at most one step.

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
from isthmus.train.liveness.heartbeat import Pulse
from isthmus.train.liveness.straggler import Pace
from isthmus.train.liveness.worker_events import EventLog
from isthmus.train.messages.exchange import Exchange
from isthmus.train.recovery.rejoin import Membership

MAX_LOSSES = 20
"""Consecutive losses without a completed step, after which the attempt fails."""

_SLOTS = 2
_NONE = -1


class Recovery:
    """Recovery state of one rank, used by the training thread.

    `memory` holds the rank's snapshots, including those of its earlier processes. `pulse` reports progress to
    the supervisor.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        membership: Membership,
        memory: MemoryCheckpoint,
        pulse: Pulse,
        events: EventLog,
    ) -> None:
        self._membership, self.memory, self._pulse, self._events = membership, memory, pulse, events
        self._pace = Pace(_planned_s(spec))
        self._lost_s: float | None = None
        self._losses = self._done = 0
        self._keeps, self._moved = True, False
        self._figures: dict[str, float | None] = {}

    def persist(self, attempt: Callable[[], None], drain: Callable[[], None]) -> None:
        """Call `attempt`, then leave the group; after a lost peer, rejoin and call it again.

        `drain` waits until no message queued before the loss can start after it. Raises `PeerError` if a rank
        is lost for good, or after `MAX_LOSSES` consecutive losses.
        """
        while True:
            # Step 1: train to the end.
            try:
                attempt()
                self._pulse.finishes()
                return self._membership.leave()
            except PeerError as error:
                self._lost_s = self._lost_s or time.monotonic()
                self._pulse.rest()
                loss = error
            # Step 2: form a new group.
            self._losses += 1
            try:
                if self._losses > MAX_LOSSES:
                    raise PeerError(
                        f"{MAX_LOSSES} losses in a row without a completed step, last: {loss.message}",
                        hint="see the logs of all ranks for their losses; the job restarts automatically",
                    )
                self._membership.rejoin(loss, drain)
            except PeerError:
                if self._pulse.read().finished:  # the lost rank had already finished
                    return None
                raise
            # Step 3: free the tensors of the aborted step, which the error's frames hold, in part in cycles.
            del loss
            gc.collect()

    @property
    def met_before(self) -> bool:
        """Whether this attempt has lost a rank and formed a new group."""
        return self._pulse.incarnation > 0

    def agree(
        self, exchange: Exchange, restore: Callable[[Snapshot], None], durable: Callable[[], int], saved: int
    ) -> int:
        """Restore the newest state that every rank has; return its number of completed steps.

        `restore` loads a snapshot. If the ranks have none in common, or only one older than the checkpoint
        after `saved` steps, `durable` loads the newest checkpoint. After a loss a common snapshot takes
        precedence even over a newer checkpoint: the lost rank may lack metrics of the steps between. Raises
        `UnavailableError` if there is no checkpoint and this rank's weights have already changed.
        """
        # Step 1: find the newest snapshot that all ranks have.
        local = self.memory.steps()
        padded = [*local, *[_NONE] * (_SLOTS - len(local))]
        by_rank = exchange.gather(torch.tensor(padded, dtype=torch.int64))
        common = set.intersection(*({int(step) for step in steps} for steps in by_rank)) - {_NONE}
        # Step 2: restore it, or else the newest checkpoint, or else the initial state.
        if common and ((step := max(common)) >= saved or self.met_before):
            restore(self.memory.load(step))
        elif (step := durable()) == 0:
            self._begin_again(restore)
        self.memory.forget_after(step)
        self._moved = step > 0
        self._resumed(step)
        return step

    def begins(self, step: int) -> None:
        """Record the start of `step`."""
        self._done = step
        self._pulse.begins(step)

    def settle(self) -> None:
        """Wait until the last snapshot is complete; call it before weights change."""
        self._moved = True
        if self._keeps:
            self._unless_full(self.memory.wait)

    def keep(self, step: int, samples: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Start a snapshot of the state after `step` steps."""
        self._done = step
        if self._keeps and step not in self.memory.steps():
            self._unless_full(lambda: self.memory.take(step, samples, tensors))

    def ends(self, compute_s: float) -> dict[str, float | None]:
        """Record the end of a step that computed for `compute_s`; return metrics of a recovery."""
        self._pulse.ends()
        self._losses = 0
        if (message := self._pace.judge(compute_s)) is not None:
            self._events.tell("slow", message)
        metrics, self._figures = self._figures, {}
        return metrics

    def _begin_again(self, restore: Callable[[Snapshot], None]) -> None:
        """Restore the initial state, if this rank has left it; there is no later state in common."""
        if 0 in self.memory.steps():
            restore(self.memory.load(0))
        elif self._moved:
            raise UnavailableError(
                "a rank has lost its snapshots, and there is no checkpoint",
                hint="the job restarts automatically; lower checkpoints.every_steps",
            )

    def _resumed(self, step: int) -> None:
        """After a recovery, record its duration (s) and number of repeated steps."""
        if self._lost_s is None:
            return
        seconds, self._lost_s = time.monotonic() - self._lost_s, None
        repeated = max(self._done - step, 0)
        self._figures = {"recovery_s": seconds, "repeated_steps": float(repeated)}
        self._events.tell(
            "resumed",
            f"all ranks continue after step {step}, {seconds:.2f} s after the loss",
            seconds=seconds,
            step=step,
        )

    def _unless_full(self, work: Callable[[], object]) -> None:
        """Call `work`; disable snapshots if shared memory is full."""
        try:
            work()
        except UnavailableError as error:
            self._keeps = False
            print(f"warning: snapshots are disabled, a loss will cost more than a step: {error}", flush=True)


def _planned_s(spec: WorkerSpec) -> float | None:
    """Return the predicted compute time per step of this rank's stage in seconds, if the plan has one."""
    predicted, stage = spec.plan.predicted, spec.plan.ranks[spec.rank].stage
    if predicted is None or stage >= len(predicted.stage_times):
        return None
    times = predicted.stage_times[stage]
    return (times.forward_s + times.backward_s) * spec.plan.micro_batches_of(spec.stage.replica)
