"""`Executor`: runs one stage's operations of any schedule, computing for real and exchanging what it must.

Shapes: B samples of a micro-batch, S tokens of a sample, H hidden size, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import get_args

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from isthmus.core.plan import StageTime
from isthmus.schedule import Kind, Operation, Schedule
from isthmus.train.exchange import Exchange, backward_tag, forward_tag
from isthmus.train.metrics import Account
from isthmus.train.stage_model import StageModel, token_loss

_EXCHANGES = frozenset(kind for kind in get_args(Kind) if kind.startswith(("send_", "receive_", "wait_")))
EXECUTED_KINDS: frozenset[str] = _EXCHANGES | {"forward", "backward", "update"}
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


class Executor:
    """One stage of a pipeline. Stage `s` of the schedule is rank `ranks[s]` of the process group.

    `stage_time` makes the chip virtual: each forward and backward is padded to that time by `sleep`.
    `recompute` keeps a micro-batch's input only and computes the stage again in its backward.
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
        recompute: bool = False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.model, self.stage, self.ranks, self.exchange = model, stage, ranks, exchange
        self.dtype, self.stage_time, self.recompute, self.sleep = dtype, stage_time, recompute, sleep

    def run(
        self,
        schedule: Schedule,
        batches: MicroBatches,
        account: Account,
        update: Callable[[], None] = lambda: None,
    ) -> float | None:
        """Run the stage's operations; return the loss in nats per counted token on the last stage, else None.

        `update` is called where the schedule says so. Raises `PeerError` where a neighbour is lost.
        """
        self.exchange.account = account
        one = _Pass(self, schedule, batches, account, update)
        with torch.set_grad_enabled(schedule.trains):
            for operation in schedule.stages[self.stage]:
                one.do(operation)
        return sum(float(loss) for loss in one.losses) if self.model.is_last else None


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
        self.works: dict[tuple[str, int], dist.Work] = {}
        self.losses: list[torch.Tensor] = []

    def do(self, operation: Operation) -> None:
        """Do one operation of the schedule."""
        kind, m = operation.kind, operation.micro_batch
        if kind == "forward":
            self._timed(kind, m, partial(self._forward, m))
        elif kind == "backward":
            self._timed(kind, m, partial(self._backward, m))
        elif kind == "update":
            with self.account.span("update", m):
                self.update()
        elif kind.startswith("wait_"):
            with self.account.span("send" if "send" in kind else "receive", m):
                self.executor.exchange.wait(self.works.pop((kind.removeprefix("wait_"), m)))
        else:
            peer = self.executor.ranks[self.schedule.peer(self.executor.stage, operation)]
            self.works[kind, m] = self._start(kind, m, peer)

    def _start(self, kind: str, m: int, peer: int) -> dist.Work:
        exchange = self.executor.exchange
        match kind:
            case "send_forward":
                out = self.outputs[m] if self.schedule.trains else self.outputs.pop(m)
                return exchange.send(out.detach().contiguous(), peer, forward_tag(m))
            case "send_backward":
                return exchange.send(self.gradients.pop(m), peer, backward_tag(m))
            case "receive_forward":
                self.inputs[m] = self._empty(m)
                return exchange.receive(self.inputs[m], peer, forward_tag(m))
            case _:
                self.gradients[m] = self._empty(m)
                return exchange.receive(self.gradients[m], peer, backward_tag(m))

    def _empty(self, m: int) -> torch.Tensor:
        shape = self.batches.sizes[m], self.batches.sequence_length, self.model.hidden_size
        return torch.empty(shape, dtype=self.executor.dtype)

    def _forward(self, m: int) -> None:
        if self.model.is_first:
            x = self.batches.inputs[m]
        else:
            x = self.inputs[m] if self.schedule.trains else self.inputs.pop(m)
            x.requires_grad_(self.schedule.trains)
        if self.executor.recompute and self.schedule.trains:
            out = checkpoint(self.model, x, use_reentrant=False, preserve_rng_state=False)
        else:
            out = self.model(x)
        if self.model.is_last:
            out = token_loss(out, self.batches.labels[m]) * self.batches.loss_scale
            self.losses.append(out.detach())
        if self.schedule.trains or not self.model.is_last:
            self.outputs[m] = out

    def _backward(self, m: int) -> None:
        out, gradient = self.outputs.pop(m), self.gradients.pop(m, None)
        torch.autograd.backward(out, gradient)
        if not self.model.is_first:
            x = self.inputs.pop(m)
            self.gradients[m] = torch.zeros_like(x) if x.grad is None else x.grad.contiguous()

    def _timed(self, kind: str, m: int, compute: Callable[[], None]) -> None:
        """Compute, then wait until the virtual chip would have been done."""
        with self.account.span(kind, m), self.account.computing():
            start_s = self.account.clock()
            compute()
            times = self.executor.stage_time
            if times is not None:
                target_s = times.forward_s if kind == "forward" else times.backward_s
                left_s = target_s - (self.account.clock() - start_s)
                self.account.overrun_s += max(-left_s, 0.0)
                if left_s > 0:
                    self.executor.sleep(left_s)
