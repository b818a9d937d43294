"""`Composition`: which way a sum of a group that spans clusters takes; equal at all its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from isthmus.comm.group.reduce_operation import ReduceOperation
from isthmus.comm.group.vendors.vendor import Vendor


class SumPath(Enum):
    """The ways of a sum: by steps over the transport, by one rank of each cluster, or in chunks by all ranks."""

    STEPS = "steps"
    SHORT = "short"
    CHUNKS = "chunks"


@dataclass(frozen=True)
class Composition:
    """The limits, in bytes of the tensor, and the dtypes and operations that all libraries of the group have."""

    short_bytes: int
    chunk_bytes: int
    dtypes: frozenset[torch.dtype]
    operations: frozenset[str]

    def path(self, num_bytes: int, dtype: torch.dtype, operation: ReduceOperation, num_clusters: int) -> SumPath:
        """Return the way of a sum of `num_bytes`.

        The short way is for sums of two clusters: among more, it gives no order of additions that is equal in all.
        """
        if not self.sums(dtype, operation):
            return SumPath.STEPS
        if num_bytes <= self.short_bytes and num_clusters == 2 and operation.adds:
            return SumPath.SHORT
        return SumPath.CHUNKS if num_bytes > self.chunk_bytes else SumPath.STEPS

    def sums(self, dtype: torch.dtype, operation: ReduceOperation) -> bool:
        """Return whether all libraries have `operation` for `dtype`."""
        return dtype in self.dtypes and operation.name in self.operations


def agree(vendors: Sequence[Mapping[str, Vendor]], clusters: Sequence[str]) -> Composition | None:
    """Return the composition of a group; `vendors[r]` are those of rank `r`, by type of device.

    The limits are those of the accelerators' libraries, if there are any. None if the ranks of a cluster have no
    library in common.
    """
    used: list[Vendor] = []
    for cluster in set(clusters):
        near = [of for of, name in zip(vendors, clusters, strict=True) if name == cluster]
        common = set.intersection(*({one.name for one in of.values()} for of in near))
        if len(near) > 1 and not common:
            return None
        used += [one for one in near[0].values() if one.name in common]
    if not used:
        return None
    limiting = [one for one in used if one.device_type != "cpu"] or used
    return Composition(
        min(one.short_bytes for one in limiting),
        min(one.chunk_bytes for one in limiting),
        frozenset.intersection(*(one.dtypes for one in used)),
        frozenset.intersection(*(frozenset(one.operations) for one in used)),
    )
