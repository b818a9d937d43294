"""Groups of threads whose CPU tensors count as tensors of a device, which a fake library carries inside clusters."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch.distributed as dist

from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.comm.group.vendors.delayed_memory import DelayedMemory
from isthmus.comm.group.vendors.memory_vendor import memory_vendor
from isthmus.comm.group.vendors.vendor import Vendor
from isthmus.comm.group.vendors.vendor_group import VendorGroup
from isthmus.comm.transport.memory_transport import MemoryTransport, memory_transports
from isthmus.comm.transport.transport import Transport

DEVICE = "fake"
LIMIT = timedelta(seconds=30)


def fake_device() -> tuple[Vendor, DelayedMemory]:
    """Return the library of the device, and its memory, which counts copies to and from the host."""
    vendor = memory_vendor(device_type=DEVICE)
    assert isinstance(vendor.memory, DelayedMemory)
    return vendor, vendor.memory


def device_groups(clusters: Sequence[str], vendor: Vendor, transports: Sequence[Transport] = ()) -> list[IsthmusGroup]:
    """Return the group of each rank, all of whose tensors are on the device."""
    stores = {one: dist.HashStore() for one in clusters}

    def make(transport: MemoryTransport) -> IsthmusGroup:
        own = clusters[transport.rank]
        near = [rank for rank, cluster in enumerate(clusters) if cluster == own]
        place, libraries = near.index(transport.rank), {}
        if len(near) > 1:
            backend, up, down = (
                vendor.create(dist.PrefixStore(name, stores[own]), place, len(near), "", LIMIT)
                for name in ("all", "up", "down")
            )
            libraries[DEVICE] = VendorGroup(vendor, backend, place, len(near), (up, down))
            transport.add_loss_callback(libraries[DEVICE].abort)
        return IsthmusGroup(
            transport, list(clusters), libraries, devices=[DEVICE] * len(clusters), names_sources=True, timeout=LIMIT
        )

    made = list(transports) or memory_transports(len(clusters))
    with ThreadPoolExecutor(len(clusters)) as pool:
        return list(pool.map(make, made))
