"""`Vendor`: one communication library of a chip's maker, and what a process group needs of it.

Source: section 2.3.3 of the report on heterogeneous training, which names three kinds of interface: groups
(`create`, `abort`), collectives (`VendorGroup`), and the memory and streams of the device (`memory`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from isthmus.comm.group.vendors.device_memory import DeviceMemory

COMMON_DTYPES = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64}
)
"""Dtypes that every library sums."""

COMMON_OPERATIONS = ("sum", "average", "max", "min", "product")
"""Reductions that every library has; an average is a sum that the caller divides."""


@dataclass(frozen=True, kw_only=True)
class Vendor:
    """A library for tensors on devices of `device_type`.

    `create` takes store, rank, size, the rank's address inside the cluster and the time-out, and returns torch's
    backend of that group. `abort` takes such a backend and its rank and size, and makes operations that wait in it
    fail. `short_bytes` and `chunk_bytes` say how a group that spans clusters uses the library (`choose_path`).
    """

    name: str
    device_type: str
    is_available: Callable[[], bool]
    create: Callable[[dist.Store, int, int, str, timedelta], Any]
    abort: Callable[[Any, int, int], None]
    memory: DeviceMemory
    dtypes: frozenset[torch.dtype] = COMMON_DTYPES
    operations: tuple[str, ...] = COMMON_OPERATIONS
    short_bytes: int = 2**16
    """Up to this size, a sum of two clusters goes by one rank of each."""
    chunk_bytes: int = 2**16
    """Above this size, the parts inside a cluster go over the library."""
