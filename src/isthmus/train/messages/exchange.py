"""`Exchange`: point-to-point messages and small collectives of one rank, with timing."""

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
    """A contiguous tensor to send to or receive from a peer; unchanged until the wait returns."""

    tensor: torch.Tensor
    # Global rank of the other side.
    peer: int
    tag: int
    is_send: bool


class Exchange:
    """Messages between ranks of the default process group; `clusters[r]` is the cluster of rank `r`.

    A send thread starts messages; `wait` completes them. With `staging`, tensors go through host memory.
    `together` starts messages in the calling thread with one `batch_isend_irecv`, which device backends such
    as NCCL need when two ranks send to each other. `device` holds the tensors of collectives. `settle` waits
    until the device has executed a completed receive. `account` times the current step. A `wish` set on one
    rank reaches all ranks in the next `sum_over_all`, as `wished`.
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
        """Start `messages`; return one work handle per message."""
        start_s = self.account.clock()
        works = self._start(messages)
        self.account.calls_s += self.account.clock() - start_s
        return works

    def _start(self, messages: Sequence[Message]) -> list[Work]:
        wan_bytes = sum(one.tensor.nbytes for one in messages if one.is_send and self._far[one.peer])
        self.account.wan_bytes += wan_bytes
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
        """Wait until all queued messages have started, so that none starts in the next group."""
        self._poster.drain()

    def start_one(self, message: Message) -> dist.Work:
        """Start one message in the default process group; return its work handle."""
        if message.is_send:
            return dist.isend(message.tensor, message.peer, tag=message.tag)
        return dist.irecv(message.tensor, message.peer, tag=message.tag)

    def wait(self, work: Work, *, arrived: bool = False) -> None:
        """Wait for a message; raises `PeerError` if the peer is lost.

        For a send to another cluster the call returns at once: the transport keeps the tensor until the peer
        acknowledges it, and senders never modify a sent tensor. With `arrived` it waits for the
        acknowledgement, after which the tensor's memory is free.
        """
        timer = self.account
        start_s, completed = timer.clock(), work.is_completed()
        if isinstance(begun(work), SendWork) and not (arrived or work.is_completed()):
            timer.calls_s += timer.clock() - start_s
            return
        completed = completed or (isinstance(work, Posted) and work.message.is_send)
        work.wait()
        self._settle()
        end_s = timer.clock()
        timer.waited(start_s, end_s, getattr(work, "under_way", None))
        timer.calls_s += end_s - start_s if completed else 0.0

    def sum_over_all(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` [n] (float64) over all ranks; the time counts as idle.

        The same message sums `wish`, so that all ranks set `wished` in the same step.
        """
        total = torch.cat([values, values.new_tensor([float(self.wish)])]).to(self._device)
        start_s = self.account.clock()
        self._all_reduce(total)
        self.account.waited(start_s, self.account.clock(), None)
        self.wished = bool(total[-1].item() > 0)
        return total[:-1].cpu()

    def from_first(self, numbers: Sequence[int]) -> list[int]:
        """Return the `numbers` of rank 0 on every rank; all ranks pass equally many."""
        values = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        dist.broadcast(values, 0)
        return [int(one) for one in values.tolist()]

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return `tensor` of every rank, by rank, on the CPU; all have one shape."""
        local = tensor.to(self._device)
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, local)
        return [part.cpu() for part in parts]

    def tell_all(self, told: bytes) -> list[bytes]:
        """Return the bytes of every rank, by rank; lengths may differ."""
        lengths = [int(one) for one in self.gather(torch.tensor([len(told)], dtype=torch.int64))]
        padded = torch.zeros(max(*lengths, 1), dtype=torch.uint8)
        padded[: len(told)] = torch.frombuffer(bytearray(told), dtype=torch.uint8) if told else padded[:0]
        parts = self.gather(padded)
        return [bytes(part[:length].tolist()) for part, length in zip(parts, lengths, strict=True)]

    def meet(self) -> None:
        """Wait until every rank has called this."""
        self.gather(torch.zeros(1))

    def _all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` over all ranks of the default process group, in place."""
        dist.all_reduce(tensor)

    def _start_staged(self, message: Message, staging: HostStaging) -> Work:
        """Start one message through host memory; a send starts once its copy to the host is complete."""
        if message.is_send:
            return self._post(message, *staging.leave(message.tensor))
        return staging.land(message.tensor, lambda host: self._post(message, host), self.account.clock)

    def _post(
        self, message: Message, host: torch.Tensor, ready: Callable[[], None] = lambda: None
    ) -> Posted[Message]:
        """Queue a message in host memory; the send thread calls `ready` before it starts the message."""

        def start(one: Message) -> dist.Work:
            ready()
            return self.start_one(one)

        (posted,) = self._poster.post([replace(message, tensor=host)], start)
        return posted


def exchange_of(spec: WorkerSpec, device: torch.device) -> Exchange:
    """Return the communicator of the rank of `spec` on `device`: direct, or staged through host memory."""
    clusters = spec.plan.rank_clusters
    if spec.backend in HOST_BACKENDS:
        staging = None if device.type == "cpu" else HostStaging(DeviceCopies(device))
        return Exchange(clusters, spec.rank, staging=staging)
    settle = partial(synchronize, device)
    return Exchange(clusters, spec.rank, together=True, device=device, settle=settle)
