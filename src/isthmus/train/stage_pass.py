"""`StagePass`: what one stage holds in one step, by micro-batch and chunk, and how it does each operation.

Shapes: B samples of a micro-batch, S tokens of a sample, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from isthmus.core.plan import StageTime
from isthmus.schedule import Kind, Operation, Schedule, is_last_use
from isthmus.train.device import synchronize
from isthmus.train.exchange import Message, message_tag
from isthmus.train.metrics import Account
from isthmus.train.micro_batches import MicroBatches
from isthmus.train.model.deferred import DeferredWeights, Key
from isthmus.train.model.pieces import StagePieces
from isthmus.train.model.recompute import Recomputation
from isthmus.train.receive_buffers import ReceiveBuffers
from isthmus.train.shares.exchange import Messenger

_STARTED: dict[Kind, Kind] = {
    "wait_receive_forward": "receive_forward",
    "wait_receive_backward": "receive_backward",
}


@dataclass(frozen=True)
class Losses:
    """What a step cost: `loss` in nats per counted token on the last stage, else None; `balance_loss` is the
    stage's part of the loss that balances experts (`isthmus.train.model.balance`), None where there is none.
    """

    loss: float | None
    balance_loss: float | None


@dataclass(frozen=True, kw_only=True)
class StageSetup:
    """What stays from step to step: see `isthmus.train.executor.Executor`; `again` is by chunk."""

    pieces: StagePieces
    stage: int
    ranks: tuple[int, ...]
    exchange: Messenger
    buffers: ReceiveBuffers
    again: tuple[Recomputation, ...]
    stage_time: StageTime | None
    sleep: Callable[[float], None]


class StagePass:
    """The state of one step: tensors and exchanges by micro-batch and chunk, each dropped as soon as used."""

    def __init__(
        self,
        setup: StageSetup,
        schedule: Schedule,
        batches: MicroBatches,
        account: Account,
        update: Callable[[], None],
        deferred: DeferredWeights | None,
    ) -> None:
        self.setup, self.models, self.schedule = setup, setup.pieces.models, schedule
        self.batches, self.account, self.update, self.deferred = batches, account, update, deferred
        self.inputs: dict[Key, torch.Tensor] = {}
        self.outputs: dict[Key, torch.Tensor] = {}
        self.gradients: dict[Key, torch.Tensor] = {}
        self.balances: dict[Key, torch.Tensor] = {}
        self.works: dict[tuple[str, Key], Any] = {}
        self.handed: dict[int, torch.Tensor] = {}
        self.losses: list[torch.Tensor] = []
        self.balance_losses: list[torch.Tensor] = []

    def do(self, operation: Operation) -> None:
        """Compute, wait or update, as `operation` says."""
        kind, m, key = operation.kind, operation.micro_batch, (operation.micro_batch, operation.chunk)
        compute = {
            "forward": self._forward,
            "backward": self._whole_backward,
            "backward_input": self._backward_input,
            "backward_weight": self._backward_weight,
        }.get(kind)
        if compute is not None:
            self._timed(kind, m, partial(compute, key))
            if is_last_use(operation, self.schedule.trains):
                for received in ("receive_forward", "receive_backward"):
                    self.setup.buffers.give_back((received, key))
        elif kind == "update":
            with self.account.span("update", m):
                self.update()
        else:
            with self.account.span("send" if "send" in kind else "receive", m):
                self._wait(operation)

    def cost(self) -> Losses:
        """Return what the forwards so far cost; waits for them."""
        return Losses(
            _sum(self.losses) if self.setup.pieces.is_last else None,
            _sum(self.balance_losses) if self.balance_losses else None,
        )

    def start(self, operations: Sequence[Operation]) -> None:
        """Start the exchanges that stand side by side in the schedule; those with itself need no group."""
        far = [one for one in operations if not self._is_own(one)]
        works = self.setup.exchange.start([self._message(one) for one in far])
        for one, work in zip(far, works, strict=True):
            self.works[one.kind, (one.micro_batch, one.chunk)] = work
        for one in operations:
            if one.kind.startswith("send_") and self._is_own(one):
                self.handed[message_tag(self.schedule, self.setup.stage, one)] = self._outgoing(one)

    def _is_own(self, operation: Operation) -> bool:
        """Tell whether an exchange is between two pieces of this stage."""
        return self.schedule.peer(self.setup.stage, operation) == self.setup.stage

    def _wait(self, operation: Operation) -> None:
        kind, key = operation.kind, (operation.micro_batch, operation.chunk)
        if not self._is_own(operation):
            self.setup.exchange.wait(self.works.pop((kind.removeprefix("wait_"), key)))
        elif "receive" in kind:
            given = Operation(_STARTED[kind], operation.micro_batch, operation.chunk)
            target = self.inputs if kind.endswith("forward") else self.gradients
            target[key] = self.handed.pop(message_tag(self.schedule, self.setup.stage, given))

    def _outgoing(self, operation: Operation) -> torch.Tensor:
        """Return what a send carries [B, S, H]; autograd still needs the output of a forward that trains."""
        key = operation.micro_batch, operation.chunk
        if operation.kind == "send_backward":
            return self.gradients.pop(key)
        out = self.outputs[key] if self.schedule.trains else self.outputs.pop(key)
        return out.detach().contiguous()

    def _message(self, operation: Operation) -> Message:
        key, stage = (operation.micro_batch, operation.chunk), self.setup.stage
        peer = self.setup.ranks[self.schedule.peer(stage, operation)]
        tag = message_tag(self.schedule, stage, operation)
        match operation.kind:
            case "send_forward" | "send_backward":
                return Message(self._outgoing(operation), peer, tag, True)
            case "receive_forward":
                self.inputs[key] = self._room(operation)
                return Message(self.inputs[key], peer, tag, False)
            case _:
                self.gradients[key] = self._room(operation)
                return Message(self.gradients[key], peer, tag, False)

    def _room(self, operation: Operation) -> torch.Tensor:
        """Return where a receive puts its tensor [B, S, H]."""
        key, num_samples = (operation.micro_batch, operation.chunk), self.batches.sizes[operation.micro_batch]
        device = self.models[operation.chunk].device
        return self.setup.buffers.take((operation.kind, key), num_samples, device)

    def _forward(self, key: Key) -> None:
        (m, chunk), trains = key, self.schedule.trains
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
        """Keep the balance loss of a micro-batch, weighed by its share of the step's samples."""
        weighed = balance * (self.batches.sizes[key[0]] / self.batches.num_samples)
        self.balance_losses.append(weighed.detach())
        self.balances[key] = weighed * self.models[key[1]].balance_coefficient

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
            raise RuntimeError("a backward cut in two where no schedule asked for one")
        with self.deferred.put_off(key):
            self._backward(key)

    def _backward_weight(self, key: Key) -> None:
        if self.deferred is not None:
            self.deferred.multiply(key)

    def _timed(self, kind: str, m: int, compute: Callable[[], None]) -> None:
        """Compute, then wait until the virtual chip would have been done."""
        with self.account.span(kind, m), self.account.computing():
            start_s = self.account.clock()
            compute()
            synchronize(self.setup.pieces.device)
            times = self.setup.stage_time
            if times is not None:
                whole_s = times.forward_s if kind == "forward" else times.backward_s
                cuts = len(self.setup.pieces.own) * (1 if kind in ("forward", "backward") else 2)
                left_s = whole_s / cuts - (self.account.clock() - start_s)
                self.account.overrun_s += max(-left_s, 0.0)
                if left_s > 0:
                    self.setup.sleep(left_s)


def _sum(losses: Sequence[torch.Tensor]) -> float:
    """Return the sum of scalars, which come from their device together."""
    return sum(torch.stack(list(losses)).tolist()) if losses else 0.0
