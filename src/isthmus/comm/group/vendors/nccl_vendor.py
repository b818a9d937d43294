"""`NCCL`: NVIDIA's library; AMD's RCCL has the same name in torch's builds for ROCm."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from isthmus.comm.group.vendors.device_memory import AcceleratorMemory
from isthmus.comm.group.vendors.vendor import Vendor


def _is_available() -> bool:
    return bool(dist.is_nccl_available()) and torch.cuda.is_available()


def _create(store: dist.Store, rank: int, size: int, host: str, timeout: timedelta) -> Any:
    del host  # NCCL finds its interfaces itself
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _abort(backend: Any, rank: int, size: int) -> None:
    del rank, size
    backend.abort()


NCCL = Vendor(
    name="nccl",
    device_type="cuda",
    is_available=_is_available,
    create=_create,
    abort=_abort,
    memory=AcceleratorMemory(),
)
