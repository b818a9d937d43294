"""`python -m tests.train.device_supervisor FOLDER`: a rank whose CPU tensors count as tensors of a device.

Gloo stands in for the library of the device: it carries messages from device to device in the order of the calls, and
they arrive as late as they may. All other messages of the stages pass `LateCopies`. The rank leaves a file
`device-messages` once its devices have exchanged one, and `host-copies` once a boundary has passed host memory.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from isthmus.comm.group import create_group
from isthmus.comm.group.create_group import IsthmusOptions
from isthmus.comm.group.vendors import known_vendors
from isthmus.comm.group.vendors.delayed_memory import DelayedMemory, LateWork
from isthmus.comm.group.vendors.gloo_vendor import GLOO, break_gloo_group, gloo_group
from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.train.communication.communicator import Communicator
from isthmus.train.communication.host_staging import HostStaging
from isthmus.train.process import supervisor, trainer
from isthmus.train.recovery import group_membership
from tests.train.device_groups import DEVICE
from tests.train.late_copies import LateCopies

MESSAGES, COPIES = "device-messages", "host-copies"


class NotingMemory(DelayedMemory):
    """Leaves a file for the first message."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def keep(self, tensor: torch.Tensor) -> None:
        super().keep(tensor)
        (self._folder / MESSAGES).touch()


class NotingCopies(LateCopies):
    """Leaves a file for the first copy."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def record_event(self) -> int:
        (self._folder / COPIES).touch()
        return super().record_event()


class GlooDevice:
    """Gloo as a library of a device: what is received is there behind a mark only."""

    def __init__(self, group: dist.ProcessGroupGloo, memory: DelayedMemory) -> None:
        self.group, self._memory = group, memory

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> dist.Work:
        return self.group.send([one.clone() for one in tensors], to, tag)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> dist.Work:
        (target,) = tensors
        values = torch.empty_like(target)
        self.group.recv([values], source, tag).wait()
        target.fill_(7)
        return LateWork(self._memory, lambda: target.copy_(values))


def stand_in(folder: Path) -> None:
    """Give this process a device: its library, what the group is told of it, and copies to the host."""
    memory = NotingMemory(folder)

    def create(store: dist.Store, rank: int, size: int, host: str, timeout: timedelta) -> GlooDevice:
        return GlooDevice(gloo_group(store, rank, size, host, timeout), memory)

    def abort(backend: GlooDevice, rank: int, size: int) -> None:
        break_gloo_group(backend.group, rank, size)

    vendor = replace(GLOO, name="stand-in", device_type=DEVICE, create=create, abort=abort, memory=memory)
    known_vendors.VENDORS = create_group.VENDORS = (*known_vendors.VENDORS, vendor)  # type: ignore[assignment]

    def options(*args: Any, **named: Any) -> IsthmusOptions:
        return IsthmusOptions(*args, **named | {"device": DEVICE})

    def communicator(spec: WorkerSpec, device: torch.device) -> Communicator:
        del device
        return Communicator(spec.plan.rank_clusters, spec.rank, staging=HostStaging(NotingCopies(folder)))

    group_membership.IsthmusOptions = options  # type: ignore[assignment, misc]
    trainer.make_communicator = communicator


def main(arguments: list[str]) -> int:
    """Supervise the rank of the folder; return its exit status."""
    stand_in(Path(arguments[0]))
    return supervisor.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
