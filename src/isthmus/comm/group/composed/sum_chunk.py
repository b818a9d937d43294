"""`SumChunk`: a chunk of a sum over clusters, and what every chunk of a composed collective does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch

from isthmus.comm.group.composed.shares import share
from isthmus.comm.group.reduce_operation import ReduceOperation
from isthmus.comm.group.run_program import run_program
from isthmus.comm.group.transport_messages import TransportMessages
from isthmus.comm.group.vendors.device_memory import DeviceMemory, HostMemory
from isthmus.comm.group.vendors.vendor_group import VendorGroup
from isthmus.strategies import RankProgram


@dataclass(frozen=True)
class ComposedCall:
    """One collective: `flat` [N] is memory of this rank on the device of `library`, the group of its cluster.

    `prepare` waits until the inputs have their values, `finish` is called when the results are there.
    """

    label: str
    flat: torch.Tensor
    # None in a cluster with one rank of the group.
    library: VendorGroup | None
    memory: DeviceMemory
    mark: Any
    prepare: Callable[[], None]
    finish: Callable[[], None]

    @classmethod
    def of(
        cls,
        label: str,
        flat: torch.Tensor,
        library: VendorGroup | None,
        prepare: Callable[[], None],
        finish: Callable[[], None],
    ) -> ComposedCall:
        """Return a call behind the work that the calling thread has queued on the device of `flat` [N]."""
        memory: DeviceMemory = HostMemory() if library is None else library.vendor.memory
        return cls(label, flat, library, memory, memory.record(flat.device), prepare, finish)


class ComposedChunk(Protocol):
    """A part of a collective: the library, messages between clusters, the library."""

    def begin(self, limit_s: float) -> None:
        """Call the library inside the cluster, and begin to copy what crosses the network to host memory."""
        ...

    def exchange(self, program: RankProgram, messages: TransportMessages) -> None:
        """Exchange with ranks of other clusters; in any thread."""
        ...

    def end(self, limit_s: float) -> None:
        """Call the library with what has arrived, and store the results."""
        ...


class SumChunk:
    """Elements `[start, stop)` of a sum, of which rank `place` of the `size` of its cluster leads a share."""

    def __init__(
        self, call: ComposedCall, operation: ReduceOperation, place: int, size: int, start: int, stop: int
    ) -> None:
        self._call, self._operation, self._values = call, operation, call.flat[start:stop]
        self._span = share(stop - start, size, place)
        self._padded = self._values
        if (stop - start) % size:
            self._padded = call.flat.new_zeros(-(-(stop - start) // size) * size)
            self._padded[: stop - start] = self._values
        self._share = self._padded if size == 1 else self._padded.new_empty(self._padded.numel() // size)
        self._host, self._wait = self._share, _nothing

    def begin(self, limit_s: float) -> None:
        """Reduce the chunk inside the cluster, and begin to copy this rank's share to host memory."""
        library = self._call.library
        if library is not None:
            work = library.reduce_scatter_flat(self._share, self._padded, self._operation)
            work.wait(timedelta(seconds=limit_s))
        self._host, self._wait = self._call.memory.to_host(self._share)

    def exchange(self, program: RankProgram, messages: TransportMessages) -> None:
        """Exchange the share with the ranks of other clusters that lead its elements; in any thread."""
        self._wait()
        first, last = self._span
        block = [(first, self._host[: last - first])]
        run_program(program, block, block, self._operation.combine, messages)

    def end(self, limit_s: float) -> None:
        """Store the sums of all shares."""
        self._call.memory.to_device(self._host, self._share)
        if self._call.library is not None:
            work = self._call.library.all_gather_flat(self._padded, self._share)
            work.wait(timedelta(seconds=limit_s))
        if self._padded.data_ptr() != self._values.data_ptr():
            self._values.copy_(self._padded[: self._values.numel()])


def _nothing() -> None:
    pass
