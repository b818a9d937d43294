"""`GLOO`: the library for CPUs, which every build of torch has."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from isthmus.comm.group.vendors.device_memory import HostMemory
from isthmus.comm.group.vendors.vendor import Vendor

_NEVER_SENT_TAG = 2**31 - 1
"""Tag of a message that is never sent."""


def gloo_group(store: dist.Store, rank: int, size: int, host: str, timeout: timedelta) -> dist.ProcessGroupGloo:
    """Return the gloo group of `size` ranks that meet at `store`; this rank listens at its address `host`."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


def break_gloo_group(group: dist.ProcessGroupGloo, rank: int, size: int) -> None:
    """Make operations that wait in `group` fail: gloo does not see losses outside the group.

    The only way to break a gloo group is a receive that times out. A receive from a lost rank fails without
    breaking the group, so each other rank is tried.
    """
    for other in range(size):
        if other != rank:
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], other, _NEVER_SENT_TAG).wait(timedelta(milliseconds=1))


GLOO = Vendor(
    name="gloo",
    device_type="cpu",
    is_available=dist.is_gloo_available,
    create=gloo_group,
    abort=break_gloo_group,
    memory=HostMemory(),
    short_bytes=0,
    chunk_bytes=2**24,
)
