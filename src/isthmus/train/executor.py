"""`Executor`: runs one stage's operations of any schedule, computing for real and exchanging what it must.

Shapes: B samples of a micro-batch, S tokens of a sample, H hidden size, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import get_args

import torch

from isthmus.core.plan import StageTime
from isthmus.schedule import Kind, Operation, Schedule
from isthmus.train.device import synchronize
from isthmus.train.exchange import Exchange, Message, Work, backward_tag, forward_tag
from isthmus.train.metrics import Account
from isthmus.train.stage_model import StageModel, token_loss

_STARTS = frozenset(kind for kind in get_args(Kind) if kind.startswith(("send_", "receive_")))
_WAITS = frozenset(f"wait_{kind}" for kind in _STARTS)
EXECUTED_KINDS: frozenset[str] = _STARTS | _WAITS | {"forward", "backward", "update"}
"""Operations that the executor can do."""


@dataclass(frozen=True)
class MicroBatches:
    """The samples of one step, cut into micro-batches of `sizes` samples of `sequence_length` tokens.

    `inputs[m]` [B, S] int64 is given to the first stage, `labels[m]` [B, S] int64 to the last. A token's loss
    weighs `loss_scale`: one over the counted tokens of the whole step, however it is cut.
    """

    sizes: tuple[int, ...]
    sequence_length: int
    inputs: tuple[torch.Tensor, ...] = ()
    labels: tuple[torch.Tensor, ...] = ()
    loss_scale: float = 1.0

    @classmethod
    def cut(
        cls, size: int, micro_batch_size: int, sequence_length: int,
        input_ids: torch.Tensor | None = None, labels: torch.Tensor | None = None,
    ) -> MicroBatches:  # fmt: skip
        """Cut `size` samples; `input_ids`, `labels` are [size, S] where the stage needs them."""
        sizes = [micro_batch_size] * (size // micro_batch_size)
        if size % micro_batch_size:
            sizes.append(size % micro_batch_size)
        counted = 1 if labels is None else max(int((labels != -100).sum()), 1)
        return cls(
            sizes=tuple(sizes),
            sequence_length=sequence_length,
            inputs=() if input_ids is None else torch.split(input_ids, micro_batch_size),
            labels=() if labels is None else torch.split(labels, micro_batch_size),
            loss_scale=1.0 / counted,
        )


@dataclass(frozen=True)
class Losses:
    """What a step cost: `loss` in nats per counted token on the last stage, else None; `balance_loss` is the
    stage's part of the loss that balances experts (`isthmus.train.balance`), None where there is none.
    """

    loss: float | None
    balance_loss: float | None


class Executor:
    """One stage of a pipeline. Stage `s` of the schedule is rank `ranks[s]` of the process group.

    `stage_time` makes the chip virtual: each forward and backward is padded to that time by `sleep`.
    Of the first `recompute_layers` layers only the inputs are kept: the backward computes them again, one
    layer at a time.
    """

    def __init__(
        self,
        model: StageModel,
        stage: int,
        ranks: Sequence[int],
        exchange: Exchange,
        *,
        dtype: torch.dtype,
        stage_time: StageTime | None = None,
        recompute_layers: int = 0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.model, self.stage, self.ranks, self.exchange = model, stage, ranks, exchange
        self.dtype, self.stage_time, self.sleep = dtype, stage_time, sleep
        self.recompute_layers = recompute_layers

    def run(
        self,
        schedule: Schedule,
        batches: MicroBatches,
        account: Account,
        update: Callable[[], None] = lambda: None,
    ) -> Losses:
        """Run the stage's operations; return what the step cost.

        `update` is called where the schedule says so. Raises `PeerError` where a neighbour is lost.
        """
        self.exchange.account = account
        one = _Pass(self, schedule, batches, account, update)
        with torch.set_grad_enabled(schedule.trains):
            for starts, operations in groupby(schedule.stages[self.stage], lambda op: op.kind in _STARTS):
                if starts:
                    one.start(list(operations))
                    continue
                for operation in operations:
                    one.do(operation)
        return Losses(
            sum(float(loss) for loss in one.losses) if self.model.is_last else None,
            sum(float(loss) for loss in one.balance_losses) if one.balance_losses else None,
        )


class _Pass:
    """The state of one step: tensors and exchanges by micro-batch, each dropped as soon as it was used."""

    def __init__(
        self,
        executor: Executor,
        schedule: Schedule,
        batches: MicroBatches,
        account: Account,
        update: Callable[[], None],
    ) -> None:
        self.executor, self.model, self.schedule = executor, executor.model, schedule
        self.batches, self.account, self.update = batches, account, update
        self.inputs: dict[int, torch.Tensor] = {}
        self.outputs: dict[int, torch.Tensor] = {}
        self.gradients: dict[int, torch.Tensor] = {}
        self.balances: dict[int, torch.Tensor] = {}
        self.works: dict[tuple[str, int], Work] = {}
        self.losses: list[torch.Tensor] = []
        self.balance_losses: list[torch.Tensor] = []

    def do(self, operation: Operation) -> None:
        """Compute, wait or update, as `operation` says."""
        kind, m = operation.kind, operation.micro_batch
        if kind == "forward":
            self._timed(kind, m, partial(self._forward, m))
        elif kind == "backward":
            self._timed(kind, m, partial(self._backward, m))
        elif kind == "update":
            with self.account.span("update", m):
                self.update()
        else:
            with self.account.span("send" if "send" in kind else "receive", m):
                self.executor.exchange.wait(self.works.pop((kind.removeprefix("wait_"), m)))

    def start(self, operations: Sequence[Operation]) -> None:
        """Start the exchanges that stand side by side in the schedule."""
        works = self.executor.exchange.start([self._message(one) for one in operations])
        for one, work in zip(operations, works, strict=True):
            self.works[one.kind, one.micro_batch] = work

    def _message(self, operation: Operation) -> Message:
        kind, m = operation.kind, operation.micro_batch
        peer = self.executor.ranks[self.schedule.peer(self.executor.stage, operation)]
        match kind:
            case "send_forward":
                out = self.outputs[m] if self.schedule.trains else self.outputs.pop(m)
                return Message(out.detach().contiguous(), peer, forward_tag(m), True)
            case "send_backward":
                return Message(self.gradients.pop(m), peer, backward_tag(m), True)
            case "receive_forward":
                self.inputs[m] = self._empty(m)
                return Message(self.inputs[m], peer, forward_tag(m), False)
            case _:
                self.gradients[m] = self._empty(m)
                return Message(self.gradients[m], peer, backward_tag(m), False)

    def _empty(self, m: int) -> torch.Tensor:
        shape = self.batches.sizes[m], self.batches.sequence_length, self.model.hidden_size
        return torch.empty(shape, dtype=self.executor.dtype, device=self.model.device)

    def _forward(self, m: int) -> None:
        trains = self.schedule.trains
        if self.model.is_first:
            x = self.batches.inputs[m].to(self.model.device)
        else:
            x = self.inputs[m] if trains else self.inputs.pop(m)
            x.requires_grad_(trains)
        out, balance = self.model.compute(x, self.executor.recompute_layers)
        if self.model.is_last:
            labels = self.batches.labels[m].to(self.model.device)
            out = token_loss(out, labels) * self.batches.loss_scale
            self.losses.append(out.detach())
        if balance is not None:
            self._weigh_balance(m, balance)
        if trains or not self.model.is_last:
            self.outputs[m] = out

    def _weigh_balance(self, m: int, balance: torch.Tensor) -> None:
        """Keep the balance loss of a micro-batch, weighed by its share of the step's samples."""
        weighed = balance * (self.batches.sizes[m] / sum(self.batches.sizes))
        self.balance_losses.append(weighed.detach())
        self.balances[m] = weighed * self.model.balance_coefficient

    def _backward(self, m: int) -> None:
        out, gradient = self.outputs.pop(m), self.gradients.pop(m, None)
        if m in self.balances:
            torch.autograd.backward((out, self.balances.pop(m)), (gradient, None))
        else:
            torch.autograd.backward(out, gradient)
        if not self.model.is_first:
            x = self.inputs.pop(m)
            self.gradients[m] = torch.zeros_like(x) if x.grad is None else x.grad.contiguous()

    def _timed(self, kind: str, m: int, compute: Callable[[], None]) -> None:
        """Compute, then wait until the virtual chip would have been done."""
        with self.account.span(kind, m), self.account.computing():
            start_s = self.account.clock()
            compute()
            synchronize(self.model.device)
            times = self.executor.stage_time
            if times is not None:
                target_s = times.forward_s if kind == "forward" else times.backward_s
                left_s = target_s - (self.account.clock() - start_s)
                self.account.overrun_s += max(-left_s, 0.0)
                if left_s > 0:
                    self.executor.sleep(left_s)
