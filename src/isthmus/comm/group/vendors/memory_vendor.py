"""`memory_vendor`: an in-process fake of a vendor, whose device is the CPU with memory of its own, for tests.

Its ranks are threads. Copies to host memory arrive when they are waited for, and not before, as on a device; so do
messages between ranks, which are received in the order in which they were sent, whatever their tags.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from isthmus.comm.group.reduce_operation import ReduceOperation
from isthmus.comm.group.vendors.delayed_memory import DelayedMemory, LateWork
from isthmus.comm.group.vendors.vendor import Vendor

LIMIT_S = 30.0
"""Longest wait for the other ranks."""

_POLL_S = 0.05


class _Done(dist.Work):  # type: ignore[misc]
    """An operation that is over."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        del timeout
        return True


@dataclass
class _Sent:
    """A sent tensor, of any shape, which is read as late as it may: until the sender goes on behind its mark."""

    tensor: torch.Tensor

    def settle(self) -> None:
        """Keep the values, which the sender may change from now on."""
        self.tensor = self.tensor.clone()


@dataclass
class _Room:
    """Where the ranks of a group meet, one call after the other; `sent` has the messages of each two ranks."""

    barrier: threading.Barrier
    memory: DelayedMemory
    tensors: dict[int, Sequence[torch.Tensor]] = field(default_factory=dict)
    sent: dict[tuple[int, int], SimpleQueue[_Sent]] = field(default_factory=dict)

    def messages(self, source: int, to: int) -> SimpleQueue[_Sent]:
        """Return the messages between two ranks."""
        return self.sent.setdefault((source, to), SimpleQueue())


class MemoryBackend:
    """Rank `rank` of a fake library's group; every method blocks until all ranks have called it."""

    def __init__(self, room: _Room, rank: int, size: int) -> None:
        self._room, self._rank, self._size = room, rank, size

    def abort(self) -> None:
        """Make all ranks that wait fail."""
        self._room.barrier.abort()

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> _Done:
        """Reduce the only tensor, of any shape, in place."""
        values = self._exchange(tensors)
        tensors[0].copy_(_reduced([one[0] for one in values], options.reduceOp))
        return _Done()

    def reduce(self, tensors: list[torch.Tensor], options: Any) -> _Done:
        """Reduce the only tensor, of any shape, into that of the root; spoil that of the others."""
        values = self._exchange(tensors)
        if self._rank == options.rootRank:
            tensors[0].copy_(_reduced([one[0] for one in values], options.reduceOp))
        else:
            tensors[0].fill_(7)
        return _Done()

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> _Done:
        """Copy the only tensor, of any shape, of the root."""
        tensors[0].copy_(self._exchange(tensors)[options.rootRank][0])
        return _Done()

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> _Done:
        """Fill `outputs[0][r]` with the only input of rank `r`; all have one shape."""
        for output, one in zip(outputs[0], self._exchange(inputs), strict=True):
            output.copy_(one[0])
        return _Done()

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor) -> _Done:
        return self.allgather([list(output.view(-1).chunk(self._size))], [tensor])

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], options: Any) -> _Done:
        """Reduce `inputs[0][r]` into the only output of rank `r`; all have one shape."""
        values = self._exchange(inputs[0])
        outputs[0].copy_(_reduced([one[self._rank] for one in values], options.reduceOp))
        return _Done()

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, options: Any) -> _Done:
        return self.reduce_scatter([output], [list(tensor.view(-1).chunk(self._size))], options)

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> dist.Work:
        """Send the only tensor, of any shape, which the receiver reads as late as it may."""
        del tag
        self._check_intact()
        sent = _Sent(tensors[0].detach())
        self._room.messages(self._rank, to).put(sent)
        return LateWork(self._room.memory, sent.settle)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> dist.Work:
        """Receive into the only tensor, of any shape, which has the values behind a mark after the work's `wait`."""
        del tag
        sent, target = self._next_of(source), tensors[0].detach()
        if (sent.tensor.dtype, sent.tensor.numel()) != (target.dtype, target.numel()):
            raise RuntimeError(f"rank {source} sent {sent.tensor.dtype} [{sent.tensor.numel()}], not {target.dtype}")
        target.fill_(7)
        return LateWork(self._room.memory, lambda: target.copy_(sent.tensor.view(target.shape)))

    def _next_of(self, source: int) -> _Sent:
        """Return the next message of rank `source`, once it is there."""
        end_s = time.monotonic() + LIMIT_S
        while time.monotonic() < end_s:
            self._check_intact()
            with suppress(Empty):
                return self._room.messages(source, self._rank).get(timeout=_POLL_S)
        raise RuntimeError(f"rank {source} sent nothing")

    def _check_intact(self) -> None:
        if self._room.barrier.broken:
            raise RuntimeError("the group is aborted")

    def _exchange(self, tensors: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
        """Return copies of the tensors of every rank, by rank; raises `RuntimeError` if the group is broken."""
        room = self._room
        try:
            room.tensors[self._rank] = [one.clone() for one in tensors]
            room.barrier.wait(LIMIT_S)
            found = [room.tensors[one] for one in range(self._size)]
            room.barrier.wait(LIMIT_S)
        except threading.BrokenBarrierError as error:
            raise RuntimeError("the group is aborted, or a rank did not call") from error
        return found


def memory_vendor(*, short_bytes: int = 2**10, chunk_bytes: int = 2**10, device_type: str = "cpu") -> Vendor:
    """Return a fake vendor for CPU tensors, which count as of `device_type`; ranks are threads that share its store."""
    rooms: dict[str, _Room] = {}
    lock, memory = threading.Lock(), DelayedMemory()

    def create(store: dist.Store, rank: int, size: int, host: str, timeout: timedelta) -> MemoryBackend:
        del host, timeout
        if rank == 0:
            with lock:
                name = f"room {len(rooms)}"
                rooms[name] = _Room(threading.Barrier(size), memory)
            store.set("room", name)
        return MemoryBackend(rooms[store.get("room").decode()], rank, size)

    def abort(backend: MemoryBackend, rank: int, size: int) -> None:
        del rank, size
        backend.abort()

    return Vendor(
        name="memory",
        device_type=device_type,
        is_available=lambda: True,
        create=create,
        abort=abort,
        memory=memory,
        short_bytes=short_bytes,
        chunk_bytes=chunk_bytes,
    )


def _reduced(values: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
    """Return the reduction of tensors of one shape, in the order of ranks."""
    total, combine = values[0], ReduceOperation.of(op).combine
    for one in values[1:]:
        total = combine(total, one)
    return total
