"""`WeightShare`: rows of a parameter that a rank updates, and their fp32 master weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from isthmus.train.messages.pinned_memory import host_copies
from isthmus.train.update.ownership import Ownership, Rows


@dataclass(frozen=True)
class WeightShare:
    """Rows of parameter `name` that this rank updates, and their fp32 master weight (a view or a copy)."""

    name: str
    rows: Rows
    weight: nn.Parameter

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return these rows of the local `tensor`, as a view."""
        return rows_of(tensor, self.rows)

    def is_in(self, tensor: torch.Tensor) -> bool:
        """Return whether the weight shares the memory of these rows of `tensor`."""
        return bool(self.of(tensor).data_ptr() == self.weight.data_ptr())


def make_shares(
    name: str, parameter: nn.Parameter, ownership: Ownership, *, keeps_fp32: bool, on_host: bool
) -> Iterator[WeightShare]:
    """Yield the shards of fp32 parameter `name` that this rank updates.

    With `keeps_fp32` (the model computes in fp32) weights share the parameter's memory if possible. `on_host`
    copies them to host memory.
    """
    for rows in ownership.updated.get(name, ()):
        yield WeightShare(name, rows, _weight(parameter, rows, keeps_fp32=keeps_fp32, on_host=on_host))


def rows_of(tensor: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return `rows` of a local `tensor`, as a view."""
    return tensor.narrow(rows.dim, rows.at, rows.num_rows)


def _weight(parameter: nn.Parameter, rows: Rows, *, keeps_fp32: bool, on_host: bool) -> nn.Parameter:
    view = rows_of(parameter.detach(), rows)
    if on_host:
        return nn.Parameter(host_copies([view])[0])
    whole = rows.num_rows == parameter.shape[rows.dim]
    if whole and keeps_fp32:
        return parameter
    if whole or (keeps_fp32 and view.is_contiguous()):
        return nn.Parameter(view)
    return nn.Parameter(view.clone(memory_format=torch.contiguous_format))
