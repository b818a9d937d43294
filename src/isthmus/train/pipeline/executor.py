"""`Executor`: runs one stage's operations of a pipeline schedule; `StagePass` holds the state of a step."""

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
    """A schedule with its program and number of receive buffers for this stage."""

    schedule: Schedule
    program: Program
    num_buffers: int


class Executor:
    """Executes one stage of a pipeline. Stage `s` of the schedule is rank `ranks[s]` of the process group.

    `pieces` holds one model per chunk of the schedule; `dtype` is that of messages. `stage_time` makes the
    chip virtual: `sleep` pads each forward and backward to that time divided by the number of chunks (a chunk
    of a bidirectional schedule is a full stage), and each half of a split backward to half of it. `again`
    selects the layers whose activations are recomputed in the backward, one layer at a time.
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
        """Run the stage's operations for one step; return its losses.

        Calls `update` at the schedule's update operation, with `losses` set. Raises `PeerError` if a
        neighbour is lost.
        """
        self._setup.exchange.account = account
        prepared = self._learn(schedule)
        self._make_room(prepared.num_buffers, batches)

        def on_update(losses: Losses) -> None:
            self.losses = losses
            update()

        execution = StagePass(self._setup, schedule.trains, batches, account, on_update, self._deferred)
        with torch.set_grad_enabled(schedule.trains):
            for steps in prepared.program:
                if steps[0].starts:
                    execution.start(steps)
                else:
                    execution.do(steps[0])
        return execution.cost()

    def _learn(self, schedule: Schedule) -> _Learned:
        """Return the program of `schedule` for this stage; cached for the last schedule of its kind."""
        prepared = self._learned.get(schedule.trains)
        if prepared is None or prepared.schedule is not schedule:
            program, num_buffers = make_program(schedule, self.stage), receive_buffers(schedule)[self.stage]
            prepared = self._learned[schedule.trains] = _Learned(schedule, program, num_buffers)
            if self._deferred is None and any(steps[0].kind == "backward_weight" for steps in program):
                self._deferred = DeferredWeights(self.pieces.models)
        return prepared

    def _make_room(self, num_buffers: int, batches: MicroBatches) -> None:
        """Start a step with `num_buffers` receive buffers of [B, S, H]; drop the state of an aborted step."""
        if self._deferred is not None:
            self._deferred.drop()
        shape = max(batches.sizes), batches.sequence_length, self.pieces.first.hidden_size
        self.buffers.begin(num_buffers, torch.empty(shape, dtype=self._dtype, device="meta"))
