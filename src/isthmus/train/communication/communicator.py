"""`Communicator`: point-to-point messages and small collectives of one rank, with timing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
import torch.distributed as dist

from isthmus.comm.group.collective_work import CollectiveWork
from isthmus.comm.group.composed.device_messages import DeviceSend
from isthmus.comm.group.group_work import SendWork
from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.comm.group.passing.passing_sums import PassingSums
from isthmus.comm.group.reduce_operation import ReduceOperation
from isthmus.comm.group.run_program import Codec
from isthmus.core.errors import ProtocolError
from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.strategies import RankProgram
from isthmus.train.communication.host_staging import CudaCopyEngine, HostStaging, StagedReceive
from isthmus.train.communication.send_thread import PendingWork, SendThread, unwrap_work
from isthmus.train.communication.step_metrics import StepTimer
from isthmus.train.communication.torch_device import HOST_BACKENDS
from isthmus.train.communication.torch_process_group import GROUP_TIMEOUT
from isthmus.train.liveness.peer_wait import waiting_for_peer

MAX_GATHERED_BYTES = 256 << 20
"""Largest message of a rank that all ranks gather."""

CommWork: TypeAlias = "dist.Work | StagedReceive | PendingWork[TensorMessage]"


@dataclass(frozen=True)
class TensorMessage:
    """A contiguous tensor to send to or receive from a peer; unchanged until the wait returns."""

    tensor: torch.Tensor
    # Global rank of the other side.
    peer: int
    tag: int
    is_send: bool
    # For the timeline: `forward`, `backward` or `reduce`, and the micro-batch (-1: none).
    kind: str = "reduce"
    micro_batch: int = -1


class Communicator:
    """Messages between ranks of the default process group; `clusters[r]` is the cluster of rank `r`.

    A send thread starts messages; `wait` completes them. With `staging`, tensors go through host memory, but for those
    that the library of the ranks' cluster carries from device to device (`IsthmusGroup.device_messages`).
    `batched` starts messages in the calling thread with one `batch_isend_irecv`, which device backends such
    as NCCL need when two ranks send to each other. `device` holds the tensors of collectives. `timer` times the
    current step. A `checkpoint_requested` set on one rank reaches all ranks in the next `sum_over_all`, as
    `any_requested`.
    """

    def __init__(
        self,
        clusters: Sequence[str],
        rank: int,
        *,
        staging: HostStaging | None = None,
        batched: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.clusters = tuple(clusters)
        self._is_remote = [cluster != clusters[rank] for cluster in clusters]
        self._staging, self._batched, self._device = staging, batched, device
        self._send_thread: SendThread[TensorMessage] = SendThread()
        self.timer = StepTimer()
        self.checkpoint_requested = self.any_requested = False

    def start(self, messages: Sequence[TensorMessage]) -> list[CommWork]:
        """Start `messages`; return one work handle per message."""
        start_s = self.timer.clock()
        works = self._start(messages)
        self.timer.calls_s += self.timer.clock() - start_s
        return works

    def _start(self, messages: Sequence[TensorMessage]) -> list[CommWork]:
        wan_bytes = sum(one.tensor.nbytes for one in messages if one.is_send and self._is_remote[one.peer])
        self.timer.wan_bytes += wan_bytes
        if self._staging is not None:
            return [self._start_on_device(one, self._staging) for one in messages]
        if not self._batched:
            return [*self._send_thread.submit(messages, self.start_message)] if messages else []
        operations = [
            dist.P2POp(dist.isend if one.is_send else dist.irecv, one.tensor, one.peer, tag=one.tag) for one in messages
        ]
        with waiting_for_peer():
            works = dist.batch_isend_irecv(operations)
        return works if len(works) == len(messages) else [works[0]] * len(messages)

    def drain(self) -> None:
        """Wait until all queued messages have started, so that none starts in the next group."""
        with waiting_for_peer():
            self._send_thread.drain()

    def start_message(self, message: TensorMessage) -> dist.Work:
        """Start one message in the default process group; return its work handle."""
        if message.is_send:
            return dist.isend(message.tensor, message.peer, tag=message.tag)
        return dist.irecv(message.tensor, message.peer, tag=message.tag)

    def wait(self, work: CommWork, *, until_delivered: bool = False) -> None:
        """Wait for a message; raises `PeerError` if the peer is lost.

        For a send to another cluster or from device to device the call returns at once: the tensor is kept until the
        peer acknowledges it, or the device has read it, and senders never modify a sent tensor. With `until_delivered`
        it waits for that, after which the tensor's memory is free.
        """
        with waiting_for_peer():
            self._wait(work, until_delivered=until_delivered)

    def _wait(self, work: CommWork, *, until_delivered: bool) -> None:
        timer = self.timer
        start_s, completed = timer.clock(), work.is_completed()
        started = unwrap_work(work)
        is_under_way = isinstance(started, DeviceSend) or (isinstance(started, SendWork) and not work.is_completed())
        if is_under_way and not until_delivered:
            timer.calls_s += timer.clock() - start_s
            return
        completed = completed or (isinstance(work, PendingWork) and work.message.is_send)
        work.wait()
        end_s = timer.clock()
        timer.add_wait(start_s, end_s, getattr(work, "under_way", None))
        self._record(getattr(work, "received_work", work))
        timer.calls_s += end_s - start_s if completed else 0.0

    def _record(self, work: object) -> None:
        """Record a received message from another cluster, if the transport reports its times."""
        if not isinstance(work, PendingWork) or work.arrival is None:
            return
        message: TensorMessage = work.message
        if self._is_remote[message.peer] and not message.is_send:
            self.timer.add_message(message.kind, message.micro_batch, message.peer, message.tensor.nbytes, work.arrival)

    @property
    def isthmus_group(self) -> IsthmusGroup | None:
        """The group of all ranks, if it is one of Isthmus."""
        group = dist.group.WORLD
        return group if isinstance(group, IsthmusGroup) else None

    def make_group(self, ranks: Sequence[int]) -> IsthmusGroup | None:
        """Return a group of `ranks` of the isthmus group, None for other ranks; all ranks call this in one order.

        Raises `PeerError` if a rank does not join.
        """
        group = dist.new_group(list(ranks), timeout=GROUP_TIMEOUT)
        return group if isinstance(group, IsthmusGroup) else None

    def execute(
        self,
        number: int,
        program: RankProgram,
        inputs: Sequence[tuple[int, torch.Tensor]],
        outputs: Sequence[tuple[int, torch.Tensor]],
        wan_bytes: int,
        codec: Codec | None = None,
    ) -> CollectiveWork:
        """Start `program`, a sum of flat tensors [N] that sends `wan_bytes` to other clusters, as number `number`.

        See `IsthmusGroup.execute`; complete it by `wait_program`.
        """
        group = self.isthmus_group
        if group is None:
            raise RuntimeError("programs of steps need the isthmus process group")
        start_s = self.timer.clock()
        self.timer.wan_bytes += wan_bytes
        label = "sum of gradients" if codec is None else f"sum of gradients in {codec.name}"
        work = group.execute(number, label, program, inputs, outputs, torch.add, codec)
        self.timer.calls_s += self.timer.clock() - start_s
        return work

    def sum_by_switches(self, sums: PassingSums, values: torch.Tensor, number: int) -> CollectiveWork:
        """Start a sum of `values` [N], in place, over the ranks of `sums`; `number` is the first of those it uses.

        Complete it by `wait_program`.
        """
        start_s = self.timer.clock()
        self.timer.wan_bytes += sums.sent_bytes(values.numel())
        work = sums.all_reduce(values, ReduceOperation.of(dist.ReduceOp.SUM), sequence=number)
        self.timer.calls_s += self.timer.clock() - start_s
        return work

    def wait_program(self, work: CollectiveWork) -> None:
        """Wait for a work of `execute`; raises `PeerError` if a peer is lost."""
        start_s, completed = self.timer.clock(), work.is_completed()
        with waiting_for_peer():
            work.wait()
        remote = [one for one in work.arrived if self._is_remote[one.source]]
        times = [one.arrival for one in remote]
        under_way = (min(one.sent_s for one in times), max(one.arrived_s for one in times)) if times else None
        end_s = self.timer.clock()
        self.timer.add_wait(start_s, end_s, under_way)
        for one in remote:
            self.timer.add_message("reduce", -1, one.source, one.num_bytes, one.arrival)
        self.timer.calls_s += end_s - start_s if completed else 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as idle time in which this rank waits for its peers."""
        start_s = self.timer.clock()
        with waiting_for_peer():
            yield
        self.timer.add_wait(start_s, self.timer.clock(), None)

    def sum_over_all(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` [n] (float64) over all ranks; the time counts as idle.

        The same message sums `checkpoint_requested`, so that all ranks set `any_requested` in the same step.
        """
        total = torch.cat([values, values.new_tensor([float(self.checkpoint_requested)])]).to(self._device)
        with self.waiting():
            self._all_reduce(total)
            any_requested = bool(total[-1].item() > 0)
        self.any_requested = any_requested
        return total[:-1].cpu()

    def broadcast_from_first(self, numbers: Sequence[int]) -> list[int]:
        """Return the `numbers` of rank 0 on every rank; all ranks pass equally many."""
        values = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        with waiting_for_peer():
            dist.broadcast(values, 0)
            return [int(one) for one in values.tolist()]

    def broadcast_bytes_from_first(self, data: bytes | None) -> bytes:
        """Return the bytes of rank 0 on every rank; other ranks pass None.

        Raises `ProtocolError` if rank 0 announces more than `MAX_GATHERED_BYTES`.
        """
        (length,) = self.broadcast_from_first([0 if data is None else len(data)])
        if not 0 <= length <= MAX_GATHERED_BYTES:
            raise ProtocolError(f"rank 0 announces a message of {length} bytes, {MAX_GATHERED_BYTES} at most")
        values = torch.frombuffer(bytearray(data or bytes(length)) or bytearray(1), dtype=torch.uint8).to(self._device)
        with waiting_for_peer():
            dist.broadcast(values, 0)
        return bytes(values[:length].cpu().numpy().tobytes())

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return `tensor` of every rank, by rank, on the CPU; all have one shape."""
        local = tensor.to(self._device)
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        with waiting_for_peer():
            dist.all_gather(parts, local)
            return [part.cpu() for part in parts]

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, by rank; lengths may differ.

        Raises `ProtocolError` if a rank announces more than `MAX_GATHERED_BYTES`.
        """
        lengths = [int(one) for one in self.all_gather(torch.tensor([len(data)], dtype=torch.int64))]
        for rank, length in enumerate(lengths):
            if not 0 <= length <= MAX_GATHERED_BYTES:
                raise ProtocolError(f"rank {rank} announces a message of {length} bytes, {MAX_GATHERED_BYTES} at most")
        padded = torch.zeros(max(*lengths, 1), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else padded[:0]
        parts = self.all_gather(padded)
        return [part[:length].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.all_gather(torch.zeros(1))

    def _all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` over all ranks of the default process group, in place."""
        dist.all_reduce(tensor)

    def _start_on_device(self, message: TensorMessage, staging: HostStaging) -> CommWork:
        """Start one message of a device, inside the cluster by its library."""
        group = self.isthmus_group
        near = group.device_messages if group is not None else None
        if near is None or not near.carries(message.peer, message.tensor):
            return self._start_staged(message, staging)
        after = near.memory.record(message.tensor.device)

        def start(one: TensorMessage) -> dist.Work:
            begin: Callable[..., dist.Work] = near.send if one.is_send else near.receive
            return begin(one.tensor, one.peer, one.tag, after, one.kind)

        (posted,) = self._send_thread.submit([message], start)
        return posted

    def _start_staged(self, message: TensorMessage, staging: HostStaging) -> CommWork:
        """Start one message through host memory; a send starts once its copy to the host is complete."""
        if message.is_send:
            return self._submit(message, *staging.copy_to_host(message.tensor))
        return staging.receive_to_device(message.tensor, lambda host: self._submit(message, host), self.timer.clock)

    def _submit(
        self, message: TensorMessage, host: torch.Tensor, wait_for_copy: Callable[[], None] = lambda: None
    ) -> PendingWork[TensorMessage]:
        """Queue a message in host memory; the send thread calls `wait_for_copy` before it starts the message."""

        def start(one: TensorMessage) -> dist.Work:
            wait_for_copy()
            return self.start_message(one)

        (posted,) = self._send_thread.submit([replace(message, tensor=host)], start)
        return posted


def make_communicator(spec: WorkerSpec, device: torch.device) -> Communicator:
    """Return the communicator of the rank of `spec` on `device`: direct, or staged through host memory."""
    clusters = spec.plan.rank_clusters
    if spec.backend in HOST_BACKENDS:
        staging = None if device.type == "cpu" else HostStaging(CudaCopyEngine(device))
        return Communicator(clusters, spec.rank, staging=staging)
    return Communicator(clusters, spec.rank, batched=True, device=device)
