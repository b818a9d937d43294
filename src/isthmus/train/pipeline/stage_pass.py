"""`StagePass`: the state of one stage in one step, and the execution of each schedule operation.

Shapes: B samples of a micro-batch, S tokens of a sample, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from isthmus.core.plan import StageTime
from isthmus.schedule import Kind
from isthmus.train.messages.device import synchronize
from isthmus.train.messages.exchange import Message
from isthmus.train.messages.metrics import Account
from isthmus.train.model.deferred_weights import DeferredWeights, Key
from isthmus.train.model.recompute import Recomputation
from isthmus.train.model.stage_pieces import StagePieces
from isthmus.train.pipeline.micro_batches import MicroBatches
from isthmus.train.pipeline.receive_buffers import ReceiveBuffers
from isthmus.train.pipeline.stage_program import Step
from isthmus.train.tensor_parallel.tp_exchange import Messenger


@dataclass(frozen=True)
class Losses:
    """Losses of a step on one stage."""

    # Nats per counted token, on the last stage only.
    loss: float | None
    # The stage's part of the expert load-balancing loss (`isthmus.train.model.balance`), if it has any.
    balance_loss: float | None


@dataclass(frozen=True, kw_only=True)
class StageSetup:
    """The parts of a stage that persist across steps; see the parameters of `Executor`."""

    pieces: StagePieces
    stage: int
    ranks: tuple[int, ...]
    exchange: Messenger
    buffers: ReceiveBuffers
    # By chunk.
    again: tuple[Recomputation, ...]
    stage_time: StageTime | None
    sleep: Callable[[float], None]


class StagePass:
    """The state of one step: tensors by (micro-batch, chunk), works by tag, each dropped after last use."""

    def __init__(
        self,
        setup: StageSetup,
        trains: bool,
        batches: MicroBatches,
        account: Account,
        update: Callable[[Losses], None],
        deferred: DeferredWeights | None,
    ) -> None:
        self.setup, self.models, self.trains = setup, setup.pieces.models, trains
        self.batches, self.account, self.update, self.deferred = batches, account, update, deferred
        self.inputs: dict[Key, torch.Tensor] = {}
        self.outputs: dict[Key, torch.Tensor] = {}
        self.gradients: dict[Key, torch.Tensor] = {}
        self.balances: dict[Key, torch.Tensor] = {}
        self.works: dict[int, Any] = {}
        self.handed: dict[int, torch.Tensor] = {}
        self.losses: list[torch.Tensor] = []
        self.balance_losses: list[torch.Tensor] = []

    def do(self, step: Step) -> None:
        """Execute one operation other than the start of a message."""
        kind, m = step.kind, step.key[0]
        compute = _COMPUTE.get(kind)
        if compute is not None:
            self._timed(step, compute)
            if step.frees:
                self.setup.buffers.give_back(("receive_forward", step.key))
                self.setup.buffers.give_back(("receive_backward", step.key))
        elif kind == "update":
            with self.account.span("update", m):
                self.update(self.cost())
        else:
            with self.account.span("send" if "send" in kind else "receive", m):
                self._wait(step)

    def cost(self) -> Losses:
        """Return the losses of the forwards so far; waits for the device."""
        return Losses(
            _sum(self.losses) if self.setup.pieces.is_last else None,
            _sum(self.balance_losses) if self.balance_losses else None,
        )

    def start(self, steps: Sequence[Step]) -> None:
        """Start adjacent messages of the schedule; a message to the own stage is handed over locally."""
        start_s, stage = self.account.clock(), self.setup.stage
        remote = [step for step in steps if step.peer != stage]
        messages = [self._message(step) for step in remote]
        self.account.calls_s += self.account.clock() - start_s
        works = self.setup.exchange.start(messages)
        for step, work in zip(remote, works, strict=True):
            self.works[step.tag] = work
        for step in steps:
            if step.peer == stage and step.kind.startswith("send_"):
                self.handed[step.tag] = self._outgoing(step)

    def _wait(self, step: Step) -> None:
        if step.peer != self.setup.stage:  # training keeps sent outputs until their backward
            self.setup.exchange.wait(self.works.pop(step.tag), arrived=not self.trains)
        elif "receive" in step.kind:
            target = self.inputs if step.kind.endswith("forward") else self.gradients
            target[step.key] = self.handed.pop(step.tag)

    def _outgoing(self, step: Step) -> torch.Tensor:
        """Return the tensor of a send [B, S, H]; in training, autograd keeps the output too."""
        if step.kind == "send_backward":
            return self.gradients.pop(step.key)
        out = self.outputs[step.key] if self.trains else self.outputs.pop(step.key)
        return out.detach().contiguous()

    def _message(self, step: Step) -> Message:
        assert step.peer is not None
        peer = self.setup.ranks[step.peer]
        if step.kind.startswith("send_"):
            return Message(self._outgoing(step), peer, step.tag, True)
        target = self.inputs if step.kind == "receive_forward" else self.gradients
        target[step.key] = self._room(step)
        return Message(target[step.key], peer, step.tag, False)

    def _room(self, step: Step) -> torch.Tensor:
        """Return the buffer [B, S, H] of a receive."""
        m, chunk = step.key
        name = (step.kind, step.key)
        return self.setup.buffers.take(name, self.batches.sizes[m], self.models[chunk].device)

    def _forward(self, key: Key) -> None:
        (m, chunk), trains = key, self.trains
        model = self.models[chunk]
        labels = self.batches.labels[m].to(model.device) if model.is_last else None
        if model.is_first:
            x = self.batches.inputs[m].to(model.device)
        else:
            x = self.inputs[key] if trains else self.inputs.pop(key)
            x.requires_grad_(trains)
        out, balance = model.compute(x, self.setup.again[chunk])
        if labels is not None:
            out = model.loss(out, labels) * self.batches.loss_scale
            self.losses.append(out.detach())
        if balance is not None:
            self._weigh_balance(key, balance)
        if trains or not model.is_last:
            self.outputs[key] = out

    def _weigh_balance(self, key: Key, balance: torch.Tensor) -> None:
        """Store the balance loss of a micro-batch, weighted by its share of the step's samples."""
        weighted = balance * (self.batches.sizes[key[0]] / self.batches.num_samples)
        self.balance_losses.append(weighted.detach())
        self.balances[key] = weighted * self.models[key[1]].balance_coefficient

    def _backward(self, key: Key) -> None:
        out, gradient = self.outputs.pop(key), self.gradients.pop(key, None)
        if key in self.balances:
            torch.autograd.backward((out, self.balances.pop(key)), (gradient, None))
        else:
            torch.autograd.backward(out, gradient)
        if not self.models[key[1]].is_first:
            x = self.inputs.pop(key)
            self.gradients[key] = torch.zeros_like(x) if x.grad is None else x.grad.contiguous()

    def _whole_backward(self, key: Key) -> None:
        if self.deferred is None:
            self._backward(key)
        else:
            self._backward_input(key)
            self._backward_weight(key)

    def _backward_input(self, key: Key) -> None:
        if self.deferred is None:
            raise RuntimeError("the schedule has no split backward")
        with self.deferred.put_off(key):
            self._backward(key)

    def _backward_weight(self, key: Key) -> None:
        if self.deferred is not None:
            self.deferred.multiply(key)

    def _timed(self, step: Step, compute: Callable[[StagePass, Key], None]) -> None:
        """Compute; with virtual chips, sleep for the rest of the predicted time."""
        timer, times = self.account, self.setup.stage_time
        start_s = timer.clock()
        compute(self, step.key)
        synchronize(self.setup.pieces.device)
        if times is not None:
            stage_s = times.forward_s if step.kind == "forward" else times.backward_s
            num_parts = len(self.setup.pieces.own) * (1 if step.kind in ("forward", "backward") else 2)
            left_s = stage_s / num_parts - (timer.clock() - start_s)
            timer.overrun_s += max(-left_s, 0.0)
            if left_s > 0:
                self.setup.sleep(left_s)
        timer.computed(step.kind, step.key[0], start_s)


_COMPUTE: dict[Kind, Callable[[StagePass, Key], None]] = {
    "forward": StagePass._forward,
    "backward": StagePass._whole_backward,
    "backward_input": StagePass._backward_input,
    "backward_weight": StagePass._backward_weight,
}


def _sum(losses: Sequence[torch.Tensor]) -> float:
    """Return the sum of scalar tensors, with one copy from the device."""
    return sum(torch.stack(list(losses)).tolist()) if losses else 0.0
