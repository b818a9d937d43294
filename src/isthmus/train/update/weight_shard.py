"""`WeightShard`: rows of a parameter that a rank updates, and their fp32 master weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from isthmus.train.communication.pinned_memory import copy_tensors_to_host
from isthmus.train.update.ownership import LocalRows, Ownership


@dataclass(frozen=True)
class WeightShard:
    """Rows of parameter `name` that this rank updates, and their fp32 master weight (a view or a copy)."""

    name: str
    rows: LocalRows
    weight: nn.Parameter

    def view_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return these rows of `tensor`, which has the local shape of the parameter, as a view."""
        return view_rows(tensor, self.rows)

    def is_view_of(self, tensor: torch.Tensor) -> bool:
        """Return whether the weight shares the memory of these rows of `tensor`, of the local shape."""
        return bool(self.view_in(tensor).data_ptr() == self.weight.data_ptr())


def make_weight_shards(
    name: str, parameter: nn.Parameter, ownership: Ownership, *, keeps_fp32: bool, on_host: bool, apart: bool = False
) -> Iterator[WeightShard]:
    """Yield the shards of fp32 parameter `name` that this rank updates.

    With `keeps_fp32` (the model computes in fp32) weights share the parameter's memory if possible, unless they are
    kept `apart`. `on_host` copies them to host memory.
    """
    for rows in ownership.updated_rows.get(name, ()):
        if apart and not on_host:
            copy = view_rows(parameter.detach(), rows).clone(memory_format=torch.contiguous_format)
            yield WeightShard(name, rows, nn.Parameter(copy))
            continue
        yield WeightShard(name, rows, _shard_weight(parameter, rows, keeps_fp32=keeps_fp32, on_host=on_host))


def view_rows(tensor: torch.Tensor, rows: LocalRows) -> torch.Tensor:
    """Return `rows` of a local `tensor`, as a view of shape [..., num_rows, ...] at dimension `rows.dim`."""
    return tensor.narrow(rows.dim, rows.at, rows.num_rows)


def _shard_weight(parameter: nn.Parameter, rows: LocalRows, *, keeps_fp32: bool, on_host: bool) -> nn.Parameter:
    view = view_rows(parameter.detach(), rows)
    if on_host:
        return nn.Parameter(copy_tensors_to_host([view])[0])
    whole = rows.num_rows == parameter.shape[rows.dim]
    if whole and keeps_fp32:
        return parameter
    if whole or (keeps_fp32 and view.is_contiguous()):
        return nn.Parameter(view)
    return nn.Parameter(view.clone(memory_format=torch.contiguous_format))
