"""A stand-in for a device that executes behind the host: it notes where the host waits for a result."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.train.storage_keys import storage_key

READS = frozenset(
    getattr(torch.ops.aten, name).default for name in ("_local_scalar_dense", "nonzero", "equal", "is_nonzero")
)
"""Operations whose result the host, or the shape of what it queues next, depends on."""

EXECUTION_S = 1e-3


class AsynchronousDevice(TorchDispatchMode):
    """The stream of a device, and its timeline; what is computed counts as queued until the host waits.

    `waits` lists the operations by which the host waited.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_queued = self.num_executed = 0
        self.waits: list[str] = []
        self._queued: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Execute an operation; note a wait if it reads what is queued."""
        if func in READS and any(_storage(one) in self._queued for one in tree_leaves(args)):
            self._wait(str(func))
        result = func(*args, **(kwargs or {}))
        self.num_queued += 1
        self._queued.update(_storage(one) for one in tree_leaves(result) if isinstance(one, torch.Tensor))
        return result

    def record(self) -> int:
        """Return how many operations are queued before the mark."""
        return self.num_queued

    def elapsed_s(self, start: int, end: int) -> float | None:
        """Return the time of the operations between two marks, once the host has waited for them."""
        return (end - start) * EXECUTION_S if end <= self.num_executed else None

    def read(self, values: torch.Tensor) -> list[float]:
        """Return `values` [n]."""
        self._wait("read")
        return [float(one) for one in values.tolist()]

    def _wait(self, name: str) -> None:
        self.waits.append(name)
        self.num_executed = self.num_queued
        self._queued.clear()


def _storage(value: Any) -> int:
    return storage_key(value.untyped_storage()) if isinstance(value, torch.Tensor) else 0
