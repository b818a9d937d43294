"""`Executor`: runs one stage's operations of any schedule, computing for real and exchanging what it must.

What one step holds is `isthmus.train.pipeline.stage_pass`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from isthmus.core.plan import StageTime
from isthmus.schedule import Schedule, receive_buffers
from isthmus.train.messages.exact_sleep import sleep_exactly
from isthmus.train.messages.metrics import Account
from isthmus.train.model.deferred_weights import DeferredWeights
from isthmus.train.model.recompute import KEEP_ALL, Recomputation
from isthmus.train.model.stage_pieces import StagePieces
from isthmus.train.pipeline.micro_batches import MicroBatches
from isthmus.train.pipeline.receive_buffers import ReceiveBuffers
from isthmus.train.pipeline.stage_pass import Losses, StagePass, StageSetup
from isthmus.train.pipeline.stage_program import Program, make_program
from isthmus.train.tensor_parallel.tp_exchange import Messenger


@dataclass(frozen=True)
class _Learned:
    """What a schedule asks of a stage."""

    schedule: Schedule
    program: Program
    num_buffers: int


class Executor:
    """One stage of a pipeline. Stage `s` of the schedule is rank `ranks[s]` of the process group.

    `pieces` holds a model for every chunk of the schedule. `stage_time` makes the chip virtual: each forward
    and backward is padded by `sleep` to that time, or to a chunk's part of it (a chunk of a bidirectional
    schedule is a whole stage); a backward cut in two to half each. What `again` says of the stage's layers is
    computed again in the backward, one layer at a time.
    """

    def __init__(
        self,
        pieces: StagePieces,
        stage: int,
        ranks: Sequence[int],
        exchange: Messenger,
        *,
        dtype: torch.dtype,
        stage_time: StageTime | None = None,
        again: Recomputation = KEEP_ALL,
        sleep: Callable[[float], None] = sleep_exactly,
    ) -> None:
        self.pieces, self.stage, self._dtype = pieces, stage, dtype
        self.buffers = ReceiveBuffers()
        self._setup = StageSetup(
            pieces=pieces,
            stage=stage,
            ranks=tuple(ranks),
            exchange=exchange,
            buffers=self.buffers,
            again=pieces.again(again),
            stage_time=stage_time,
            sleep=sleep,
        )
        self._deferred: DeferredWeights | None = None
        self._learned: dict[bool, _Learned] = {}
        self.losses = Losses(None, None)

    def run(
        self,
        schedule: Schedule,
        batches: MicroBatches,
        account: Account,
        update: Callable[[], None] = lambda: None,
    ) -> Losses:
        """Run the stage's operations; return what the step cost.

        `update` is called where the schedule says so; `losses` are then known. Raises `PeerError` where a
        neighbour is lost.
        """
        self._setup.exchange.account = account
        learned = self._learn(schedule)
        self._make_room(learned.num_buffers, batches)

        def updated(losses: Losses) -> None:
            self.losses = losses
            update()

        one = StagePass(self._setup, schedule.trains, batches, account, updated, self._deferred)
        with torch.set_grad_enabled(schedule.trains):
            for steps in learned.program:
                if steps[0].starts:
                    one.start(steps)
                else:
                    one.do(steps[0])
        return one.cost()

    def _learn(self, schedule: Schedule) -> _Learned:
        """Return what the schedule asks of this stage: worked out anew where it is another than last time."""
        learned = self._learned.get(schedule.trains)
        if learned is None or learned.schedule is not schedule:
            program, num_buffers = make_program(schedule, self.stage), receive_buffers(schedule)[self.stage]
            learned = self._learned[schedule.trains] = _Learned(schedule, program, num_buffers)
            if self._deferred is None and any(one[0].kind == "backward_weight" for one in program):
                self._deferred = DeferredWeights(self.pieces.models)
        return learned

    def _make_room(self, num_buffers: int, batches: MicroBatches) -> None:
        """Get ready to receive: no more at once than the schedule needs, no larger than a micro-batch is.

        What a step that was broken off has left behind is dropped.
        """
        if self._deferred is not None:
            self._deferred.drop()
        shape = max(batches.sizes), batches.sequence_length, self.pieces.first.hidden_size
        self.buffers.begin(num_buffers, torch.empty(shape, dtype=self._dtype, device="meta"))
