"""`MPI`: the MPI library of a site, in builds of torch with MPI, for processes that `mpirun` has started."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from isthmus.comm.group.vendors.device_memory import HostMemory
from isthmus.comm.group.vendors.vendor import Vendor
from isthmus.core.errors import PlanError

_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
"""Variables by which MPI libraries give a process its rank; the first one that is set counts."""


def _rank() -> int | None:
    return next((int(os.environ[name]) for name in _RANKS if name in os.environ), None)


def _is_available() -> bool:
    return bool(dist.is_mpi_available()) and _rank() is not None


def _create(store: dist.Store, rank: int, size: int, host: str, timeout: timedelta) -> Any:
    del host, timeout  # MPI has its own network, and no time-outs
    store.set(f"mpi/{rank}", str(_rank()))
    ranks = [int(store.get(f"mpi/{one}")) for one in range(size)]
    backend = dist.ProcessGroupMPI.create(ranks)
    if backend is None or (backend.rank(), backend.size()) != (rank, size):
        raise PlanError(
            f"MPI numbers these {size} processes {ranks}, which is another order",
            hint="start the ranks of a cluster in their order with one mpirun",
        )
    return backend


def _abort(backend: Any, rank: int, size: int) -> None:
    """Do nothing: MPI ends all processes of a run when one is lost."""
    del backend, rank, size


MPI = Vendor(
    name="mpi",
    device_type="cpu",
    is_available=_is_available,
    create=_create,
    abort=_abort,
    memory=HostMemory(),
    short_bytes=0,
    chunk_bytes=2**24,
)
