"""`Recovery`: what one rank does so that a loss, its own or another's, costs at most a step.

After every step each rank's state goes to shared memory, where it outlives the process. When a rank is lost
the others give up the step, keep process, model and optimizer, and meet it anew; then all go back to the
newest state that every one of them has, and on from there.
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
"""Losses in a row, no step done between them, after which the attempt ends: nothing mends by itself then."""

_SLOTS = 2
_NONE = -1


class Recovery:
    """For one rank, used by the thread that trains. `memory` is where its snapshots are, also a former
    process's; `pulse` tells the supervisor what the rank does.
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
        """Call `attempt`, then leave, until both end without losing a peer; raises what nothing mends.

        `drain` sees to it that nothing begun before a loss goes on after it. Nothing mends a rank that is
        gone for good, nor more than `MAX_LOSSES` in a row.
        """
        while True:
            try:
                attempt()
                self._pulse.finishes()
                return self._membership.leave()
            except PeerError as error:
                self._lost_s = self._lost_s or time.monotonic()
                self._pulse.rest()
                lost = error
            self._losses += 1
            try:
                if self._losses > MAX_LOSSES:
                    raise PeerError(
                        f"{MAX_LOSSES} losses in a row and no step between them, at last: {lost.message}",
                        hint="the logs of all ranks say what each lost; the job restarts by itself",
                    )
                self._membership.rejoin(lost, drain)
            except PeerError:
                if self._pulse.read().finished:  # whoever is gone had all there was to have
                    return None
                raise
            del lost  # its frames hold all that the step given up had in memory, in part in cycles
            gc.collect()

    @property
    def met_before(self) -> bool:
        """Whether the ranks of this attempt have met before, and a rank was lost since."""
        return self._pulse.incarnation > 0

    def agree(
        self, exchange: Exchange, restore: Callable[[Snapshot], None], durable: Callable[[], int], saved: int
    ) -> int:
        """Go to the newest state that every rank has, and return how many steps it is after.

        `restore` takes over a snapshot; where there is none that all have, or none as new as the checkpoint
        after `saved` steps, `durable` loads the newest checkpoint. After a loss memory goes before the disk:
        a checkpoint may be newer than what a lost rank has reported, and no step's figures may be missing.
        Raises `UnavailableError` where there is no checkpoint, and this rank's weights have changed already.
        """
        mine = self.memory.steps()
        padded = [*mine, *[_NONE] * (_SLOTS - len(mine))]
        known = exchange.gather(torch.tensor(padded, dtype=torch.int64))
        common = set.intersection(*({int(step) for step in of_rank} for of_rank in known)) - {_NONE}
        if common and ((step := max(common)) >= saved or self.met_before):
            restore(self.memory.load(step))
        elif (step := durable()) == 0:
            self._begin_again(restore)
        self.memory.forget_after(step)
        self._moved = step > 0
        self._resumed(step)
        return step

    def begins(self, step: int) -> None:
        """Take note that `step` begins."""
        self._done = step
        self._pulse.begins(step)

    def settle(self) -> None:
        """Return once the last snapshot is whole: before weights change, here or elsewhere."""
        self._moved = True
        if self._keeps:
            self._unless_full(self.memory.wait)

    def keep(self, step: int, samples: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Begin the snapshot of the state after `step` steps."""
        self._done = step
        if self._keeps and step not in self.memory.steps():
            self._unless_full(lambda: self.memory.take(step, samples, tensors))

    def ends(self, compute_s: float) -> dict[str, float | None]:
        """Take note that the step is done and computed for `compute_s`; return what a recovery has cost."""
        self._pulse.ends()
        self._losses = 0
        if (told := self._pace.judge(compute_s)) is not None:
            self._events.tell("slow", told)
        figures, self._figures = self._figures, {}
        return figures

    def _begin_again(self, restore: Callable[[Snapshot], None]) -> None:
        """Go back to the state before the first step: a rank had none when it was lost, and none is saved."""
        if 0 in self.memory.steps():
            restore(self.memory.load(0))
        elif self._moved:
            raise UnavailableError(
                "a rank has lost its snapshots, and there is no checkpoint",
                hint="the job starts again by itself; set checkpoints.every_steps lower",
            )

    def _resumed(self, step: int) -> None:
        if self._lost_s is None:
            return
        seconds, self._lost_s = time.monotonic() - self._lost_s, None
        repeated = max(self._done - step, 0)
        self._figures = {"recovery_s": seconds, "repeated_steps": float(repeated)}
        self._events.tell(
            "resumed",
            f"all go on after step {step}, {seconds:.2f} s after the loss",
            seconds=seconds,
            step=step,
        )

    def _unless_full(self, work: Callable[[], object]) -> None:
        """Do without snapshots from now on where there is no room for them."""
        try:
            work()
        except UnavailableError as error:
            self._keeps = False
            print(f"warning: a loss will cost more than a step: {error}", flush=True)


def _planned_s(spec: WorkerSpec) -> float | None:
    """Return the computing time of a step that the plan predicts for this rank's stage, in seconds."""
    predicted, stage = spec.plan.predicted, spec.plan.ranks[spec.rank].stage
    if predicted is None or stage >= len(predicted.stage_times):
        return None
    times = predicted.stage_times[stage]
    return (times.forward_s + times.backward_s) * spec.plan.micro_batches_of(spec.stage.replica)
