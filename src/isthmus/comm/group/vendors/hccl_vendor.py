"""`HCCL`: Huawei's library for Ascend chips, which the extension torch_npu adds to torch."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from isthmus.comm.group.vendors.device_memory import AcceleratorMemory
from isthmus.comm.group.vendors.vendor import Vendor

_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int32, torch.int64})
"""Dtypes that HCCL sums."""


def _is_available() -> bool:
    try:
        import torch_npu
    except ImportError:
        return False
    return bool(torch_npu.npu.is_available())


def _create(store: dist.Store, rank: int, size: int, host: str, timeout: timedelta) -> Any:
    del host  # HCCL finds its interfaces itself
    from torch_npu._C._distributed_c10d import ProcessGroupHCCL

    options = ProcessGroupHCCL.Options()
    options._timeout = timeout
    return ProcessGroupHCCL(store, rank, size, options)


def _abort(backend: Any, rank: int, size: int) -> None:
    del rank, size
    backend.abort_hccl_comm("a collective failed")


HCCL = Vendor(
    name="hccl",
    device_type="npu",
    is_available=_is_available,
    create=_create,
    abort=_abort,
    memory=AcceleratorMemory(),
    dtypes=_DTYPES,
)
