"""`StageExecutor`: runs one stage's operations of a pipeline schedule; `StepExecution` holds the state of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from isthmus.core.plan import StageTime
from isthmus.schedule import Schedule, peak_receive_buffers
from isthmus.train.communication.device_timeline import DeviceTimeline, timeline_of
from isthmus.train.communication.exact_sleep import sleep_exactly
from isthmus.train.communication.step_metrics import StepTimer
from isthmus.train.model.deferred_weight_gradients import DeferredWeightGradients
from isthmus.train.model.model_chunks import ModelChunks
from isthmus.train.model.recompute import NO_RECOMPUTE, RecomputePolicy
from isthmus.train.pipeline.micro_batches import MicroBatches
from isthmus.train.pipeline.receive_buffer_pool import ReceiveBufferPool
from isthmus.train.pipeline.stage_program import StageProgram, make_stage_program
from isthmus.train.pipeline.step_execution import Losses, StageSetup, StepExecution
from isthmus.train.tensor_parallel.tp_communicator import StageCommunicator


@dataclass(frozen=True)
class _PreparedSchedule:
    """A schedule with its program and number of receive buffers for this stage."""

    schedule: Schedule
    program: StageProgram
    num_buffers: int


class StageExecutor:
    """Executes one stage of a pipeline. Stage `s` of the schedule is rank `ranks[s]` of the process group.

    `model_chunks` holds one model per chunk of the schedule; `dtype` is that of messages. `stage_time` makes the
    chip virtual: `sleep` pads each forward and backward to that time divided by the number of chunks (a chunk
    of a bidirectional schedule is a full stage), and each half of a split backward to half of it. `recompute`
    selects the layers whose activations are recomputed in the backward, one layer at a time. `timeline` replaces
    that of the device. `final_backward` returns the context of what completes the gradients of a chunk, by its number,
    for a micro-batch.
    """

    def __init__(
        self,
        model_chunks: ModelChunks,
        stage: int,
        ranks: Sequence[int],
        communicator: StageCommunicator,
        *,
        dtype: torch.dtype,
        stage_time: StageTime | None = None,
        recompute: RecomputePolicy = NO_RECOMPUTE,
        sleep: Callable[[float], None] = sleep_exactly,
        timeline: DeviceTimeline | None = None,
        final_backward: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        self.model_chunks, self.stage, self._dtype = model_chunks, stage, dtype
        self.buffers = ReceiveBufferPool()
        self._setup = StageSetup(
            model_chunks=model_chunks,
            stage=stage,
            ranks=tuple(ranks),
            communicator=communicator,
            buffers=self.buffers,
            recompute=model_chunks.recompute_policies(recompute),
            dtype=dtype,
            stage_time=stage_time,
            sleep=sleep,
            final_backward=final_backward,
        )
        self._deferred: DeferredWeightGradients | None = None
        self._prepared: dict[bool, _PreparedSchedule] = {}
        self.gradient_scale = 1.0
        """By which the loss is multiplied before its gradients are computed; equal on all stages."""
        self._timeline = timeline
        self._execution: StepExecution | None = None
        self._last_losses = Losses(None, None)

    @property
    def losses(self) -> Losses:
        """Those of the step under way, for whose forwards the first read waits, or of the last one."""
        return self._last_losses if self._execution is None else self._execution.read_losses()

    def timeline(self, timer: StepTimer) -> DeviceTimeline:
        """Return the timeline of the stage's device; that of a CPU has the clock of `timer`."""
        return self._timeline or timeline_of(self.model_chunks.device, timer.clock)

    def run(
        self,
        schedule: Schedule,
        batches: MicroBatches,
        timer: StepTimer,
        update: Callable[[], None] = lambda: None,
    ) -> Losses:
        """Run the stage's operations for one step; return its losses.

        Calls `update` at the schedule's update operation, which may read `losses`; nothing else waits for the device.
        Raises `PeerError` if a neighbour is lost.
        """
        self._setup.communicator.timer = timer
        prepared = self._prepare_schedule(schedule)
        self._allocate_buffers(prepared.num_buffers, batches)

        timeline = self.timeline(timer)
        execution = StepExecution(
            self._setup, schedule.trains, batches, timer, timeline, update, self._deferred, self.gradient_scale
        )
        self._execution = execution
        try:
            with torch.set_grad_enabled(schedule.trains):
                for steps in prepared.program:
                    if steps[0].is_message_start:
                        execution.start(steps)
                    else:
                        execution.execute(steps[0])
            self._last_losses = execution.read_losses()
        finally:
            self._execution = None  # it holds the tensors of a step that failed
        timer.settle(timeline, execution.anchor)
        return self._last_losses

    def _prepare_schedule(self, schedule: Schedule) -> _PreparedSchedule:
        """Return the program of `schedule` for this stage; cached for the last schedule of its kind."""
        prepared = self._prepared.get(schedule.trains)
        if prepared is None or prepared.schedule is not schedule:
            program, num_buffers = (
                make_stage_program(schedule, self.stage),
                peak_receive_buffers(schedule)[self.stage],
            )
            prepared = self._prepared[schedule.trains] = _PreparedSchedule(schedule, program, num_buffers)
            if self._deferred is None and any(steps[0].kind == "backward_weight" for steps in program):
                self._deferred = DeferredWeightGradients(self.model_chunks.chunks)
        return prepared

    def _allocate_buffers(self, num_buffers: int, batches: MicroBatches) -> None:
        """Start a step with `num_buffers` receive buffers of [B, S, H]; drop the state of an aborted step."""
        if self._deferred is not None:
            self._deferred.clear()
        shape = max(batches.sizes), batches.sequence_length, self.model_chunks.first_chunk.hidden_size
        self.buffers.begin_step(num_buffers, torch.empty(shape, dtype=self._dtype, device="meta"))
