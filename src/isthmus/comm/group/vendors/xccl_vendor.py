"""`XCCL`: Intel's library for its GPUs, in builds of torch for XPU."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from isthmus.comm.group.vendors.device_memory import AcceleratorMemory
from isthmus.comm.group.vendors.vendor import Vendor


def _is_available() -> bool:
    return bool(dist.is_xccl_available()) and torch.xpu.is_available()


def _create(store: dist.Store, rank: int, size: int, host: str, timeout: timedelta) -> Any:
    del host  # the library finds its interfaces itself
    options = dist.ProcessGroupXCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupXCCL(store, rank, size, options)


def _abort(backend: Any, rank: int, size: int) -> None:
    del rank, size
    backend.abort()


XCCL = Vendor(
    name="xccl",
    device_type="xpu",
    is_available=_is_available,
    create=_create,
    abort=_abort,
    memory=AcceleratorMemory(),
)
