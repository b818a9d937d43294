"""`StepExecution`: the state of one stage in one step, and the execution of each schedule operation.

Shapes: B samples of a micro-batch, S tokens of a sample, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from isthmus.core.plan import StageTime
from isthmus.schedule import OperationKind
from isthmus.train.communication.communicator import TensorMessage
from isthmus.train.communication.device_timeline import DeviceTimeline
from isthmus.train.communication.pinned_memory import copy_to_device
from isthmus.train.communication.step_metrics import StepTimer
from isthmus.train.communication.torch_device import synchronize
from isthmus.train.model.deferred_weight_gradients import ChunkKey, DeferredWeightGradients
from isthmus.train.model.model_chunks import ModelChunks
from isthmus.train.model.recompute import RecomputePolicy
from isthmus.train.pipeline.micro_batches import MicroBatches
from isthmus.train.pipeline.receive_buffer_pool import ReceiveBufferPool
from isthmus.train.pipeline.stage_program import ProgramStep
from isthmus.train.tensor_parallel.tp_communicator import StageCommunicator


@dataclass(frozen=True)
class Losses:
    """Losses of a step on one stage."""

    # Nats per counted token, on the last stage only.
    loss: float | None
    # The stage's part of the expert load-balancing loss (`isthmus.train.model.balance_loss`), if it has any.
    balance_loss: float | None


@dataclass(frozen=True, kw_only=True)
class StageSetup:
    """The parts of a stage that persist across steps; see the parameters of `StageExecutor`."""

    model_chunks: ModelChunks
    stage: int
    ranks: tuple[int, ...]
    communicator: StageCommunicator
    buffers: ReceiveBufferPool
    # By chunk.
    recompute: tuple[RecomputePolicy, ...]
    # Of messages.
    dtype: torch.dtype
    stage_time: StageTime | None
    sleep: Callable[[float], None]
    final_backward: Callable[[int], AbstractContextManager[None]]


class StepExecution:
    """The state of one step: tensors by (micro-batch, chunk), works by tag, each dropped after last use."""

    def __init__(
        self,
        setup: StageSetup,
        trains: bool,
        batches: MicroBatches,
        timer: StepTimer,
        timeline: DeviceTimeline,
        update: Callable[[], None],
        deferred: DeferredWeightGradients | None,
        gradient_scale: float,
    ) -> None:
        self.timeline, self.gradient_scale = timeline, gradient_scale
        self.setup, self.models, self.trains = setup, setup.model_chunks.chunks, trains
        self.batches, self.timer, self.update, self.deferred = batches, timer, update, deferred
        self.inputs: dict[ChunkKey, torch.Tensor] = {}
        self.outputs: dict[ChunkKey, torch.Tensor] = {}
        self.gradients: dict[ChunkKey, torch.Tensor] = {}
        self.balance_terms: dict[ChunkKey, torch.Tensor] = {}
        self.pending_works: dict[int, Any] = {}
        self.local_handoff: dict[int, torch.Tensor] = {}
        self.losses: list[torch.Tensor] = []
        self.balance_losses: list[torch.Tensor] = []
        self._losses: Losses | None = None
        # A mark at which the device was idle, and the time there.
        self.anchor: tuple[Any, float] | None = None

    def execute(self, step: ProgramStep) -> None:
        """Execute one operation other than the start of a message."""
        kind, m = step.kind, step.key[0]
        compute = _COMPUTE.get(kind)
        if compute is not None:
            self._run_compute(step, compute)
            if step.frees_buffers:
                self.setup.buffers.release(("receive_forward", step.key))
                self.setup.buffers.release(("receive_backward", step.key))
        elif kind == "update":
            with self.timer.record_span("update", m):
                self.update()
        else:
            with self.timer.record_span("send" if "send" in kind else "receive", m):
                self._wait(step)

    def read_losses(self) -> Losses:
        """Return the losses of the step, once its forwards are queued; the first call waits for the device."""
        if self._losses is None:
            found = self._read([*self.losses, *self.balance_losses])
            loss, balance = sum(found[: len(self.losses)], 0.0), sum(found[len(self.losses) :], 0.0)
            self._losses = Losses(
                loss if self.setup.model_chunks.is_last else None, balance if self.balance_losses else None
            )
        return self._losses

    def _read(self, scalars: Sequence[torch.Tensor]) -> list[float]:
        if not scalars:
            return []
        found = self.timeline.read(torch.stack(list(scalars)))
        self.anchor = self.timeline.record(), self.timer.clock()
        return found

    def start(self, steps: Sequence[ProgramStep]) -> None:
        """Start adjacent messages of the schedule; a message to the own stage is handed over locally."""
        start_s, stage = self.timer.clock(), self.setup.stage
        remote = [step for step in steps if step.peer != stage]
        messages = [self._make_message(step) for step in remote]
        self.timer.calls_s += self.timer.clock() - start_s
        works = self.setup.communicator.start(messages)
        for step, work in zip(remote, works, strict=True):
            self.pending_works[step.tag] = work
        for step in steps:
            if step.peer == stage and step.kind.startswith("send_"):
                self.local_handoff[step.tag] = self._outgoing(step)

    def _wait(self, step: ProgramStep) -> None:
        if step.peer != self.setup.stage:  # training keeps sent outputs until their backward
            self.setup.communicator.wait(self.pending_works.pop(step.tag), until_delivered=not self.trains)
        elif "receive" in step.kind:
            target = self.inputs if step.kind.endswith("forward") else self.gradients
            target[step.key] = self.local_handoff.pop(step.tag)

    def _outgoing(self, step: ProgramStep) -> torch.Tensor:
        """Return the tensor of a send [B, S, H], in the dtype of messages; in training, autograd keeps outputs."""
        if step.kind == "send_backward":
            return self.gradients.pop(step.key)
        out = self.outputs[step.key] if self.trains else self.outputs.pop(step.key)
        return out.detach().to(self.setup.dtype).contiguous()

    def _make_message(self, step: ProgramStep) -> TensorMessage:
        if step.peer is None:
            raise RuntimeError(f"step {step.kind} has no peer")
        peer, what = self.setup.ranks[step.peer], (step.kind.partition("_")[2], step.key[0])
        if step.kind.startswith("send_"):
            return TensorMessage(self._outgoing(step), peer, step.tag, True, *what)
        target = self.inputs if step.kind == "receive_forward" else self.gradients
        target[step.key] = self._receive_buffer(step)
        return TensorMessage(target[step.key], peer, step.tag, False, *what)

    def _receive_buffer(self, step: ProgramStep) -> torch.Tensor:
        """Return the buffer [B, S, H] of a receive."""
        m, chunk = step.key
        name = (step.kind, step.key)
        return self.setup.buffers.acquire(name, self.batches.sizes[m], self.models[chunk].device)

    def _forward(self, key: ChunkKey) -> None:
        (m, chunk), trains = key, self.trains
        model = self.models[chunk]
        labels = copy_to_device(self.batches.labels[m], model.device) if model.is_last else None
        if model.is_first:
            x = copy_to_device(self.batches.inputs[m], model.device)
        else:
            x = self.inputs[key] if trains else self.inputs.pop(key)
            x.requires_grad_(trains)
        routing = self.batches.routing[m] if self.batches.routing else None
        out, balance = model.compute(x, self.setup.recompute[chunk], routing)
        if labels is not None:
            out = self.batches.loss(model, out, labels, m)
            self.losses.append(out.detach())
            out = out if self.gradient_scale == 1.0 else out * self.gradient_scale
        if balance is not None:
            self._add_balance_loss(key, balance)
        if trains or not model.is_last:
            self.outputs[key] = out

    def _add_balance_loss(self, key: ChunkKey, balance: torch.Tensor) -> None:
        """Store the balance loss of a micro-batch, weighted by its share of the step's samples."""
        weighted = balance * (self.batches.sizes[key[0]] / self.batches.num_samples)
        self.balance_losses.append(weighted.detach())
        self.balance_terms[key] = weighted * (self.models[key[1]].balance_coefficient * self.gradient_scale)

    def _backward(self, key: ChunkKey) -> None:
        out, gradient = self.outputs.pop(key), self.gradients.pop(key, None)
        gradient = None if gradient is None else gradient.to(out.dtype)
        if key in self.balance_terms:
            torch.autograd.backward((out, self.balance_terms.pop(key)), (gradient, None))
        else:
            torch.autograd.backward(out, gradient)
        if not self.models[key[1]].is_first:
            x = self.inputs.pop(key)
            self.gradients[key] = torch.zeros_like(x) if x.grad is None else x.grad.contiguous()

    def _full_backward(self, key: ChunkKey) -> None:
        if self.deferred is None:
            with self.setup.final_backward(key[1]):
                self._backward(key)
        else:
            self._backward_input(key)
            self._backward_weight(key)

    def _backward_input(self, key: ChunkKey) -> None:
        if self.deferred is None:
            raise RuntimeError("the schedule has no split backward")
        with self.deferred.defer(key):
            self._backward(key)

    def _backward_weight(self, key: ChunkKey) -> None:
        if self.deferred is not None:
            with self.setup.final_backward(key[1]):
                self.deferred.compute_gradients(key)

    def _run_compute(self, step: ProgramStep, compute: Callable[[StepExecution, ChunkKey], None]) -> None:
        """Compute, or queue it on a device; with virtual chips, sleep for the rest of the predicted time."""
        timer, times, timeline = self.timer, self.setup.stage_time, self.timeline
        if times is None:
            start, waited_s = timeline.record(), timer.exposed_communication_s + timer.idle_s
            compute(self, step.key)
            timer.add_device_compute(step.kind, step.key[0], (start, timeline.record()), timeline)
            timer.compute_s -= timer.exposed_communication_s + timer.idle_s - waited_s
            return
        start_s = timer.clock()
        compute(self, step.key)
        synchronize(self.setup.model_chunks.device)
        stage_s = times.forward_s if step.kind == "forward" else times.backward_s
        num_parts = len(self.setup.model_chunks.first_copy) * (1 if step.kind in ("forward", "backward") else 2)
        left_s = stage_s / num_parts - (timer.clock() - start_s)
        timer.overrun_s += max(-left_s, 0.0)
        if left_s > 0:
            self.setup.sleep(left_s)
        timer.add_compute(step.kind, step.key[0], start_s)


_COMPUTE: dict[OperationKind, Callable[[StepExecution, ChunkKey], None]] = {
    "forward": StepExecution._forward,
    "backward": StepExecution._full_backward,
    "backward_input": StepExecution._backward_input,
    "backward_weight": StepExecution._backward_weight,
}
