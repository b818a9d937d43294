"""`Exchange`: messages of a rank to others through torch.distributed, with the waiting accounted for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist

from isthmus.comm.group.group_work import SendWork
from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.train.messages.device import HOST_BACKENDS, synchronize
from isthmus.train.messages.host_staging import DeviceCopies, HostStaging, Landing
from isthmus.train.messages.metrics import Account
from isthmus.train.messages.send_thread import Posted, Poster, begun

Work: TypeAlias = "dist.Work | Landing | Posted[Message]"


@dataclass(frozen=True)
class Message:
    """A tensor on its way to a peer or from it; contiguous, and left alone until waited for."""

    tensor: torch.Tensor
    peer: int
    tag: int
    is_send: bool


class Exchange:
    """Messages to and from other ranks of the default process group; `clusters[r]` is where rank `r` runs.

    All exchanges are started at once, by a thread of their own, and completed by `wait`. With `staging` every
    tensor goes through host memory. `together` starts messages in one call of torch, which groups of a
    vendor's devices need where two ranks send to each other; `device` is where the group's own small tensors
    are, and `settle` waits until the device has what the group has promised it; both of these are started by
    the caller, in the order of its device's work. `account` is that of the present step. What one rank has a
    `wish` for all ranks know at the next `sum_over_all`, by `wished`.
    """

    def __init__(
        self,
        clusters: Sequence[str],
        rank: int,
        *,
        staging: HostStaging | None = None,
        together: bool = False,
        device: torch.device | str = "cpu",
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self._far = [cluster != clusters[rank] for cluster in clusters]
        self._staging, self._together, self._device, self._settle = staging, together, device, settle
        self._poster: Poster[Message] = Poster()
        self.account = Account()
        self.wish = self.wished = False

    def start(self, messages: Sequence[Message]) -> list[Work]:
        """Start `messages`; return what to wait for, one each."""
        start_s = self.account.clock()
        works = self._start(messages)
        self.account.calls_s += self.account.clock() - start_s
        return works

    def _start(self, messages: Sequence[Message]) -> list[Work]:
        out = sum(one.tensor.nbytes for one in messages if one.is_send and self._far[one.peer])
        self.account.wan_bytes += out
        if self._staging is not None:
            return [self._start_staged(one, self._staging) for one in messages]
        if not self._together:
            return [*self._poster.post(messages, self.start_one)] if messages else []
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend if one.is_send else dist.irecv, one.tensor, one.peer, tag=one.tag)
                for one in messages
            ]
        )
        return works if len(works) == len(messages) else [works[0]] * len(messages)

    def drain(self) -> None:
        """Return once nothing that was asked of a group that is no more can be started in the next one."""
        self._poster.drain()

    def start_one(self, message: Message) -> dist.Work:
        """Start one message in the default process group."""
        if message.is_send:
            return dist.isend(message.tensor, message.peer, tag=message.tag)
        return dist.irecv(message.tensor, message.peer, tag=message.tag)

    def wait(self, work: Work, *, arrived: bool = False) -> None:
        """Wait for an exchange; raises `PeerError` where the peer was lost.

        A message to another cluster is not waited for: the transport holds its tensor until it has arrived,
        which is a round trip later, and nobody here changes a tensor once it was sent. With `arrived` it is:
        then its memory is free.
        """
        account = self.account
        start_s, spent = account.clock(), work.is_completed()
        if isinstance(begun(work), SendWork) and not (arrived or work.is_completed()):
            account.calls_s += account.clock() - start_s
            return
        spent = spent or (isinstance(work, Posted) and work.message.is_send)
        work.wait()
        self._settle()
        end_s = account.clock()
        account.waited(start_s, end_s, getattr(work, "under_way", None))
        account.calls_s += end_s - start_s if spent else 0.0

    def sum_over_all(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` [n] (float64) over all ranks; the wait for the slowest counts as idle.

        The same message tells everybody whether any rank has a wish: all see it in the same step.
        """
        total = torch.cat([values, values.new_tensor([float(self.wish)])]).to(self._device)
        start_s = self.account.clock()
        self._all_reduce(total)
        self.account.waited(start_s, self.account.clock(), None)
        self.wished = bool(total[-1].item() > 0)
        return total[:-1].cpu()

    def from_first(self, numbers: Sequence[int]) -> list[int]:
        """Return the `numbers` that rank 0 gave; all ranks give as many."""
        told = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        dist.broadcast(told, 0)
        return [int(one) for one in told.tolist()]

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the small tensors of all ranks by rank, on the CPU."""
        mine = tensor.to(self._device)
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        return [part.cpu() for part in parts]

    def tell_all(self, told: bytes) -> list[bytes]:
        """Return what every rank has `told`, by rank; of any length."""
        lengths = [int(one) for one in self.gather(torch.tensor([len(told)], dtype=torch.int64))]
        padded = torch.zeros(max(*lengths, 1), dtype=torch.uint8)
        padded[: len(told)] = torch.frombuffer(bytearray(told), dtype=torch.uint8) if told else padded[:0]
        parts = self.gather(padded)
        return [bytes(part[:length].tolist()) for part, length in zip(parts, lengths, strict=True)]

    def meet(self) -> None:
        """Wait until every rank has come here."""
        self.gather(torch.zeros(1))

    def _all_reduce(self, tensor: torch.Tensor) -> None:
        """Add `tensor` up over all ranks of the default process group, in place."""
        dist.all_reduce(tensor)

    def _start_staged(self, message: Message, staging: HostStaging) -> Work:
        """Start one message by way of host memory: what is sent begins once it has left the device."""
        if message.is_send:
            return self._post(message, *staging.leave(message.tensor))
        return staging.land(message.tensor, lambda host: self._post(message, host), self.account.clock)

    def _post(
        self, message: Message, host: torch.Tensor, ready: Callable[[], None] = lambda: None
    ) -> Posted[Message]:
        """Hand over a message that is in host memory once `ready` has returned."""

        def start(one: Message) -> dist.Work:
            ready()
            return self.start_one(one)

        (posted,) = self._poster.post([replace(message, tensor=host)], start)
        return posted


def exchange_of(spec: WorkerSpec, device: torch.device) -> Exchange:
    """Return the exchange of the rank of `spec`, which computes on `device`: direct, or by host memory."""
    clusters = spec.plan.rank_clusters
    if spec.backend in HOST_BACKENDS:
        staging = None if device.type == "cpu" else HostStaging(DeviceCopies(device))
        return Exchange(clusters, spec.rank, staging=staging)
    settle = partial(synchronize, device)
    return Exchange(clusters, spec.rank, together=True, device=device, settle=settle)
