"""`StageGroup`: the process group of ranks that share a stage; its waits are marked and timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from isthmus.comm.group.group_work import gloo_error_text
from isthmus.core.errors import PeerError
from isthmus.train.communication.device_exchange import DeviceExchange
from isthmus.train.communication.pinned_memory import copy_tensors_to_host
from isthmus.train.liveness.peer_wait import waiting_for_peer


class StageGroup:
    """The group of `size` ranks that share what `kind` names, such as "tensor-parallel"; usable after `join`.

    All ranks start the same operations in the same order. `waited_s` is the total time of timed waits, on `clock`.
    """

    def __init__(self, kind: str, size: int, clock: Callable[[], float]) -> None:
        self.size, self._kind, self._clock = size, kind, clock
        self.waited_s = 0.0
        self._group: dist.ProcessGroup | None = None
        self._on_host = True
        self._devices: DeviceExchange | None = None

    def join(self, group: dist.ProcessGroup, *, on_host: bool = True, devices: DeviceExchange | None = None) -> None:
        """Use `group`, which has the ranks in order; `on_host` if it supports host memory only.

        Messages of tensors on a device go by `devices`, if there are any.
        """
        self._group, self._on_host, self._devices = group, on_host, devices

    def _devices_for(self, tensors: Sequence[torch.Tensor]) -> DeviceExchange | None:
        """Return what carries messages of `tensors`, of any shape, from device to device; None if nothing does."""
        devices = self._devices
        return devices if devices is not None and all(map(devices.takes, tensors)) else None

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of `tensor` (of any shape) over all ranks, bit-identical on each."""
        return self._all_reduce(tensor, dist.ReduceOp.SUM)

    def _all_reduce(self, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        if self.size == 1:
            return tensor
        result = (
            copy_tensors_to_host([tensor])[0]
            if self._is_staged(tensor)
            else tensor.clone(memory_format=torch.contiguous_format)
        )
        options = dist.AllreduceOptions()
        options.reduceOp = op
        with self._timed():
            self._joined_group().allreduce([result], options).wait()
        return result.to(tensor.device, non_blocking=True)

    def _is_staged(self, tensor: torch.Tensor) -> bool:
        """Return whether the group carries `tensor`, of any shape, in host memory only and it lies elsewhere."""
        return self._on_host and tensor.device.type != "cpu"

    def _joined_group(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError(f"the {self._kind} group is used before `join`")
        return self._group

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Add the time of the block to `waited_s`; else as `_waiting`."""
        start_s = self._clock()
        with self._waiting():
            yield
        self.waited_s += self._clock() - start_s

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Mark the thread as waiting for a peer; raise `PeerError` for an error of the process group."""
        try:
            with waiting_for_peer():
                yield
        except RuntimeError as error:
            raise PeerError(
                f"lost a rank of the {self._kind} group of this stage: {gloo_error_text(error) or error}",
                hint="see its log for the cause; the job restarts automatically",
            ) from error
